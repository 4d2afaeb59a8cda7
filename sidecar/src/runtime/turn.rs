//! The order of the data thread's turn, one move at a time. The runtime makes moves without a pause; the
//! simulator lets other parts act between any two.
//!
//! This module has no I/O: its [`Host`] has the sources.

use std::collections::VecDeque;

use crate::clients::session::{ClientSession, Violation};
use crate::core::{CoreEvent, SessionId};

/// The stages of a turn, in their order.
///
/// Ends of copies come before the rings, and [`CoreEvent::Drained`] after them. A CANCEL posted before its block
/// was overwritten is therefore read before the commit of a copy that ended later.
const ORDER: [TurnStage; 11] = [
    TurnStage::Take(TurnSource::Copies, usize::MAX),
    TurnStage::Take(TurnSource::Ranks, usize::MAX),
    // At most some milliseconds, during the recovery of an index.
    TurnStage::Take(TurnSource::Tiers, 64),
    // At most some tenths of a millisecond, as for the mesh.
    TurnStage::Take(TurnSource::Checksums, 512),
    TurnStage::Take(TurnSource::Mesh, 512),
    TurnStage::Rings,
    TurnStage::Drained,
    TurnStage::Fences,
    TurnStage::Behind,
    // At most some milliseconds.
    TurnStage::Take(TurnSource::Pool, 8),
    TurnStage::Tick,
];

#[derive(Copy, Clone, Debug)]
enum TurnStage {
    /// Handles events of a source up to this cost, so engines are answered in between.
    Take(TurnSource, usize),
    /// Reads every ring up to its tail at the beginning of the stage, or up to the cost of a turn.
    Rings,
    /// Reports every scheduler's ring read to its end.
    Drained,
    Fences,
    /// Continues work left over from the last turn.
    Behind,
    /// Passes the time to the core, if a tick is due.
    Tick,
}

/// The sources of events besides the engines' rings.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum TurnSource {
    /// Ends of copies and of comparisons.
    Copies,
    /// Opened and stuck ranks on GPUs.
    Ranks,
    /// Ends of jobs of tiers, except those reported by the mesh.
    Tiers,
    Checksums,
    /// Events of the mesh.
    Mesh,
    /// Parts of the pool ready for service.
    Pool,
}

/// The owner of the core, its sessions and the other sources.
pub trait Host {
    /// Handles one event. Returns its cost, zero if there was none.
    fn take_one(&mut self, source: TurnSource) -> usize;
    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut ClientSession)>;
    /// A session, unless it has ended.
    fn session(&mut self, id: SessionId) -> Option<&mut ClientSession>;
    /// Keys and block ids named by a session's messages in this turn, and before the next session's round. A
    /// message costs one more than it names.
    fn costs(&mut self) -> (usize, usize);
    /// Passes one event to the core.
    fn handle(&mut self, event: CoreEvent);
    /// The session of a scheduler with work left over.
    fn behind(&self) -> Option<SessionId>;
    /// True if the core got an event that [`touches_saves`], or a session was closed, since the last call.
    fn was_touched(&mut self) -> bool;
    /// Ends a session after a breach of the protocol.
    fn refuse_session(&mut self, session: SessionId, violation: Violation);
    /// Passes the time to the core, if a tick is due.
    fn tick(&mut self);
}

/// The position of the data thread in its turn.
#[derive(Debug, Default)]
pub struct Turn {
    stage: usize,
    begun: bool,
    worked: bool,
    /// Cost so far in this stage.
    taken: usize,
    rings: VecDeque<UnreadRing>,
    /// Events of this stage not yet passed to the core.
    events: VecDeque<CoreEvent>,
    /// Sessions with unread messages after this turn's limit of cost.
    backlog: Vec<SessionId>,
}

/// A ring with unread messages.
#[derive(Copy, Clone, Debug)]
struct UnreadRing {
    session: SessionId,
    /// Cost left in this turn, and in this round.
    left: usize,
    round: usize,
}

// === impl Turn ===

impl Turn {
    /// Makes one move. Returns false at the end of a turn; the next move begins another.
    pub fn step(&mut self, host: &mut impl Host) -> bool {
        let Some(&stage) = ORDER.get(self.stage) else {
            (self.stage, self.begun) = (0, false);
            return false;
        };
        let is_new = !std::mem::replace(&mut self.begun, true);
        if is_new && self.stage == 0 {
            self.worked = false;
        }
        let goes_on = match stage {
            TurnStage::Take(source, most) => self.take_source(source, most, host),
            TurnStage::Rings => self.read_message(is_new, host),
            TurnStage::Drained | TurnStage::Fences | TurnStage::Behind if is_new => {
                self.list_stage(stage, host);
                true
            }
            TurnStage::Drained | TurnStage::Fences | TurnStage::Behind => {
                let event = self.events.pop_front();
                self.worked |= event.is_some();
                event.map(|event| host.handle(event)).is_some()
            }
            TurnStage::Tick => {
                host.tick();
                false
            }
        };
        if !goes_on {
            (self.stage, self.begun, self.taken) = (self.stage + 1, false, 0);
        }
        true
    }

    /// True if the last turn, or this one so far, had any work.
    pub fn worked(&self) -> bool {
        self.worked
    }

    /// Sessions with messages left unread by the last turn.
    pub fn backlog(&self) -> &[SessionId] {
        &self.backlog
    }

    fn take_source(&mut self, source: TurnSource, most: usize, host: &mut impl Host) -> bool {
        let cost = host.take_one(source);
        self.taken = self.taken.saturating_add(cost);
        self.worked |= cost > 0;
        cost > 0 && self.taken < most
    }

    /// Handles one message of the next session, or a part of a hint.
    fn read_message(&mut self, is_new: bool, host: &mut impl Host) -> bool {
        if is_new {
            self.look_at_rings(host);
        }
        let Some(mut ring) = self.rings.pop_front() else { return false };
        // An earlier message may have closed the session.
        let Some(session) = host.session(ring.session) else { return true };
        if ring.left == 0 || ring.round == 0 {
            // The actions of its messages are carried out, including writes into its chunks.
            session.release_read();
            match ring.left {
                0 if session.unread() > 0 => self.backlog.push(ring.session),
                0 => {}
                _ => {
                    ring.round = host.costs().1;
                    self.rings.push_back(ring);
                }
            }
            return true;
        }
        match session.read_message(ring.left.min(ring.round)) {
            Ok(None) => session.release_read(),
            Ok(Some(request)) => {
                let cost = request.cost();
                (ring.left, ring.round) = (ring.left.saturating_sub(cost), ring.round.saturating_sub(cost));
                self.rings.push_front(ring);
                host.handle(CoreEvent::Message { session: ring.session, request });
            }
            Err(violation) => host.refuse_session(ring.session, violation),
        }
        true
    }

    fn look_at_rings(&mut self, host: &mut impl Host) {
        self.backlog.clear();
        let (left, round) = host.costs();
        let mut refused = Vec::new();
        for (session, ring) in host.sessions() {
            match ring.look_at_ring() {
                Ok(0) => {}
                Ok(_) => self.rings.push_back(UnreadRing { session, left, round }),
                Err(violation) => refused.push((session, violation)),
            }
        }
        self.worked |= !self.rings.is_empty();
        refused.into_iter().for_each(|(session, violation)| host.refuse_session(session, violation));
    }

    /// Lists the events of a stage.
    fn list_stage(&mut self, stage: TurnStage, host: &mut impl Host) {
        match stage {
            TurnStage::Drained if host.was_touched() => {
                self.worked = true;
                for (session, ring) in host.sessions() {
                    if ring.rank().is_none() && !self.backlog.contains(&session) {
                        self.events.push_back(CoreEvent::Drained { session, void_below: ring.void_below() });
                    }
                }
            }
            TurnStage::Fences => self.events.extend(host.sessions().filter_map(|(session, rank)| {
                let (start, done) = rank.moved_fences()?;
                Some(CoreEvent::Fences { session, start, done })
            })),
            TurnStage::Behind => {
                self.events.extend(host.behind().map(|session| CoreEvent::Behind { session }))
            }
            _ => {}
        }
    }
}

/// True if an event may have made saves ready to be committed.
pub fn touches_saves(event: &CoreEvent) -> bool {
    !matches!(
        event,
        CoreEvent::Tick
            | CoreEvent::Drained { .. }
            | CoreEvent::Verified { .. }
            | CoreEvent::Transferred { .. }
            | CoreEvent::Mesh(_)
    )
}

/// Tells every engine that the data thread sleeps, then checks the rings once more. Returns true if it may
/// sleep. [`wake_up`] must follow.
pub fn fall_asleep(host: &mut impl Host) -> bool {
    host.sessions().for_each(|(_, session)| session.set_asleep(true));
    !host.sessions().any(|(_, session)| session.has_messages())
}

/// Tells every engine that the data thread is awake.
pub fn wake_up(host: &mut impl Host) {
    host.sessions().for_each(|(_, session)| session.set_asleep(false));
}

#[cfg(test)]
mod tests;
