//! The data thread: reads the rings of all sessions, passes events to the core, carries out its actions, and
//! sleeps without work.
//!
//! The module [`turn`] has the order of a turn.

mod actions;
mod admission;
mod asks;
mod checksums;
mod disks;
mod file_sizes;
mod opening;
mod peers;
mod rest;
pub mod server;
mod sources;
pub mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tiers::opener::Opener;
use tiers::pool::Pool;

use crate::catalog;
use crate::clients::handshakes::Handshakes;
use crate::clients::session::ClientSession;
use crate::control::inbox::{Inbox, InboxAsks};
use crate::copiers::{Copiers, Finished};
use crate::core::{Action, Core, CoreEvent, SessionId, Took};
use crate::forecaster::Forecaster;
use crate::pages::heartbeat::Heartbeat;
use crate::pages::metrics::{CloseReason, Metrics};
use crate::pages::progress::StartProgress;
use crate::ports::checksums::Checksums;
use crate::ports::disks::DisksPort;
use crate::ports::peers::PeersPort;
use crate::system::clock::{Clock, count_millis};
use crate::system::poller::{PollSource, Poller};

use self::admission::Entrant;
use self::asks::AskTask;
use self::turn::Turn;

/// Interval of ticks of the core, and the largest age of a heartbeat while sessions exist.
const TICK: Duration = Duration::from_millis(100);

/// Time before the end of the grace at which peers take no more blocks: their reads end by themselves.
const LEFT_BEFORE: Duration = Duration::from_secs(1);

/// The sidecar's part of each welcome.
#[derive(Debug)]
pub struct Terms {
    /// Random id of this life.
    pub epoch: u64,
    /// Life of an unused lease.
    pub lease_ttl_ms: u64,
    /// The pool, opened read-only.
    pub pool_fd: OwnedFd,
    /// This process: readable once it has ended and all its files are closed.
    pub pidfd: OwnedFd,
}

/// The state of the data thread.
#[derive(Debug)]
pub struct Runtime {
    core: Core,
    pool: Arc<Pool>,
    /// Brings the pool into service; `None` once all of it is.
    opener: Option<Opener>,
    /// Only with a pool file.
    checksums: Option<Checksums>,
    /// True while blocks of earlier lives may still wait for verification.
    adopting: bool,
    progress: Arc<StartProgress>,
    terms: Terms,
    copiers: Copiers,
    disks: Option<DisksPort>,
    peers: Option<PeersPort>,
    forecaster: Option<Forecaster>,
    handshakes: Handshakes,
    poller: Poller,
    metrics: Metrics,
    catalog: catalog::SharedCatalog,
    heartbeat: Heartbeat,
    inbox: Arc<Inbox>,
    asks: InboxAsks,
    /// The unfinished part of a request.
    task: Option<AskTask>,
    clock: Clock,
    now: Duration,
    sessions: BTreeMap<SessionId, ClientSession>,
    /// Clients with GPU memory still being opened.
    opening: BTreeMap<SessionId, Entrant>,
    /// Engines with a stuck rank.
    parked: BTreeSet<String>,
    next_session: SessionId,
    /// Actions of the core not yet carried out.
    out: Vec<Action>,
    /// Sessions to close after the current actions.
    closing: Vec<(SessionId, CloseReason, String)>,
    /// The pool file was truncated.
    lost: bool,
    /// Copies refused by their threads.
    refused: Vec<Finished>,
    events: Vec<PollSource>,
    /// True if the core got an event since the last `Drained`.
    touched: bool,
    next_tick: Duration,
    last_beat_ms: u64,
    last_work: Duration,
    last_io: Duration,
    fences_since: Option<Duration>,
    end_by: Option<Duration>,
    /// True while peers may take blocks that no other pod has.
    leaving: bool,
}

// === impl Runtime ===

impl Runtime {
    /// The state of a data thread; [`Runtime::run`] starts it.
    #[expect(clippy::too_many_arguments, reason = "called once, by the server that builds the parts")]
    pub fn new(
        core: Core,
        pool: Arc<Pool>,
        progress: Arc<StartProgress>,
        terms: Terms,
        copiers: Copiers,
        handshakes: Handshakes,
        poller: Poller,
        metrics: Metrics,
        catalog: catalog::SharedCatalog,
        heartbeat: Heartbeat,
        (inbox, asks): (Arc<Inbox>, InboxAsks),
    ) -> Self {
        Self {
            core,
            pool,
            opener: Some(Opener::default()),
            checksums: None,
            adopting: true,
            progress,
            terms,
            copiers,
            disks: None,
            peers: None,
            forecaster: None,
            handshakes,
            poller,
            metrics,
            catalog,
            heartbeat,
            inbox,
            asks,
            task: None,
            clock: Clock::start_now(),
            now: Duration::ZERO,
            sessions: BTreeMap::new(),
            opening: BTreeMap::new(),
            parked: BTreeSet::new(),
            next_session: 1,
            out: Vec::new(),
            closing: Vec::new(),
            lost: false,
            refused: Vec::new(),
            events: Vec::new(),
            touched: false,
            next_tick: Duration::ZERO,
            last_beat_ms: 0,
            last_work: Duration::ZERO,
            last_io: Duration::ZERO,
            fences_since: None,
            end_by: None,
            leaving: false,
        }
    }

    /// Adds disks and a mesh, if the core has tiers for them, and the checksums of a pool file.
    pub fn with(
        mut self,
        disks: Option<DisksPort>,
        peers: Option<PeersPort>,
        checksums: Option<Checksums>,
    ) -> Self {
        (self.disks, self.peers, self.checksums) = (disks, peers, checksums);
        self.show_tiers();
        self
    }

    /// Adds the forecaster, which gets every ended request.
    pub fn with_forecaster(mut self, forecaster: Forecaster) -> Self {
        self.forecaster = Some(forecaster);
        self
    }

    /// Serves until asked to end, then until the copies in flight have ended or their grace is over. Drops
    /// `turns` then.
    pub fn run(mut self, turns: Sender<Infallible>) {
        rest::sharpen_timers();
        let mut turn = Turn::default();
        while !self.has_ended() {
            self.run_turn(&mut turn);
            let announced = self.announce_blocks();
            let asked = self.answer_asks();
            self.rest_until_work(turn.worked() || announced || asked);
        }
        drop(turns);
        self.sessions.values().filter_map(ClientSession::rank).for_each(|rank| rank.stop());
        self.publish_stats();
        self.show_tiers();
        self.copiers.end_if_stuck();
    }

    fn publish_stats(&self) {
        // Before the saved blocks: a reader that sees a saved block also sees the number of missing
        // checksums.
        if let Some(checksums) = &self.checksums {
            self.metrics.publish_unsummed(checksums.unsummed());
        }
        self.metrics.publish(&self.core.stats());
        self.metrics.publish_quotas(self.core.quotas_used());
    }

    fn show_tiers(&mut self) {
        self.metrics.publish_tiers(self.core.tier_stats());
        self.show_disks();
        self.show_peers();
    }

    fn show_checks(&self) {
        self.metrics.publish_differences(self.core.largest_differences());
        self.catalog.lock().show_engines(self.core.barred(), self.core.standings());
    }

    fn has_ended(&mut self) -> bool {
        let Some(end_by) = self.end_by else {
            if let Some(grace) = self.inbox.grace() {
                self.now = self.clock.now();
                self.end_by = Some(self.now + grace);
                self.handshakes.stop_listening();
                self.handle(CoreEvent::Drain);
                if !self.lost {
                    self.core.write_all(&mut self.out);
                    self.apply();
                }
                self.leaving = !self.lost && self.core.begin_leaving();
                let part = if self.leaving { PeersPort::leave } else { PeersPort::drain };
                self.peers.iter().for_each(part);
            }
            return false;
        };
        if self.leaving && (!self.core.is_leaving(self.now) || self.now + LEFT_BEFORE >= end_by) {
            self.leaving = false;
            self.peers.iter().for_each(PeersPort::drain);
        }
        let summing = self.checksums.as_ref().is_some_and(|checksums| checksums.unsummed() > 0);
        let busy = self.leaving || self.core.busy() || self.copiers.running() > 0 || summing;
        if busy && self.now >= end_by {
            tracing::warn!("copies, writes and checksums in flight did not end within the grace period");
        }
        !busy || self.now >= end_by
    }

    /// Makes one turn: reads all sources and carries out the results.
    fn run_turn(&mut self, turn: &mut Turn) {
        self.now = self.clock.now();
        self.heartbeat.beat();
        while turn.step(self) {}
        let waits = self.core.next_look_ms().is_some();
        if let Some(peers) = &mut self.peers {
            peers.flush_changes();
            if waits {
                peers.announce_wait(self.now);
            }
        }
        self.beat();
        if turn.worked() {
            self.publish_stats();
        }
    }

    /// Announces findable blocks to each subscribed engine while its ring has room. Returns true if more are
    /// left.
    fn announce_blocks(&mut self) -> bool {
        let Self { core, sessions, closing, .. } = self;
        let mut goes_on = false;
        for (&id, session) in sessions {
            let Some(asked) = session.asked_to_announce() else { continue };
            match session.room_to_announce() {
                Ok(room) => {
                    goes_on |= session.push_announcements(core.announce(id, asked, room));
                    goes_on |= core.announces(id);
                }
                Err(violation) => closing.push((id, CloseReason::Malformed, violation.to_string())),
            }
        }
        self.close_sessions();
        goes_on
    }

    /// Writes the heartbeat to all sessions, once a millisecond at most: a changed word costs the engine's
    /// cores a cache miss.
    fn beat(&mut self) {
        let now_ms = count_millis(self.now);
        if now_ms != self.last_beat_ms {
            self.last_beat_ms = now_ms;
            self.sessions.values().for_each(|session| session.beat(now_ms));
        }
    }

    /// Checks whether the pool has lost bytes. After a loss no block is found or kept, the node leaves the
    /// mesh, and transfers in flight fail, as at the sidecar's end. The process stays until it is restarted:
    /// GPUs and NICs may have the lost pages locked until it ends.
    fn look_at_pool(&mut self) {
        if self.lost || self.pool.is_whole() {
            return;
        }
        self.lost = true;
        self.metrics.pool_lost();
        if let Err(error) = self.pool.disown() {
            tracing::error!(%error, "the pool file cannot be marked as lost: remove it before a sidecar starts with it");
        }
        tracing::error!(
            "the pool file was truncated, or memory was taken from it, while in use: no block is kept or found any \
             more. Restart this sidecar, and let no other program write to the file"
        );
        self.handle(CoreEvent::Drain);
        self.peers.iter().for_each(PeersPort::drain);
    }

    /// Passes one event to the core and carries out its actions.
    fn handle(&mut self, event: CoreEvent) {
        self.touched |= turn::touches_saves(&event);
        self.core.respond(self.now, event, &mut self.out);
        self.apply();
        self.time();
        self.core.go_on(self.now, &mut self.out);
        self.apply();
        self.time();
        if let Some(forecaster) = &self.forecaster {
            self.core.drain_ended().for_each(|ended| forecaster.record_request(ended));
        }
        self.close_sessions();
    }

    /// Measures the finished operations.
    fn time(&mut self) {
        let mut over = self.core.drain_over().peekable();
        if over.peek().is_some() {
            let now = self.clock.now();
            over.for_each(|Took { what, since }| self.metrics.took(what, now.saturating_sub(since)));
        }
    }

    /// Closes sessions. The core's reaction may close further ones.
    fn close_sessions(&mut self) {
        while let Some((id, reason, text)) = self.closing.pop() {
            let Some(session) = self.sessions.remove(&id) else { continue };
            self.poller.remove(&session.doorbell);
            self.poller.remove(&session.socket);
            session.process.iter().for_each(|process| self.poller.remove(process));
            if let Some(rank) = session.rank() {
                rank.stop();
            }
            drop(session);
            self.catalog.lock().leave_session(id);
            self.metrics.session_closed(reason);
            match reason {
                CloseReason::HangUp => tracing::info!(session = id, "session ended"),
                // The rank's thread has logged the reason.
                CloseReason::Parked => {}
                CloseReason::Malformed | CloseReason::Rejected => {
                    tracing::warn!(session = id, reason = text, "session closed");
                }
            }
            self.touched = true;
            self.core.handle(self.now, CoreEvent::Disconnected { session: id }, &mut self.out);
            self.apply();
            self.time();
        }
    }
}
