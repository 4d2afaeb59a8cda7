//! The order of the data thread's turn, one move at a time. The runtime makes moves without a pause; the
//! simulator lets other parts act between any two.
//!
//! This module has no I/O: its [`Host`] has the sources.

use std::collections::VecDeque;

use crate::clients::session::{Session, Violation};
use crate::core::{Event, SessionId};

/// The stages of a turn, in their order.
///
/// Ends of copies come before the rings, and [`Event::Drained`] after them. A CANCEL posted before its block
/// was overwritten is therefore read before the commit of a copy that ended later.
const ORDER: [Stage; 11] = [
    Stage::Take(Source::Copies, usize::MAX),
    Stage::Take(Source::Ranks, usize::MAX),
    // At most some milliseconds, during the recovery of an index.
    Stage::Take(Source::Tiers, 64),
    // At most some tenths of a millisecond, as for the mesh.
    Stage::Take(Source::Checksums, 512),
    Stage::Take(Source::Mesh, 512),
    Stage::Rings,
    Stage::Drained,
    Stage::Fences,
    Stage::Behind,
    // At most some milliseconds.
    Stage::Take(Source::Pool, 8),
    Stage::Tick,
];

#[derive(Copy, Clone, Debug)]
enum Stage {
    /// Handles events of a source up to this cost, so engines are answered in between.
    Take(Source, usize),
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
pub enum Source {
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
    fn take(&mut self, source: Source) -> usize;
    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut Session)>;
    /// A session, unless it has ended.
    fn session(&mut self, id: SessionId) -> Option<&mut Session>;
    /// Keys and block ids named by a session's messages in this turn, and before the next session's round. A
    /// message costs one more than it names.
    fn costs(&mut self) -> (usize, usize);
    /// Passes one event to the core.
    fn handle(&mut self, event: Event);
    /// The session of a scheduler with work left over.
    fn behind(&self) -> Option<SessionId>;
    /// True if the core got an event that [`touches`], or a session was closed, since the last call.
    fn was_touched(&mut self) -> bool;
    /// Ends a session after a breach of the protocol.
    fn refuse(&mut self, session: SessionId, violation: Violation);
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
    rings: VecDeque<Unread>,
    /// Events of this stage not yet passed to the core.
    events: VecDeque<Event>,
    /// Sessions with unread messages after this turn's limit of cost.
    backlog: Vec<SessionId>,
}

/// A ring with unread messages.
#[derive(Copy, Clone, Debug)]
struct Unread {
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
            Stage::Take(source, most) => self.take(source, most, host),
            Stage::Rings => self.read(is_new, host),
            Stage::Drained | Stage::Fences | Stage::Behind if is_new => {
                self.list(stage, host);
                true
            }
            Stage::Drained | Stage::Fences | Stage::Behind => {
                let event = self.events.pop_front();
                self.worked |= event.is_some();
                event.map(|event| host.handle(event)).is_some()
            }
            Stage::Tick => {
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

    fn take(&mut self, source: Source, most: usize, host: &mut impl Host) -> bool {
        let cost = host.take(source);
        self.taken = self.taken.saturating_add(cost);
        self.worked |= cost > 0;
        cost > 0 && self.taken < most
    }

    /// Handles one message of the next session.
    fn read(&mut self, is_new: bool, host: &mut impl Host) -> bool {
        if is_new {
            self.look(host);
        }
        let Some(mut ring) = self.rings.pop_front() else { return false };
        // An earlier message may have closed the session.
        let Some(session) = host.session(ring.session) else { return true };
        if ring.left == 0 || ring.round == 0 {
            // The actions of its messages are carried out, including writes into its chunks.
            session.release();
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
        match session.read() {
            Ok(None) => session.release(),
            Ok(Some(request)) => {
                let cost = request.cost();
                (ring.left, ring.round) = (ring.left.saturating_sub(cost), ring.round.saturating_sub(cost));
                self.rings.push_front(ring);
                host.handle(Event::Message { session: ring.session, request });
            }
            Err(violation) => host.refuse(ring.session, violation),
        }
        true
    }

    fn look(&mut self, host: &mut impl Host) {
        self.backlog.clear();
        let (left, round) = host.costs();
        let mut refused = Vec::new();
        for (session, ring) in host.sessions() {
            match ring.look() {
                Ok(0) => {}
                Ok(_) => self.rings.push_back(Unread { session, left, round }),
                Err(violation) => refused.push((session, violation)),
            }
        }
        self.worked |= !self.rings.is_empty();
        refused.into_iter().for_each(|(session, violation)| host.refuse(session, violation));
    }

    /// Lists the events of a stage.
    fn list(&mut self, stage: Stage, host: &mut impl Host) {
        match stage {
            Stage::Drained if host.was_touched() => {
                self.worked = true;
                for (session, ring) in host.sessions() {
                    if ring.rank().is_none() && !self.backlog.contains(&session) {
                        self.events.push_back(Event::Drained { session, void_below: ring.void_below() });
                    }
                }
            }
            Stage::Fences => self.events.extend(host.sessions().filter_map(|(session, rank)| {
                let (start, done) = rank.moved_fences()?;
                Some(Event::Fences { session, start, done })
            })),
            Stage::Behind => self.events.extend(host.behind().map(|session| Event::Behind { session })),
            _ => {}
        }
    }
}

/// True if an event may have made saves ready to be committed.
pub fn touches(event: &Event) -> bool {
    !matches!(
        event,
        Event::Tick
            | Event::Drained { .. }
            | Event::Verified { .. }
            | Event::Transferred { .. }
            | Event::Mesh(_)
    )
}

/// Tells every engine that the data thread sleeps, then checks the rings once more. Returns true if it may
/// sleep. [`wake_up`] must follow.
pub fn fall_asleep(host: &mut impl Host) -> bool {
    host.sessions().for_each(|(_, session)| session.set_asleep(true));
    !host.sessions().any(|(_, session)| session.has_news())
}

/// Tells every engine that the data thread is awake.
pub fn wake_up(host: &mut impl Host) {
    host.sessions().for_each(|(_, session)| session.set_asleep(false));
}
