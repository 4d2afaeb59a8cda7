//! The control thread: one runtime for all its tasks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

#[cfg(feature = "etcd")]
use super::etcd;
use super::shared::{ControlShared, Seen};
use super::wire::FollowReply;
use super::{ControlConfig, Members, NamespacesAnswer, blocks, follow, names, namespaces, serve};
use crate::MeshError;
use crate::digest::{Digest, DigestChange};
use crate::listed::BlocksAsk;
use crate::pace::GATHER;
use crate::sync::{lock_mutex, read_clock};

use crate::transport::PeerNumber;

/// The period of the membership's clock.
const TICK: Duration = Duration::from_millis(250);

/// Names resolved at the same time: each blocks a thread in the system's resolver.
const NAMES_MAX: usize = 32;

/// Commands of the caller. Their queue has no limit because its thread never waits.
pub(super) enum ControlCommand {
    /// Changes of blocks; true: they are not gathered while a follower waits.
    Publish(Vec<DigestChange>, bool),
    Promise(Vec<Digest>),
    Resync(PeerNumber),
    /// Asks a member for its best blocks.
    AskBlocks(PeerNumber, BlocksAsk),
    /// This node is about to leave.
    Leave,
    /// Asks members for their namespaces.
    Namespaces(oneshot::Sender<Vec<NamespacesAnswer>>),
    /// A request here waits for a block from a peer.
    Wait,
    Drain,
}

/// Does everything that can fail. Returns the body of the thread.
pub(super) fn prepare_loop(
    config: ControlConfig,
    listener: Option<std::net::TcpListener>,
    seen: Seen,
    orders: UnboundedReceiver<ControlCommand>,
) -> Result<impl FnOnce() + Send + 'static, MeshError> {
    let credentials = config.security.credentials()?;
    let unable = |source| MeshError::Os { doing: "start a runtime", source };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(NAMES_MAX).build().map_err(unable)?;
    let listener = {
        let _entered = runtime.enter();
        listener.map(TcpListener::from_std).transpose().map_err(unable)?
    };
    // The shared state starts tasks, and each shares it.
    let shared = ControlShared::new(config, credentials, seen, |shared, endpoint, address, anew| {
        tokio::spawn(follow::follow_endpoint(shared, endpoint, address, anew)).abort_handle()
    });
    Ok(move || {
        runtime.block_on(run_loop(shared, listener, orders));
        // The resolution of a name has a thread of its own; the runtime does not wait for it.
        runtime.shutdown_background();
    })
}

/// Runs until the caller drains.
async fn run_loop(
    shared: Arc<ControlShared>,
    listener: Option<TcpListener>,
    mut orders: UnboundedReceiver<ControlCommand>,
) {
    if let (Some(listener), Some(served)) = (listener, &shared.config.served) {
        let hello = FollowReply::hello(&shared.config, served);
        tokio::spawn(serve::accept_followers(Arc::clone(&shared), listener, hello));
    }
    tokio::spawn(follow::retry_dials(Arc::clone(&shared)));
    let leaving = Arc::new(Notify::new());
    let registrar: Option<JoinHandle<()>> = match &shared.config.members {
        Members::Static(peers) => {
            let peers: BTreeSet<&String> = peers.iter().collect();
            for peer in peers {
                tokio::spawn(names::follow_name(Arc::clone(&shared), peer.clone()));
            }
            None
        }
        #[cfg(feature = "etcd")]
        Members::Etcd(etcd) => {
            let leaving = Arc::clone(&leaving);
            Some(tokio::spawn(etcd::register_node(Arc::clone(&shared), etcd.clone(), leaving)))
        }
    };
    let mut clock = tokio::time::interval(TICK);
    let gathered = || tokio::time::Instant::from_std(read_clock() + GATHER);
    let mut seal = None;
    loop {
        let due = async {
            match seal {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            order = orders.recv() => match order {
                Some(ControlCommand::Publish(changes, at_once)) => {
                    lock_mutex(&shared.feed).apply(&changes);
                    if at_once && shared.any_waits() {
                        seal = None;
                        shared.seal_changes();
                    } else {
                        seal.get_or_insert_with(gathered);
                    }
                }
                Some(ControlCommand::Promise(promises)) => {
                    lock_mutex(&shared.feed).set_promises(promises);
                    seal.get_or_insert_with(gathered);
                }
                Some(ControlCommand::Resync(number)) => shared.resync(number),
                Some(ControlCommand::AskBlocks(number, ask)) => {
                    tokio::spawn(blocks::ask_blocks(Arc::clone(&shared), number, ask));
                }
                Some(ControlCommand::Leave) => drop(shared.leaving.send_replace(true)),
                Some(ControlCommand::Namespaces(reply)) => {
                    tokio::spawn(namespaces::ask_all(Arc::clone(&shared), reply));
                }
                Some(ControlCommand::Wait) => shared.waits.send_replace(()),
                Some(ControlCommand::Drain) | None => break,
            },
            () = due => {
                seal = None;
                shared.seal_changes();
            }
            _ = clock.tick() => shared.tick(),
        }
    }
    shared.unfollow_all();
    if let Some(registrar) = registrar {
        leaving.notify_one();
        let _ = tokio::time::timeout(shared.config.limits.etcd, registrar).await;
    }
}
