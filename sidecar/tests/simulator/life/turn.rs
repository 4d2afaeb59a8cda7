//! The data thread's turn, in the order of [`sidecar::runtime`]: ends of copies; every ring up to the tail seen after
//! them, or as far as the turn's cost allows; `Drained` for every scheduler whose ring was read so far; fence words; the
//! tick; then sockets, and sleep.

use std::collections::VecDeque;

use shm_protocol::request::{Query, SchedulerRequest};
use sidecar::engine::{Event, Request, SessionId};

use super::Life;
use crate::coverage;
use crate::ctx::{Ctx, Micros};

/// How long a sleep lasts at most while fences are waited for.
const FENCE_POLL: Micros = 200;

/// Where in its turn the data thread stands.
#[derive(Debug)]
pub(super) enum Phase {
    Copied,
    Look,
    Read(VecDeque<(SessionId, usize)>),
    /// Schedulers to be reported.
    Drained(VecDeque<(SessionId, u64)>),
    LookAtFences,
    Fences(VecDeque<(SessionId, u64, u64)>),
    Rest,
}

// === impl Life: the turn ===

impl Life {
    /// One move of the data thread; the time until its next one.
    pub(crate) fn step(&mut self, ctx: &mut Ctx) -> Micros {
        if std::mem::take(&mut self.asleep) {
            self.sessions.values().for_each(|peer| peer.session.set_asleep(false));
        }
        if self.mend(ctx) {
            return 1;
        }
        if let Some(action) = self.out.pop_front() {
            let mut spent = self.apply(action, ctx);
            // Mostly nothing else happens between two actions of an event.
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
        match std::mem::replace(&mut self.phase, Phase::Copied) {
            Phase::Copied => self.take_copied(ctx),
            Phase::Look => self.look(ctx),
            Phase::Read(open) => self.read(open, ctx),
            Phase::Drained(drained) => self.report(drained, ctx),
            Phase::LookAtFences => self.look_at_fences(),
            Phase::Fences(moved) => self.fences(moved, ctx),
            Phase::Rest => return self.rest(ctx),
        }
        if ctx.rng.one_in(16) { ctx.pause(30) } else { 1 }
    }

    fn take_copied(&mut self, ctx: &mut Ctx) {
        if let Some((copy, ok)) = self.copies.finished() {
            let pieces = self.places.remove(&copy).expect("a batch ends once");
            self.ledger.end(&pieces);
            return self.handle(Event::Copied { copy, ok }, ctx);
        }
        if let Some(comparison) = self.copies.compared() {
            return self.end_comparison(&comparison, ctx);
        }
        if self.take_checksum(ctx) || self.take_transfer(ctx) || self.hear_mesh(ctx) {
            return;
        }
        self.phase = Phase::Look;
    }

    fn look(&mut self, ctx: &mut Ctx) {
        self.backlog.clear();
        let mut open: Vec<(SessionId, usize)> = Vec::new();
        for (&id, peer) in &mut self.sessions {
            if peer.session.look().expect("honest engines") > 0 {
                open.push((id, ctx.knobs.turn_cost));
            }
        }
        // Rings may be read in any order.
        if open.len() > 1 && ctx.rng.one_in(2) {
            open.reverse();
        }
        self.phase = Phase::Read(open.into());
    }

    /// Handles one message of the next session.
    fn read(&mut self, mut open: VecDeque<(SessionId, usize)>, ctx: &mut Ctx) {
        let Some((id, left)) = open.pop_front() else {
            let touched = std::mem::take(&mut self.touched);
            self.phase = if touched { Phase::Drained(self.drained()) } else { Phase::LookAtFences };
            return;
        };
        self.phase = Phase::Read(open);
        let Some(peer) = self.sessions.get_mut(&id) else { return };
        let Some(request) = peer.session.read().expect("honest engines") else {
            return peer.session.release();
        };
        let left = left.saturating_sub(request.cost());
        ctx.hit(coverage::message(&request));
        peer.follow(&request);
        self.handle(Event::Message { session: id, request }, ctx);
        let Phase::Read(open) = &mut self.phase else { unreachable!("set above") };
        if left > 0 {
            // Sometimes this session goes on, sometimes the next has its round.
            if ctx.rng.one_in(4) {
                open.push_back((id, left))
            } else {
                open.push_front((id, left))
            }
            return;
        }
        // What follows from the message is carried out before its room is given back.
        self.backlog.push(id);
    }

    fn drained(&mut self) -> VecDeque<(SessionId, u64)> {
        for id in &self.backlog {
            if let Some(peer) = self.sessions.get(id) {
                peer.session.release();
            }
        }
        let sessions = &self.sessions;
        self.backlog.retain(|id| sessions.get(id).is_some_and(|peer| peer.session.unread() > 0));
        let read =
            self.sessions.iter().filter(|(id, peer)| peer.rank.is_none() && !self.backlog.contains(id));
        read.map(|(id, peer)| (*id, peer.session.void_below())).collect()
    }

    fn report(&mut self, mut drained: VecDeque<(SessionId, u64)>, ctx: &mut Ctx) {
        let Some((session, void_below)) = drained.pop_front() else {
            self.phase = Phase::LookAtFences;
            return;
        };
        self.phase = Phase::Drained(drained);
        self.handle(Event::Drained { session, void_below }, ctx);
    }

    fn look_at_fences(&mut self) {
        let moved = self.sessions.iter_mut().filter_map(|(id, peer)| {
            let (start, done) = peer.session.moved_fences()?;
            Some((*id, start, done))
        });
        self.phase = Phase::Fences(moved.collect());
    }

    fn fences(&mut self, mut moved: VecDeque<(SessionId, u64, u64)>, ctx: &mut Ctx) {
        if let Some((session, start, done)) = moved.pop_front() {
            self.phase = Phase::Fences(moved);
            return self.handle(Event::Fences { session, start, done }, ctx);
        }
        if let Some(session) = self.core.behind() {
            self.phase = Phase::Fences(moved);
            return self.handle(Event::Behind { session }, ctx);
        }
        if self.open_part(ctx) {
            self.phase = Phase::Fences(moved);
            return;
        }
        self.phase = Phase::Rest;
        self.tick(ctx);
        for peer in self.sessions.values() {
            peer.session.beat(ctx.now / 1000);
        }
    }

    /// Serves sockets, and sleeps if there is nothing to do.
    fn rest(&mut self, ctx: &mut Ctx) -> Micros {
        if !self.backlog.is_empty() {
            ctx.hit("sidecar backlog");
        }
        if self.draining {
            self.draining = false;
            self.handle(Event::Drain, ctx);
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
        if self.touched || self.copies.ended() {
            return 1;
        }
        self.sleep(ctx)
    }

    /// Says that it sleeps, looks once more, and only then does.
    fn sleep(&mut self, ctx: &mut Ctx) -> Micros {
        self.sessions.values().for_each(|peer| peer.session.set_asleep(true));
        if self.sessions.values_mut().any(|peer| peer.session.has_news()) {
            self.sessions.values().for_each(|peer| peer.session.set_asleep(false));
            return 1;
        }
        ctx.hit("sidecar slept");
        ctx.bell.set(false);
        self.asleep = true;
        let waits = self.sessions.keys().any(|session| self.core.waits_on_fences(*session));
        let disk = self.disk.as_ref().and_then(|disk| disk.next_due());
        let mesh = self.mesh.as_ref().and_then(|mesh| mesh.next_due());
        let checksum = self.next_checksum();
        let due = disk.into_iter().chain(mesh).chain(checksum).min().unwrap_or(Micros::MAX);
        let next = if waits { ctx.now + FENCE_POLL } else { self.next_tick };
        next.min(due).saturating_sub(ctx.now).max(1)
    }
}

// === impl Peer ===

impl super::Peer {
    /// Follows what the oracle must know of a message.
    fn follow(&mut self, request: &Request) {
        let Request::Scheduler { request, keys, .. } = request else { return };
        match *request {
            SchedulerRequest::Open { log } => drop(self.logs.insert(log, Vec::new())),
            SchedulerRequest::Append(append) => self.logs.entry(append.keys.log).or_default().extend(keys),
            SchedulerRequest::Query(Query { keys, .. }) => self.asked = keys.log,
            SchedulerRequest::Salt { salt } => self.salt = Some(salt),
            SchedulerRequest::Close { log } => drop(self.logs.remove(&log)),
            _ => {}
        }
    }
}
