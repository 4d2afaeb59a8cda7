//! The thread for copies of blocks into the staging segment, at the sidecar's request.
//!
//! It sleeps on the session's futex while there is no request, and needs no deadline: the sidecar has one. An
//! invalid request ends the connection.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use copy_engine::{EngineMemory, Staging};
use shm_protocol::message::StageRequest;
use shm_protocol::ring::Consumer;
use shm_protocol::session::{RegionRing, Ring};
use shm_protocol::wait;

use super::copies::RankCopies;
use super::link::Link;
use crate::client::describe_breach;
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};

/// The longest sleep before the thread checks that the sidecar is still there: a dead one wakes no one.
const SLEEP: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Stager {
    copies: Arc<RankCopies>,
    staging: Staging,
    notices: Arc<Notices>,
}

/// Starts the thread, which serves one connection after the other. It ends once its sender is dropped and the
/// last connection is lost.
pub(super) fn spawn_stager(
    copies: &Arc<RankCopies>,
    staging: Staging,
    notices: &Arc<Notices>,
) -> std::io::Result<(Sender<Arc<Link>>, JoinHandle<()>)> {
    let (sender, links): (_, Receiver<Arc<Link>>) = channel();
    let stager = Stager { copies: Arc::clone(copies), staging, notices: Arc::clone(notices) };
    let named = std::thread::Builder::new().name("pillion-stager".into());
    let thread = named.spawn(move || {
        links.iter().for_each(|link| stager.serve_link(&link));
        if matches!(stager.copies.memory(), EngineMemory::Cuda(_)) && !stager.copies.frees() {
            // The driver may be gone already.
            std::mem::forget(stager);
        }
    })?;
    Ok((sender, thread))
}

// === impl Stager ===

impl Stager {
    /// Answers the requests of one connection until it ends.
    fn serve_link(&self, link: &Link) {
        let region = link.connection.region();
        let mut requests = Consumer::new(link.connection.memory.ring(Ring::Completion));
        while !link.connection.is_lost() {
            let asked = match self.take_requests(&mut requests) {
                Ok(asked) => asked,
                Err(text) => {
                    self.notices.say(NoticeCause::Protocol, describe_breach(&text));
                    return link.connection.hang_up();
                }
            };
            if asked.is_empty() {
                wait::sleep_turn(region, SLEEP, || requests.ready() != Ok(0));
                continue;
            }
            let whole = self.staging.fill(self.copies.memory(), &asked);
            link.post_staged(asked.iter().copied().zip(whole));
        }
    }

    /// Takes the waiting requests. Fails if a slot or a block does not exist, or a slot is named twice.
    fn take_requests(&self, requests: &mut Consumer<RegionRing>) -> Result<Vec<StageRequest>, String> {
        requests.ready().map_err(|error| error.to_string())?;
        let mut asked: Vec<StageRequest> = Vec::new();
        while let Some(stage) = requests.pop().map(|slot| StageRequest::decode_slot(&slot)) {
            let taken = asked.iter().any(|other| other.slot == stage.slot);
            if stage.slot >= self.staging.slots() || taken || !self.copies.memory().holds(stage.block) {
                return Err(format!(
                    "it requests block {} in slot {}, which do not exist",
                    stage.block, stage.slot
                ));
            }
            asked.push(stage);
        }
        requests.release();
        Ok(asked)
    }
}
