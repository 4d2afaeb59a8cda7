//! The data thread: reads every session's ring, asks the core, carries its actions out, and sleeps when there is
//! nothing to do.
//!
//! One turn takes, in this order: ends of copies, of transfers, and what the mesh says; every ring up to the tail seen after them; `Drained` for every
//! scheduler whose ring was read so far, so that a CANCEL posted before the overwriting step is known before its block is
//! committed; fence words.

mod actions;
mod checksums;
mod disks;
mod doorway;
mod opening;
mod peers;
mod rest;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::layout::QUERY_KEYS;
use tiers::opener::Opener;
use tiers::pool::Pool;

use crate::catalog;
use crate::checksums::Checksums;
use crate::clock::{Clock, millis};
use crate::copiers::{Copiers, Finished};
use crate::disks::Disks;
use crate::engine::{Action, Core, Event, SessionId};
use crate::greeter::Greeter;
use crate::metrics::{CloseReason, Metrics};
use crate::peers::Peers;
use crate::poller::{Poller, Source};
use crate::progress::Progress;
use crate::server::Control;
use crate::session::{Session, Violation};

use self::doorway::Entrant;

/// Keys and block ids that one session's messages may name before the next session has its turn: a long request's, or one
/// QUERY of any size. A message costs one more than it names.
const ROUND_COST: usize = 8192;
/// The same for a whole turn of an engine that is alone at work; what is left in the ring waits for the next. Some 10 ms of searching,
/// after which new messages of every session are looked at again. Of several engines each has its part of one round instead: an
/// engine waits 2 ms for an answer, and a turn of all the others must be over well before that.
const TURN_COST: usize = 2 * QUERY_KEYS;
/// How often the core is told that time passed, and the most that a heartbeat ages while sessions exist.
const TICK: Duration = Duration::from_millis(100);

/// What every peer is told.
#[derive(Debug)]
pub struct Terms {
    /// Random id of this life.
    pub epoch: u64,
    /// Life of an unused lease.
    pub lease_ttl_ms: u64,
    /// The pool, opened for reading only.
    pub pool_fd: OwnedFd,
    /// This process: readable once it and all its files are gone.
    pub pidfd: OwnedFd,
}

/// All that the data thread owns.
#[derive(Debug)]
pub struct Runtime {
    core: Core,
    pool: Arc<Pool>,
    /// What of the pool is in service; `None` once all is.
    opener: Option<Opener>,
    /// Of a pool file.
    checksums: Option<Checksums>,
    /// Blocks of earlier lives are verified, or may be still.
    adopting: bool,
    progress: Arc<Progress>,
    terms: Terms,
    copiers: Copiers,
    disks: Option<Disks>,
    peers: Option<Peers>,
    greeter: Greeter,
    poller: Poller,
    metrics: Metrics,
    catalog: catalog::Shared,
    control: Arc<Control>,
    clock: Clock,
    now: Duration,
    sessions: BTreeMap<SessionId, Session>,
    /// Peers whose GPU's memory is being opened.
    opening: BTreeMap<SessionId, Entrant>,
    /// Engines with a rank that is parked.
    parked: BTreeSet<String>,
    next_session: SessionId,
    /// Actions of the core that have not been carried out.
    out: Vec<Action>,
    /// Sessions to close once the actions at hand are done.
    closing: Vec<(SessionId, CloseReason, String)>,
    /// The pool file was cut.
    lost: bool,
    /// Copies that ended without ever reaching a thread.
    refused: Vec<Finished>,
    events: Vec<Source>,
    /// Whether the core was given anything since the last `Drained`.
    touched: bool,
    /// Sessions with messages that this turn had no time for.
    backlog: Vec<SessionId>,
    next_tick: Duration,
    last_beat_ms: u64,
    last_work: Duration,
    last_io: Duration,
    fences_since: Option<Duration>,
    end_by: Option<Duration>,
}

// === impl Runtime ===

impl Runtime {
    /// A data thread's state; [`Runtime::run`] makes it live.
    #[expect(clippy::too_many_arguments, reason = "called once, by the server that builds the parts")]
    pub fn new(
        core: Core,
        pool: Arc<Pool>,
        progress: Arc<Progress>,
        terms: Terms,
        copiers: Copiers,
        greeter: Greeter,
        poller: Poller,
        metrics: Metrics,
        catalog: catalog::Shared,
        control: Arc<Control>,
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
            greeter,
            poller,
            metrics,
            catalog,
            control,
            clock: Clock::start(),
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
            backlog: Vec::new(),
            next_tick: Duration::ZERO,
            last_beat_ms: 0,
            last_work: Duration::ZERO,
            last_io: Duration::ZERO,
            fences_since: None,
            end_by: None,
        }
    }

    /// The same with disks and in a mesh, as the core has parts for them, and with checksums of a pool file's blocks.
    pub fn with(mut self, disks: Option<Disks>, peers: Option<Peers>, checksums: Option<Checksums>) -> Self {
        (self.disks, self.peers, self.checksums) = (disks, peers, checksums);
        self.show_disks();
        self
    }

    /// Serves until asked to end, and then until the copies in flight have ended or their grace has.
    pub fn run(mut self) {
        rest::sharpen_timers();
        while !self.ended() {
            let worked = self.turn();
            self.rest(worked);
        }
        self.sessions.values().filter_map(Session::rank).for_each(|rank| rank.stop());
        self.publish();
        self.show_disks();
        self.show_peers();
        self.copiers.end();
    }

    fn publish(&self) {
        // Before the blocks that were saved: who has seen those sees whether they have their checksums.
        if let Some(checksums) = &self.checksums {
            self.metrics.publish_unsummed(checksums.unsummed(), checksums.given_up());
        }
        self.metrics.publish(&self.core.stats());
        self.metrics.publish_quotas(self.core.quotas_used());
    }

    fn show_checks(&self) {
        self.metrics.publish_differences(self.core.largest_differences());
        self.catalog.lock().show_barred(self.core.barred());
    }

    fn ended(&mut self) -> bool {
        let Some(end_by) = self.end_by else {
            if let Some(grace) = self.control.grace() {
                self.now = self.clock.now();
                self.end_by = Some(self.now + grace);
                self.greeter.close();
                self.handle(Event::Drain);
                self.peers.iter().for_each(Peers::drain);
            }
            return false;
        };
        let summing = self.checksums.as_ref().is_some_and(|checksums| checksums.unsummed() > 0);
        let busy = self.core.busy() || self.copiers.running() > 0 || summing;
        if busy && self.now >= end_by {
            tracing::warn!("copies, writes and checksums in flight did not end within the grace period");
        }
        !busy || self.now >= end_by
    }

    /// One look at everything in shared memory; whether there was anything to do.
    fn turn(&mut self) -> bool {
        self.now = self.clock.now();
        let mut worked = self.take_copied();
        worked |= self.take_rank_news();
        worked |= self.take_transfers();
        worked |= self.take_checksums();
        worked |= self.hear_peers();
        worked |= self.read_rings();
        if std::mem::take(&mut self.touched) {
            self.report_drained();
            worked = true;
        }
        worked |= self.read_fences();
        worked |= self.catch_up();
        worked |= self.open_pool();
        if self.now >= self.next_tick {
            self.next_tick = self.now + TICK;
            self.look_at_pool();
            self.handle(Event::Tick);
            self.show_disks();
            self.show_peers();
            self.show_checks();
            self.metrics.publish_holders(self.core.holders());
            self.metrics.publish_parked(self.copiers.parked());
            if self.serves_parked_alone() {
                self.copiers.end();
            }
        } else if self.core.next_look_ms().is_some_and(|at| millis(self.now) >= at) {
            self.handle(Event::Tick);
        }
        self.peers.iter_mut().for_each(Peers::flush);
        self.beat();
        if worked {
            self.publish();
        }
        worked
    }

    /// Shows every engine that the sidecar lives; a word that changes costs the engine's cores a cache miss.
    fn beat(&mut self) {
        let now_ms = millis(self.now);
        if now_ms != self.last_beat_ms {
            self.last_beat_ms = now_ms;
            self.sessions.values().for_each(|session| session.beat(now_ms));
        }
    }

    /// Nothing is found in a pool that has lost bytes, and nothing kept, as at the sidecar's end; what is under way fails. The
    /// sidecar lives on, and is the next life's to mend: GPUs and NICs may have the lost pages locked until this one ends.
    fn look_at_pool(&mut self) {
        if self.lost || self.pool.is_whole() {
            return;
        }
        self.lost = true;
        self.metrics.pool_lost();
        if let Err(error) = self.pool.disown() {
            tracing::error!(%error, "remove the pool file before a sidecar is started on it");
        }
        tracing::error!(
            "the pool file was cut, or memory taken from it, while it is in use: nothing is kept or found any more. Start this \
             sidecar again, and let nobody write to the file"
        );
        self.handle(Event::Drain);
    }

    fn take_copied(&mut self) -> bool {
        let mut worked = false;
        while let Some(Finished { copy, ok }) = self.refused.pop().or_else(|| self.copiers.finished()) {
            if !ok {
                self.look_at_pool();
            }
            self.handle(Event::Copied { copy, ok });
            worked = true;
        }
        while let Some((save, mut found)) = self.copiers.compared() {
            self.look_at_pool();
            if self.lost {
                // Its bytes may be none of the engine's: nobody is judged by them.
                found.differing = 0;
            }
            self.handle(Event::Compared { save, found });
            worked = true;
        }
        worked
    }

    /// Reads every ring up to its tail as seen now, or as far as its turn's cost allows, in rounds, so that no session
    /// waits for a busy one's end.
    fn read_rings(&mut self) -> bool {
        let turn_cost = match self.core.at_work() {
            0 | 1 => TURN_COST,
            engines => ROUND_COST.div_ceil(engines),
        };
        let mut open = Vec::new();
        self.backlog.clear();
        for (&id, session) in &mut self.sessions {
            match session.look() {
                Ok(0) => {}
                Ok(_) => open.push((id, turn_cost)),
                Err(violation) => self.closing.push((id, CloseReason::Malformed, violation.to_string())),
            }
        }
        self.close_sessions();
        let worked = !open.is_empty();
        while !open.is_empty() {
            open.retain_mut(|(id, left)| match self.read_round(*id, left) {
                Ok(more) => more,
                Err(violation) => {
                    let id = *id;
                    self.closing.push((id, CloseReason::Malformed, violation.to_string()));
                    self.close_sessions();
                    false
                }
            });
        }
        worked
    }

    /// Handles some messages of a session, `left` being what they may still cost; whether there is more to do this turn.
    fn read_round(&mut self, id: SessionId, left: &mut usize) -> Result<bool, Violation> {
        let round_end = left.saturating_sub(ROUND_COST);
        while *left > round_end {
            // An earlier message may have closed the session.
            let Some(session) = self.sessions.get_mut(&id) else { return Ok(false) };
            let Some(request) = session.read()? else {
                session.release();
                return Ok(false);
            };
            *left = left.saturating_sub(request.cost());
            self.handle(Event::Message { session: id, request });
        }
        let Some(session) = self.sessions.get(&id) else { return Ok(false) };
        session.release();
        if *left == 0 && session.unread() > 0 {
            self.backlog.push(id);
        }
        Ok(*left > 0)
    }

    fn report_drained(&mut self) {
        let read = |id: &SessionId| !self.backlog.contains(id);
        let schedulers = self.sessions.iter().filter(|(id, session)| session.rank().is_none() && read(id));
        let drained: Vec<(SessionId, u64)> =
            schedulers.map(|(&id, session)| (id, session.void_below())).collect();
        for (session, void_below) in drained {
            self.handle(Event::Drained { session, void_below });
        }
    }

    fn read_fences(&mut self) -> bool {
        let workers = self.sessions.iter_mut();
        let moved: Vec<_> =
            workers.filter_map(|(&id, session)| Some((id, session.moved_fences()?))).collect();
        for &(session, (start, done)) in &moved {
            self.handle(Event::Fences { session, start, done });
        }
        if !moved.is_empty() {
            self.fences_since = None;
        }
        !moved.is_empty()
    }

    /// Goes on with what the last turn had no time for.
    fn catch_up(&mut self) -> bool {
        let session = self.core.behind();
        session.into_iter().for_each(|session| self.handle(Event::Behind { session }));
        session.is_some()
    }

    /// Gives the core one event and carries out what follows.
    fn handle(&mut self, event: Event) {
        self.touched |= !matches!(
            event,
            Event::Tick
                | Event::Drained { .. }
                | Event::Verified { .. }
                | Event::Transferred(_)
                | Event::Recovered(_)
                | Event::Mesh(_)
        );
        self.core.respond(millis(self.now), event, &mut self.out);
        self.apply();
        self.core.go_on(millis(self.now), &mut self.out);
        self.apply();
        self.close_sessions();
    }

    /// Ends sessions; what the core wants done about it may end further ones.
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
            self.catalog.lock().leave(id);
            self.metrics.session_closed(reason);
            match reason {
                CloseReason::HangUp => tracing::info!(session = id, "session ended"),
                // Its thread has said why.
                CloseReason::Parked => {}
                CloseReason::Malformed | CloseReason::Rejected => {
                    tracing::warn!(session = id, reason = text, "session closed");
                }
            }
            self.touched = true;
            self.core.handle(millis(self.now), Event::Disconnected { session: id }, &mut self.out);
            self.apply();
        }
    }
}
