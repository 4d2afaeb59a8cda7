//! The order of the data thread's turn, one move at a time: the runtime makes moves as fast as it can, the simulator lets others
//! act between any two.
//!
//! Pure: what is taken in, and from whom, is its [`Host`]'s.

use std::collections::VecDeque;

use crate::clients::session::{Session, Violation};
use crate::core::{Event, SessionId};

/// A turn's stages, in their order.
///
/// Ends of copies come before the rings, and [`Event::Drained`] behind them: a CANCEL that was posted before its block was
/// overwritten is then known before a copy that ended after that is committed.
const ORDER: [Stage; 11] = [
    Stage::Take(Source::Copies, usize::MAX),
    Stage::Take(Source::Ranks, usize::MAX),
    // At most some milliseconds, where an index is recovered.
    Stage::Take(Source::Tiers, 64),
    // At most some tenths of a millisecond, as is what follows.
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
    /// Takes in what there is, up to this cost: engines are answered in between.
    Take(Source, usize),
    /// Reads every ring up to its tail as seen at the stage's beginning, or as far as its turn's cost allows.
    Rings,
    /// Says of every scheduler whose ring was read so far that it was.
    Drained,
    Fences,
    /// Goes on with what the last turn had no time for.
    Behind,
    /// Says that time passed, if it did.
    Tick,
}

/// What else than engines there is to take in.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// Ends of copies and of comparisons.
    Copies,
    /// What became of ranks on GPUs.
    Ranks,
    /// Ends of jobs of tiers, but for those that the mesh says.
    Tiers,
    Checksums,
    /// What the mesh says.
    Mesh,
    /// Parts of the pool that can come into service.
    Pool,
}

/// Whose turn it is: the core, its sessions, and what stands beside them.
pub trait Host {
    /// Takes one thing in; what that costs, zero where there is none.
    fn take(&mut self, source: Source) -> usize;
    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut Session)>;
    /// One of them, unless it has ended.
    fn session(&mut self, id: SessionId) -> Option<&mut Session>;
    /// Keys and block ids that a session's messages may name in this turn, and before the next session has its round. A message
    /// costs one more than it names.
    fn costs(&mut self) -> (usize, usize);
    /// Gives the core one event.
    fn handle(&mut self, event: Event);
    /// A scheduler's session to be gone on with.
    fn behind(&self) -> Option<SessionId>;
    /// Whether the core was given anything that [`touches`] since the last call, or a session was closed.
    fn was_touched(&mut self) -> bool;
    /// Ends a session that broke the protocol.
    fn refuse(&mut self, session: SessionId, violation: Violation);
    /// Says that time passed, if it did.
    fn tick(&mut self);
}

/// Where in its turn the data thread stands.
#[derive(Debug, Default)]
pub struct Turn {
    stage: usize,
    begun: bool,
    worked: bool,
    /// Cost of what this stage has taken.
    taken: usize,
    rings: VecDeque<Unread>,
    /// What this stage has still to tell the core.
    events: VecDeque<Event>,
    /// Sessions with messages that this turn had no time for.
    backlog: Vec<SessionId>,
}

/// A ring with messages that were seen.
#[derive(Copy, Clone, Debug)]
struct Unread {
    session: SessionId,
    /// What may still be read in this turn, and in this round.
    left: usize,
    round: usize,
}

// === impl Turn ===

impl Turn {
    /// Makes one move; false where the turn was over, so that the next move begins another.
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

    /// Whether the last turn, or this one so far, had anything to do.
    pub fn worked(&self) -> bool {
        self.worked
    }

    /// Sessions with messages that the last turn had no time for.
    pub fn backlog(&self) -> &[SessionId] {
        &self.backlog
    }

    fn take(&mut self, source: Source, most: usize, host: &mut impl Host) -> bool {
        let cost = host.take(source);
        self.taken = self.taken.saturating_add(cost);
        self.worked |= cost > 0;
        cost > 0 && self.taken < most
    }

    /// Handles one message, of the session whose round it is.
    fn read(&mut self, is_new: bool, host: &mut impl Host) -> bool {
        if is_new {
            self.look(host);
        }
        let Some(mut ring) = self.rings.pop_front() else { return false };
        // An earlier message may have closed the session.
        let Some(session) = host.session(ring.session) else { return true };
        if ring.left == 0 || ring.round == 0 {
            // What follows from its messages has been carried out, and may have been written into its chunks.
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

    /// Lists what a stage has to tell the core.
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

/// Whether an event may have made saves ready to be committed.
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

/// Tells every engine that the data thread sleeps, then looks once more; whether it may sleep. [`wake_up`] follows.
pub fn fall_asleep(host: &mut impl Host) -> bool {
    host.sessions().for_each(|(_, session)| session.set_asleep(true));
    !host.sessions().any(|(_, session)| session.has_news())
}

/// Tells every engine that the data thread is awake.
pub fn wake_up(host: &mut impl Host) {
    host.sessions().for_each(|(_, session)| session.set_asleep(false));
}
