//! The sources of the data thread's turn: ends of copies, and the host of [`super::turn`].

use shm_protocol::layout::QUERY_KEYS;

use super::turn::{Host, TurnSource};
use super::{Runtime, TICK};
use crate::clients::session::{ClientSession, Violation};
use crate::copiers::Finished;
use crate::core::{CoreEvent, Findings, SessionId};
use crate::pages::metrics::CloseReason;
use crate::system::clock::count_millis;

/// Keys and block ids named by one session's messages before the next session's round: one long request, or
/// one QUERY of any size. A message costs one more than it names.
const ROUND_COST: usize = 8192;
/// The same for a whole turn with one engine at work, about 10 ms of searching; the rest stays in the ring
/// for the next turn, after new messages of all sessions are read. With several engines each gets its part of
/// one round: an engine waits 2 ms for an answer, and a turn of all others must take less.
const TURN_COST: usize = 2 * QUERY_KEYS;
// === impl Runtime: a turn's host ===

impl Host for Runtime {
    fn take_one(&mut self, source: TurnSource) -> usize {
        match source {
            TurnSource::Copies => self.take_copied().into(),
            TurnSource::Ranks => self.take_rank_event().into(),
            TurnSource::Tiers => self.take_transfer(),
            TurnSource::Checksums => self.take_checksum().into(),
            TurnSource::Mesh => self.hear_peer(),
            TurnSource::Pool => self.open_part().into(),
        }
    }

    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut ClientSession)> {
        self.sessions.iter_mut().map(|(id, session)| (*id, session))
    }

    fn session(&mut self, id: SessionId) -> Option<&mut ClientSession> {
        self.sessions.get_mut(&id)
    }

    fn costs(&mut self) -> (usize, usize) {
        let turn_cost = match self.core.at_work() {
            0 | 1 => TURN_COST,
            engines => ROUND_COST.div_ceil(engines),
        };
        (turn_cost, ROUND_COST)
    }

    fn handle(&mut self, event: CoreEvent) {
        if matches!(event, CoreEvent::Fences { .. }) {
            self.fences_since = None;
        }
        Runtime::handle(self, event);
    }

    fn behind(&self) -> Option<SessionId> {
        self.core.behind()
    }

    fn was_touched(&mut self) -> bool {
        std::mem::take(&mut self.touched)
    }

    fn refuse_session(&mut self, session: SessionId, violation: Violation) {
        self.closing.push((session, CloseReason::Malformed, violation.to_string()));
        self.close_sessions();
    }

    fn tick(&mut self) {
        if self.now >= self.next_tick {
            self.next_tick = self.now + TICK;
            self.look_at_pool();
            for (id, session) in &self.sessions {
                self.core.note_prefill(*id, session.prefill());
            }
            Runtime::handle(self, CoreEvent::Tick);
            self.show_tiers();
            self.show_checks();
            self.metrics.publish_holders(self.core.holders());
            self.metrics.publish_unique_value(self.core.unique_blocks().value_seconds);
            self.metrics.publish_parked(self.copiers.parked());
            if self.serves_parked_alone() {
                self.copiers.end_if_stuck();
            }
        } else if self.core.next_look_ms().is_some_and(|at| count_millis(self.now) >= at) {
            Runtime::handle(self, CoreEvent::Tick);
        }
    }
}

// === impl Runtime: ends of copies ===

impl Runtime {
    /// Handles one ended copy or inspection. Returns false if there was none.
    fn take_copied(&mut self) -> bool {
        if let Some(Finished { copy, ok }) = self.refused.pop().or_else(|| self.copiers.finished()) {
            if !ok {
                self.look_at_pool();
            }
            self.handle(CoreEvent::Copied { copy, ok });
            return true;
        }
        let Some((save, mut findings)) = self.copiers.inspected() else { return false };
        self.look_at_pool();
        match &mut findings {
            // The bytes may come from the lost pool, so they prove nothing about the engine.
            Findings::Compared(found) if self.lost => found.differing = 0,
            Findings::Compared(_) => {}
            Findings::Searched(searched) => self.note_searched(searched),
        }
        self.handle(CoreEvent::Inspected { save, findings });
        true
    }
}
