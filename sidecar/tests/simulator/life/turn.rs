//! The data thread under the product's [`Turn`], one move at a time; other processes act between any two
//! moves. Then sockets, and sleep.

use shm_protocol::request::{Query, SchedulerRequest};
use sidecar::clients::session::{ClientSession, Violation};
use sidecar::core::{CoreEvent, Findings, RingRequest, SessionId};
use sidecar::runtime::turn::{self, Host, TurnSource};

use super::Life;
use crate::coverage;
use crate::ctx::{Ctx, Micros};
use crate::origin::WORDS;

/// Longest sleep while copies wait for fences.
const FENCE_POLL: Micros = 200;

/// The host of a life's turn.
struct Living<'a> {
    life: &'a mut Life,
    ctx: &'a mut Ctx,
}

// === impl Living ===

impl Host for Living<'_> {
    fn take_one(&mut self, source: TurnSource) -> usize {
        let (life, ctx) = (&mut *self.life, &mut *self.ctx);
        let found = match source {
            TurnSource::Copies => life.take_copied(ctx),
            // A rank's memory is open as soon as it is connected.
            TurnSource::Ranks => false,
            TurnSource::Tiers => life.take_transfer(ctx),
            TurnSource::Checksums => life.take_checksum(ctx),
            TurnSource::Mesh => life.hear_mesh(ctx),
            TurnSource::Pool => life.open_part(ctx),
        };
        found.into()
    }

    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut ClientSession)> {
        let sessions = self.life.sessions.iter_mut().map(|(id, peer)| (*id, &mut peer.session));
        let mut sessions: Vec<_> = sessions.collect();
        if sessions.len() > 1 && self.ctx.rng.one_in(2) {
            sessions.reverse();
        }
        sessions.into_iter()
    }

    fn session(&mut self, id: SessionId) -> Option<&mut ClientSession> {
        self.life.sessions.get_mut(&id).map(|peer| &mut peer.session)
    }

    /// Random lengths of rounds.
    fn costs(&mut self) -> (usize, usize) {
        let round = 1 + self.ctx.rng.below(8) as usize;
        (self.ctx.knobs.turn_cost, round)
    }

    fn handle(&mut self, event: CoreEvent) {
        if let CoreEvent::Message { session, request } = &event {
            self.ctx.hit(coverage::message(request));
            self.life.sessions.get_mut(session).expect("its ring was read").follow(request);
        }
        self.life.handle(event, self.ctx);
    }

    fn behind(&self) -> Option<SessionId> {
        self.life.core.behind()
    }

    fn was_touched(&mut self) -> bool {
        std::mem::take(&mut self.life.touched)
    }

    fn refuse_session(&mut self, session: SessionId, violation: Violation) {
        unreachable!("engines are honest, and session {session} is not: {violation}");
    }

    fn tick(&mut self) {
        self.life.tick(self.ctx);
    }
}

// === impl Life: the turn ===

impl Life {
    /// Makes one move of the data thread. Returns the time until its next one.
    pub(crate) fn step(&mut self, ctx: &mut Ctx) -> Micros {
        if std::mem::take(&mut self.asleep) {
            turn::wake_up(&mut Living { life: self, ctx });
        }
        if self.mend(ctx) {
            return 1;
        }
        if let Some(action) = self.out.pop_front() {
            let mut spent = self.apply(action, ctx);
            // Usually no other process acts between two actions of an event.
            while self.torn.is_none() && ctx.rng.below(8) > 0 {
                let Some(action) = self.out.pop_front() else { break };
                spent += self.apply(action, ctx);
            }
            return spent;
        }
        if let Some(id) = self.closing.pop() {
            self.close(id, "cut or refused", ctx);
            return 1;
        }
        let mut turn = std::mem::take(&mut self.turn);
        let goes_on = turn.step(&mut Living { life: self, ctx });
        self.turn = turn;
        if !goes_on {
            self.sessions.values().for_each(|peer| peer.session.beat(ctx.now / 1000));
            return self.rest(ctx);
        }
        if ctx.rng.one_in(16) { ctx.pause(30) } else { 1 }
    }

    fn take_copied(&mut self, ctx: &mut Ctx) -> bool {
        if let Some((copy, ok)) = self.copies.finished() {
            let pieces = self.places.remove(&copy).expect("a batch ends once");
            self.ledger.end(&pieces);
            self.handle(CoreEvent::Copied { copy, ok }, ctx);
            return true;
        }
        let Some(inspection) = self.copies.inspected() else { return false };
        // If the engine has gone, a searched slot may belong to another save by now; the core ignores the
        // result then.
        let findings = inspection.carry_out(|offset, out| {
            out.fill(0);
            let words = out.len().min(WORDS * 8);
            self.pool.read_bytes(offset, &mut out[..words]);
        });
        if let Findings::Compared(found) = &findings {
            self.end_comparison(&inspection, found, ctx);
        }
        self.handle(CoreEvent::Inspected { save: inspection.save, findings }, ctx);
        true
    }

    /// Serves sockets, and sleeps if there is no work.
    fn rest(&mut self, ctx: &mut Ctx) -> Micros {
        if !self.turn.backlog().is_empty() {
            ctx.hit("sidecar backlog");
        }
        if self.draining {
            self.draining = false;
            self.handle(CoreEvent::Drain, ctx);
            if self.core.begin_leaving() {
                ctx.hit("sidecar leaves");
            }
            return 1;
        }
        if let Some(id) = self.hung_up() {
            self.close(id, "hang-up", ctx);
            return 1;
        }
        if !ctx.dials.is_empty() {
            let dial = ctx.dials.remove(0);
            self.admit(dial, ctx);
            return 1;
        }
        if self.turn.worked() || self.touched || self.copies.ended() {
            return 1;
        }
        self.sleep(ctx)
    }

    /// Tells the engines that the thread sleeps, checks the rings once more, and sleeps if they are empty.
    fn sleep(&mut self, ctx: &mut Ctx) -> Micros {
        if !turn::fall_asleep(&mut Living { life: self, ctx }) {
            turn::wake_up(&mut Living { life: self, ctx });
            return 1;
        }
        ctx.hit("sidecar slept");
        ctx.bell.set(false);
        self.asleep = true;
        let waits = self.sessions.keys().any(|session| self.core.waits_on_fences(*session));
        let disks = self.disks.iter().filter_map(|disk| disk.next_due());
        let mesh = self.mesh.as_ref().and_then(|mesh| mesh.next_due());
        let checksum = self.next_checksum();
        let due = disks.chain(mesh).chain(checksum).min().unwrap_or(Micros::MAX);
        let next = if waits { ctx.now + FENCE_POLL } else { self.next_tick };
        next.min(due).saturating_sub(ctx.now).max(1)
    }
}

// === impl Peer ===

impl super::Peer {
    /// Records the data of a message that the oracle needs.
    fn follow(&mut self, request: &RingRequest) {
        let RingRequest::Scheduler { request, keys, .. } = request else { return };
        match *request {
            SchedulerRequest::Open { log } => drop(self.logs.insert(log, Vec::new())),
            SchedulerRequest::Append(append) => self.logs.entry(append.keys.log).or_default().extend(keys),
            SchedulerRequest::Query(Query { op, keys, .. }) => _ = self.asked.insert(op, keys.log),
            SchedulerRequest::Salt { salt } => self.salt = Some(salt),
            SchedulerRequest::Close { log, .. } => drop(self.logs.remove(&log)),
            _ => {}
        }
    }
}
