//! The router as an observer of a mesh: it follows the members as a pod does, without a pool of its own.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use clap::Args;
use mesh::control::{self, Control, ControlConfig, Members};
use mesh::transport::{BootId, NodeId};
use sidecar::config::{MeshOptions, Size};
use tokio::sync::watch::{self, Receiver};
use tokio::time::{Instant, sleep};

use super::listed::EngineList;
use super::members::MeshMembers;

/// The pause between two questions for the members' namespaces, and after a change of members.
const ASK_PAUSE: Duration = Duration::from_secs(10);
pub(super) const CHANGE_PAUSE: Duration = Duration::from_millis(200);
/// Members are asked sooner while no namespace is known: an engine has one once it is connected.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(1);

/// Options of the mesh that a router follows.
#[derive(Args, Clone, Debug)]
pub(super) struct FollowOptions {
    /// A sidecar's --mesh-listen, or a name of several: the router follows their mesh; repeat it for each
    ///
    /// It also asks engines of --engine-url, and sends unknown conversations where their blocks lie.
    #[arg(long, env = "PILLION_MESH_PEER", value_delimiter = ',', value_name = "HOST:PORT")]
    pub(super) mesh_peer: Vec<String>,
    /// Find the mesh's sidecars in etcd, as they do, instead of by --mesh-peer; repeat it for each of its members
    ///
    /// The router registers nothing there: its user needs only to read /pillion/NAME/nodes/ of its --mesh-name.
    #[arg(
        long,
        env = "PILLION_ETCD",
        value_delimiter = ',',
        conflicts_with = "mesh_peer",
        value_name = "URL"
    )]
    pub(super) etcd: Vec<String>,
    /// CA certificates, in PEM, that etcd's certificate must be signed by
    #[arg(long, env = "PILLION_ETCD_CA", requires = "etcd", value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// The router's certificate for etcd, in PEM; requires --etcd-key
    #[arg(long, env = "PILLION_ETCD_CERT", requires_all = ["etcd", "etcd_key"], value_name = "FILE")]
    etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert, in PEM
    #[arg(long, env = "PILLION_ETCD_KEY", requires_all = ["etcd", "etcd_cert"], value_name = "FILE")]
    etcd_key: Option<PathBuf>,
    /// User name at etcd; requires --etcd-password-file
    #[arg(long, env = "PILLION_ETCD_USER", requires_all = ["etcd", "etcd_password_file"], value_name = "NAME")]
    etcd_user: Option<String>,
    /// File with the password of --etcd-user
    #[arg(long, env = "PILLION_ETCD_PASSWORD_FILE", requires_all = ["etcd", "etcd_user"], value_name = "FILE")]
    etcd_password_file: Option<PathBuf>,
    /// Name of the mesh
    #[arg(long, env = "PILLION_MESH_NAME", default_value = control::MESH_DEFAULT, value_name = "NAME")]
    mesh_name: String,
    /// The router's certificate for the mesh, in PEM; requires --mesh-key, --mesh-ca and --mesh-cert-name
    #[arg(long, env = "PILLION_MESH_CERT", value_name = "FILE")]
    mesh_cert: Option<PathBuf>,
    /// Private key of --mesh-cert, in PEM
    #[arg(long, env = "PILLION_MESH_KEY", value_name = "FILE")]
    mesh_key: Option<PathBuf>,
    /// CA certificates, in PEM, that members' certificates must be signed by
    #[arg(long, env = "PILLION_MESH_CA", value_name = "FILE")]
    mesh_ca: Option<PathBuf>,
    /// DNS name or IP address that the certificate of every member carries
    #[arg(long, env = "PILLION_MESH_CERT_NAME", value_name = "NAME")]
    mesh_cert_name: Option<String>,
    /// Follow a mesh without encryption and authentication
    #[arg(long, env = "PILLION_MESH_PLAINTEXT", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "true|false")]
    mesh_plaintext: bool,
    /// Memory for the directory of the blocks that members keep, about 2.4 bytes a block
    #[arg(long, env = "PILLION_MESH_DIRECTORY_SIZE", default_value_t = Size::new(control::DIRECTORY_BYTES_DEFAULT as u64), value_name = "SIZE")]
    mesh_directory_size: Size,
}

/// The mesh of a router; clones are one.
#[derive(Clone, Debug)]
pub(super) struct Observer {
    members: Arc<RwLock<MeshMembers>>,
    /// Changes with the members or their engines.
    changed: watch::Sender<()>,
    /// No engine is asked for tokens before this time.
    tokens_after: Arc<Mutex<Option<Instant>>>,
}

// === impl FollowOptions ===

impl FollowOptions {
    /// True if the router follows a mesh.
    pub(super) fn has_mesh(&self) -> bool {
        !self.mesh_peer.is_empty() || !self.etcd.is_empty()
    }

    fn complete(&self) -> anyhow::Result<ControlConfig> {
        let mesh = MeshOptions {
            cert: self.mesh_cert.clone(),
            key: self.mesh_key.clone(),
            ca: self.mesh_ca.clone(),
            cert_name: self.mesh_cert_name.clone(),
            plaintext: Some(self.mesh_plaintext),
            etcd: self.etcd.clone(),
            etcd_ca: self.etcd_ca.clone(),
            etcd_cert: self.etcd_cert.clone(),
            etcd_key: self.etcd_key.clone(),
            etcd_user: self.etcd_user.clone(),
            etcd_password_file: self.etcd_password_file.clone(),
            ..MeshOptions::default()
        };
        let security = mesh.security()?;
        let boot = BootId(draw_life());
        // A name of no pod, different for each router.
        let node = NodeId::new(format!("router-{:016x}", boot.0))?;
        let members = match self.etcd.is_empty() {
            true => Members::Static(self.mesh_peer.clone()),
            false => mesh.registered()?,
        };
        Ok(ControlConfig {
            mesh: self.mesh_name.clone(),
            directory_bytes: self.mesh_directory_size.as_bytes() as usize,
            ..ControlConfig::observing((node, boot), members, security)
        })
    }
}

fn draw_life() -> NonZeroU64 {
    NonZeroU64::new(RandomState::new().build_hasher().finish()).unwrap_or(NonZeroU64::MIN)
}

// === impl Observer ===

impl Observer {
    /// A mesh without members so far.
    pub(super) fn new(has_authorities: bool) -> Self {
        let members = Arc::new(RwLock::new(MeshMembers::new(has_authorities)));
        Self { members, changed: watch::Sender::new(()), tokens_after: Arc::default() }
    }

    /// Starts to follow the members of the options. No failure of a member ends it.
    pub(super) fn start_control(&self, options: &FollowOptions) -> anyhow::Result<Control> {
        let (members, changed) = (Arc::clone(&self.members), self.changed.clone());
        let apply = move |event| {
            if members.write().unwrap_or_else(PoisonError::into_inner).apply_event(event) {
                changed.send_replace(());
            }
        };
        Ok(Control::start(options.complete()?, apply)?)
    }

    pub(super) fn members(&self) -> RwLockReadGuard<'_, MeshMembers> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn members_mut(&self) -> RwLockWriteGuard<'_, MeshMembers> {
        self.members.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engines of all members.
    pub(super) fn engines(&self) -> EngineList {
        self.members().engines()
    }

    /// Changes with the members or their engines.
    pub(super) fn changes(&self) -> Receiver<()> {
        self.changed.subscribe()
    }

    /// Returns true if engines may be asked for the tokens of a prompt.
    pub(super) fn may_ask_tokens(&self, now: Instant) -> bool {
        self.tokens_after.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|after| after <= now)
    }

    /// Asks no engine for tokens before a time.
    pub(super) fn ask_no_tokens(&self, before: Instant) {
        *self.tokens_after.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    }

    /// Keeps namespaces and filters up to date, forever.
    pub(super) async fn attend_members(&self, control: Control) {
        let mut changes = self.changes();
        loop {
            let overfull = self.members_mut().take_overfull();
            overfull.into_iter().for_each(|peer| control.resync(peer));
            if let Ok(answers) = control.asker().ask_members().await {
                self.members_mut().set_namespaces(&answers);
            }
            let pause = if self.members().spaces().is_empty() { UNKNOWN_PAUSE } else { ASK_PAUSE };
            tokio::select! {
                () = sleep(pause) => {}
                _ = changes.changed() => sleep(CHANGE_PAUSE).await,
            }
        }
    }
}
