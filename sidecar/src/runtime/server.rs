//! Start and end of a sidecar: builds the parts, starts the threads, waits, drains.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mesh::directory::{self, Directory};
use prometheus::Registry;
use rustix::io::Errno;
use rustix::process::PidfdFlags;
use rustix::rand::GetRandomFlags;
use tiers::dram::{self, Dram};
use tiers::pool::{self, Pool};
use tiers::ssd::{OpenedDevice, SegmentLog};

use super::file_sizes::check_file_sizes;
use super::{Runtime, Terms};
use crate::catalog;
use crate::clients::handshakes::Handshakes;
use crate::clients::listener::{self, Listener, SocketUse};
use crate::clients::refusals::RefusedConnections;
use crate::config::{Disk, ServeConfig};
use crate::control::inbox::{Inbox, make_inbox};
use crate::control::{self, Parts};
use crate::copiers::Copiers;
use crate::core::{Core, NewTier, disk_tier, peer_tier};
use crate::error::{DrainError, StartError};
use crate::forecaster::Forecaster;
use crate::logging::LogLevel;
use crate::memory::pinning::Pinned;
use crate::memory::reserve;
use crate::pages::admin::{self, AdminPages, Ready};
use crate::pages::heartbeat::Heartbeat;
use crate::pages::metrics::Metrics;
use crate::pages::metrics::given_up::{self, GivenUpFile};
use crate::pages::progress::StartProgress;
use crate::pages::quotas::Levels;
use crate::ports::checksums::Checksums;
use crate::ports::disks::{self, DisksPort, FoundDisks};
use crate::ports::peers::{CatalogListing, PeersPort};
use crate::system::poller::{PollSource, Poller};
use crate::system::wake::EndSignal;

/// A working data thread makes its last turn at most this long after the grace.
const LAST_TURN_MAX: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Server {
    inbox: Arc<Inbox>,
    ended: Arc<EndSignal>,
    data: JoinHandle<()>,
    /// Disconnected after the data thread's last turn: it owns the sender.
    turning: Receiver<Infallible>,
    ready: Ready,
    http: SocketAddr,
    socket: PathBuf,
    control: control::ServedControl,
}

/// A descriptor of this process.
fn pidfd() -> Result<OwnedFd, Errno> {
    rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
}

fn random64() -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

// === impl Server ===

impl Server {
    /// Builds all parts, then serves. The admin pages are up first, so a slow start is visible. `log` is the
    /// level for requests of operators.
    #[expect(clippy::too_many_lines, reason = "each part once, in the order that they need each other")]
    pub fn start(config: &ServeConfig, log: LogLevel) -> Result<Self, StartError> {
        listener::raise_descriptor_limit();
        check_file_sizes(config)?;
        let registry = Registry::new();
        let ready: Ready = Arc::new(AtomicBool::new(false));
        let segment_bytes = dram::segment_bytes_for(config.dram.as_bytes());
        let progress = Arc::new(StartProgress::new(config.dram.as_bytes() / segment_bytes));
        let failed = |source| StartError::Admin { address: config.http, source };
        let catalog = catalog::SharedCatalog::default();
        let quotas = Levels::new(&registry, &config.quotas)?;
        let heartbeat = Heartbeat::new();
        let pages = AdminPages {
            heartbeat: heartbeat.clone(),
            last_turn: admin::last_turn(&registry)?,
            registry: registry.clone(),
            ready: Arc::clone(&ready),
            control_socket: config.control.socket.clone(),
            progress: Arc::clone(&progress),
        };
        let http = admin::start_pages(config.http, pages).map_err(failed)?;
        let epoch = random64().map_err(std::io::Error::from)?;
        let (dram, pool) = open_tier(config, segment_bytes, epoch)?;
        let metrics = Metrics::new(&registry, dram.config().pool_bytes)?.with_quotas(quotas.clone());
        let forecaster = Forecaster::start_thread(&registry, dram.config())?;
        let (inbox, asks) = make_inbox().map_err(std::io::Error::from)?;
        let ended = Arc::new(EndSignal::new().map_err(std::io::Error::from)?);
        let listener = Listener::bind(&config.socket, SocketUse::Engines, config.socket_group.as_deref())?;
        let control = control::Sockets::bind(&config.control)?;
        // After the listener refused a second sidecar: otherwise both would lock memory.
        let reserved = Arc::downgrade(&pool);
        let reserved = move |end| reserve::wait_reserved(&reserved, end);
        let too_little = config.too_little_for_gpu();
        let pinned =
            Pinned::start_thread(config.gpu, too_little, pool.shared_region(), reserved, metrics.pinning())?;
        reserve::start_reserving(&pool, &pinned, &progress)?;
        let copiers = Copiers::start_copiers(config.copy_threads, &pool, &pinned, &ended)?;
        let FoundDisks { opened, left_out } =
            disks::open_disks(&config.ssd, config.ssd_required, config.pool_path.is_some())?;
        count_given_up(&registry, &pool, &opened)?;
        let (disk_tier, disks) = start_disks(config, opened, &pool, &ended)?.unzip();
        let (peer_tier, peers) = start_mesh(config, epoch, &pool, (&inbox, &catalog), &ended)?.unzip();
        let core = Core::new(dram, &config.quotas, disk_tier.into_iter().chain(peer_tier));
        let core = begin_core(config, core, &pool, !left_out.is_empty());
        let mesh = peers.as_ref().map(PeersPort::asker);
        let metrics = add_metrics(config, disks.as_ref(), &left_out, &registry, metrics)?;
        let checksums = config
            .pool_path
            .as_ref()
            .map(|_| Checksums::start_threads(&pool, || ended.on_exit()))
            .transpose()?;
        let poller = watch(&inbox, &copiers, disks.as_ref(), checksums.as_ref(), peers.as_ref())
            .map_err(std::io::Error::from)?;
        let handshakes = Handshakes::new(listener, &poller, RefusedConnections::new(&registry)?)
            .map_err(std::io::Error::from)?;
        let terms = Terms {
            epoch,
            lease_ttl_ms: config.lease_ttl.as_millis(),
            pool_fd: engines_fd(config, &pool)?,
            pidfd: pidfd().map_err(std::io::Error::from)?,
        };
        let forecast = forecaster.counts();
        let parts =
            Parts { inbox: Arc::clone(&inbox), catalog: catalog.clone(), mesh, quotas, forecast, log };
        let runtime = Runtime::new(
            core,
            pool,
            progress,
            terms,
            copiers,
            handshakes,
            poller,
            metrics,
            catalog,
            heartbeat,
            (Arc::clone(&inbox), asks),
        );
        let runtime = runtime.with(disks, peers, checksums).with_forecaster(forecaster);
        let control = control.serve_sockets(parts, &registry)?;
        let guard = ended.on_exit();
        let (turns, turning) = mpsc::channel();
        let data = thread::Builder::new().name("pillion-data".into()).spawn(move || {
            let _guard = guard;
            runtime.run(turns);
        })?;
        ready.store(true, Ordering::Relaxed);
        Ok(Self { inbox, ended, data, turning, ready, http, socket: config.socket.clone(), control })
    }

    /// The address of the admin pages.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// The path of the engines' socket.
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// The TCP address of the control, if there is one.
    pub fn control(&self) -> Option<SocketAddr> {
        self.control.tcp()
    }

    /// The address of routers that ask for scores, if there is one.
    pub fn score(&self) -> Option<SocketAddr> {
        self.control.score()
    }

    /// A descriptor, readable once an operator has requested the end.
    pub fn asked(&self) -> BorrowedFd<'_> {
        self.control.end_signal()
    }

    /// A descriptor, readable once a required thread has ended.
    pub fn end_signal(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Stops accepting work, waits at most `grace` for the copies in flight, and removes the socket.
    pub fn drain(self, grace: Duration) -> Result<(), DrainError> {
        self.ready.store(false, Ordering::Relaxed);
        self.inbox.request_drain(grace);
        match self.turning.recv_timeout(grace + LAST_TURN_MAX) {
            Err(RecvTimeoutError::Timeout) => Err(DrainError::StandsStill),
            _ => self.data.join().map_err(|_| DrainError::Panicked),
        }
    }
}

/// A poller with all wake-ups of the data thread except those of engines.
fn watch(
    inbox: &Inbox,
    copiers: &Copiers,
    disks: Option<&DisksPort>,
    checksums: Option<&Checksums>,
    peers: Option<&PeersPort>,
) -> Result<Poller, Errno> {
    let poller = Poller::new()?;
    [(PollSource::Inbox, inbox.as_fd()), (PollSource::Copies, copiers.wake())]
        .into_iter()
        .chain(disks.map(|disks| (PollSource::Disks, disks.wake())))
        .chain(checksums.map(|checksums| (PollSource::Checksums, checksums.wake())))
        .chain(peers.map(|peers| (PollSource::Mesh, peers.wake())))
        .try_for_each(|(source, fd)| poller.add_source(source, fd))?;
    Ok(poller)
}

/// The SSD tier, if there are disks. Called before any slot of the pool is used: a disk's lock shows that a
/// dead sidecar has no transfer in flight between that disk and the pool.
fn start_disks(
    config: &ServeConfig,
    opened: Vec<(Disk, OpenedDevice)>,
    pool: &Pool,
    ended: &Arc<EndSignal>,
) -> Result<Option<(NewTier, DisksPort)>, StartError> {
    if opened.is_empty() {
        return Ok(None);
    }
    let log = SegmentLog::new(disks::log_config(&opened, config.dram.as_bytes()));
    let disks = DisksPort::start_devices(opened, pool, config.ssd_io, ended)?;
    Ok(Some((disk_tier(log, config.ssd_admission), disks)))
}

/// The tier of peers, if a mesh is configured.
fn start_mesh(
    config: &ServeConfig,
    epoch: u64,
    pool: &Pool,
    (inbox, catalog): (&Arc<Inbox>, &catalog::SharedCatalog),
    ended: &Arc<EndSignal>,
) -> Result<Option<(NewTier, PeersPort)>, StartError> {
    let Some(mesh) = &config.mesh else { return Ok(None) };
    let tier = peer_tier(Directory::new(directory::DirectoryConfig { seed: epoch, ..Default::default() }));
    let known = CatalogListing { inbox: Arc::clone(inbox), catalog: catalog.clone() };
    Ok(Some((tier, PeersPort::start_mesh(mesh, epoch, pool, known, ended)?)))
}

/// Configures the core by the options and the state of earlier lives. With `lacks_disks`, some disks with
/// blocks may be left out.
fn begin_core(config: &ServeConfig, core: Core, pool: &Pool, lacks_disks: bool) -> Core {
    let mut core = core.with_handover_ttl(config.handover_ttl.as_millis());
    if pool.former_epoch().is_some() {
        core.begin_opening();
    }
    if lacks_disks {
        core.leave_out_disks();
    }
    core
}

/// Counts the abandoned files of earlier sidecars.
fn count_given_up(
    registry: &Registry,
    pool: &Pool,
    opened: &[(Disk, OpenedDevice)],
) -> Result<(), prometheus::Error> {
    let logs =
        opened.iter().filter_map(|(_, opened)| opened.given_up()).map(|log| (GivenUpFile::Ssd, log.cause));
    given_up::count_given_up(
        registry,
        pool.given_up().map(|pool| (GivenUpFile::Pool, pool.cause)).into_iter().chain(logs),
    )
}

fn add_metrics(
    config: &ServeConfig,
    disks: Option<&DisksPort>,
    left_out: &[Disk],
    registry: &Registry,
    metrics: Metrics,
) -> Result<Metrics, prometheus::Error> {
    let at_work: Vec<_> = disks.iter().flat_map(|disks| disks.at_work()).collect();
    let metrics =
        if config.ssd.is_empty() { metrics } else { metrics.with_ssd(registry, &at_work, left_out)? };
    if config.mesh.is_some() { metrics.with_peers(registry) } else { Ok(metrics) }
}

/// The descriptor of the pool for engines.
fn engines_fd(config: &ServeConfig, pool: &Pool) -> Result<OwnedFd, tiers::TierError> {
    if let Some(view) = &config.pool_view {
        return pool.open_view(view);
    }
    if config.pool_path.is_some() {
        tracing::warn!(
            "an engine that runs as this sidecar's user, or as root, could overwrite blocks of other engines through \
             its descriptor of the pool file: run engines as another user, or pass --pool-view, the file's path on a \
             read-only mount"
        );
    }
    pool.read_only_fd()
}

fn open_tier(
    config: &ServeConfig,
    segment_bytes: u64,
    epoch: u64,
) -> Result<(Dram, Arc<Pool>), tiers::TierError> {
    let bytes = config.dram.as_bytes();
    let lease_ttl_ms = config.lease_ttl.as_millis();
    let tier = dram::DramConfig { pool_bytes: bytes, segment_bytes, lease_ttl_ms };
    let mut dram = Dram::unopened(tier, dram::HOLD_MS)?;
    let (path, hugepages) = (config.pool_path.clone(), config.hugepages);
    let pool = Pool::create(&pool::PoolConfig { bytes, segment_bytes, path, hugepages, epoch })?;
    dram.raise_generation(pool.first_generation());
    Ok((dram, Arc::new(pool)))
}
