//! Waits for a producer: if prompts are computed by another pod, a missing block may be on its way.
//!
//! The first question of a request opens its window, if its engine asked for one and there are peers. While
//! the window is open, a question with an incomplete run is not answered. It is asked again when the next
//! block of the run can be had here, from a disk or from a peer; a peer's announcement of the block wakes it at
//! once. The window ends when the run has not grown for its length, and at the latest [`QUERY_WAIT_MS_MAX`] after
//! that first question. Then the question is answered with the blocks here, and the request no longer waits.
//!
//! If three windows of an engine in a row ended so, with not one block from a peer in between, it most likely
//! has no producer: its requests do not wait until a peer has given a block to any engine. A window with a
//! promise counts against the promiser instead.
//!
//! A question for blocks of another engine (`awaits`) has a window of its own, if there are peers or another
//! engine of its namespace is here. It is asked again when a save takes a slot for the next block of its run.
//! A save of another engine in the namespace shows that there is a producer. A promise of another engine
//! extends the window, here or at a peer. The window ends at once if the last other engine has gone, or if a
//! promise has ended and nothing of it is being saved or known of a peer. It also ends if another engine
//! computed the next block of the run, and it is not kept.

use std::collections::HashSet;

use mesh::digest::{Digest, DigestChange};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::QUERY_WAIT_MS_MAX;

use super::promises::Promise;
use super::waits::{Wait, WaitPhase};
use super::{Action, Base, Binding, Context, Queries, Question, SessionId};
use crate::core::engines::{Engines, Waits};
use crate::core::peers::{AHEAD_BYTES, PeersStats};

/// Milliseconds between two looks for the blocks of a question, at least, unless a save here or a peer's
/// announcement has its next block. A look costs a search for one block here and in the inventories of peers,
/// some microseconds. Looks find blocks of disks, and of inventories announced only in part.
const LOOK_MS: u64 = 20;
/// Milliseconds between two asks of a question for promised blocks while its run does not grow.
const STAND_AGAIN_MS: u64 = 1000;
/// Windows in a row without their blocks, after which an engine's requests do not wait.
const EXHAUSTED_MAX: u32 = 3;
/// Limit of an engine's questions waiting for other engines at once. More prompts are more than its producers
/// compute in time.
const QUESTIONS_MAX: usize = 64;
/// Milliseconds between two lines of the log about exhausted windows, at least.
const QUIET_MS: u64 = 10_000;

/// An engine's readiness to wait.
#[derive(Debug)]
pub(super) struct EnginePatience {
    waits: Waits,
    /// Exhausted windows in a row.
    exhausted: u32,
}

/// The time in which a request's questions wait for a producer.
#[derive(Debug)]
pub(super) struct Window {
    asked_ms: u64,
    length_ms: u64,
    until_ms: u64,
    /// The longest time it may be open.
    most_ms: u64,
    /// The key at the end of the run.
    pub(super) end: u32,
    /// True if a question had nothing else to wait for.
    waited: bool,
    /// The last promise seen by its question.
    promise: Option<Promise>,
    /// The time of the last ask for promised blocks, and the end of the run then.
    stood: Option<(u64, u32)>,
    /// The earliest time of the next look for blocks.
    look_ms: u64,
    /// The pause of looks after requested blocks did not come: it doubles.
    pause_ms: u64,
}

/// The common state of all windows.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The time of the next look at waiting questions.
    next_look_ms: Option<u64>,
    quiet_until_ms: u64,
    /// Exhausted windows since the last line of the log about them.
    unreported: u64,
    /// Requests that waited for a producer, and those without their blocks at the end.
    waits: u64,
    exhausted: u64,
}

// === impl EnginePatience ===

impl EnginePatience {
    pub(super) fn new(waits: Waits) -> Self {
        Self { waits, exhausted: 0 }
    }

    /// Lets the engine's requests wait again: a producer has given a block.
    pub(super) fn restore(&mut self) {
        self.exhausted = 0;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.exhausted >= EXHAUSTED_MAX
    }
}

// === impl Window ===

impl Window {
    fn open_at(now_ms: u64, end: u32, length_ms: u64) -> Self {
        let until_ms = now_ms + length_ms;
        let (waited, promise, stood, look_ms, pause_ms) = (false, None, None, now_ms, LOOK_MS);
        let most_ms = QUERY_WAIT_MS_MAX.into();
        Self {
            asked_ms: now_ms,
            length_ms,
            until_ms,
            most_ms,
            end,
            waited,
            promise,
            stood,
            look_ms,
            pause_ms,
        }
    }

    /// Extends the window to its length from now, up to its longest time.
    fn renew(&mut self, now_ms: u64) {
        self.until_ms = (now_ms + self.length_ms).min(self.asked_ms + self.most_ms);
    }

    /// Notes a promise of the awaited block: the window may be open for so long.
    fn note_promise(&mut self, promise: Promise, most_ms: u64) {
        (self.promise, self.most_ms) = (Some(promise), most_ms);
    }

    /// True if its question has waited for a promise of the same promiser.
    fn knows(&self, promise: &Promise) -> bool {
        self.promise.as_ref().is_some_and(|known| known.shares_promiser(promise))
    }

    /// Notes the present end of the run.
    fn see(&mut self, now_ms: u64, end: u32) {
        if end > self.end {
            self.renew(now_ms);
            (self.look_ms, self.pause_ms) = (now_ms, LOOK_MS);
        }
        self.end = end;
    }

    /// Pauses the looks after the end of requested blocks: if the run has not grown, the same blocks would be
    /// requested again.
    fn pause(&mut self, now_ms: u64) {
        self.look_ms = now_ms + self.pause_ms;
        self.pause_ms *= 2;
    }

    /// Lets its question look for blocks now, unless the looks pause. Returns false if they do.
    fn look_at_once(&mut self, now_ms: u64) -> bool {
        let pauses = self.pause_ms > LOOK_MS && now_ms < self.look_ms;
        if !pauses {
            self.look_ms = now_ms;
        }
        !pauses
    }

    /// True if its promised blocks may be asked for: the run has grown since the last ask, or time has passed.
    fn may_stand(&self, now_ms: u64) -> bool {
        self.stood.is_none_or(|(at_ms, end)| self.end > end || now_ms >= at_ms + STAND_AGAIN_MS)
    }

    /// Returns the time of the next look, with nothing to request now.
    fn idle(&mut self, now_ms: u64) -> u64 {
        self.look_ms = self.look_ms.max(now_ms + LOOK_MS);
        self.look_ms.min(self.until_ms)
    }
}

// === impl Windows ===

impl Windows {
    /// Notes a time by which a question is to be looked at.
    fn look_at(&mut self, at_ms: u64) {
        self.next_look_ms = Some(self.next_look_ms.map_or(at_ms, |next| next.min(at_ms)));
    }
}

// === impl Queries ===

impl Queries {
    pub(crate) fn next_look_ms(&self) -> Option<u64> {
        self.windows.next_look_ms
    }

    /// Notes the hits of a question's run. The first question of a request opens its window, if it
    /// `may_wait`. True if blocks may be requested now.
    pub(super) fn see_run(
        &mut self,
        question: Question,
        hits: u32,
        may_wait: bool,
        cx: &mut Context,
    ) -> bool {
        let end = question.from + hits;
        let log = self.asker(question.session).logs.known_mut(question.log);
        if !std::mem::replace(&mut log.asked, true) {
            let length_ms = self.window_ms(question, may_wait, cx);
            let window = (length_ms > 0).then(|| Window::open_at(cx.now_ms, end, length_ms));
            self.asker(question.session).logs.known_mut(question.log).window = window;
        }
        let Some(window) = self.window(question) else { return true };
        window.see(cx.now_ms, end);
        cx.now_ms >= window.look_ms
    }

    /// Returns the length of a new question's window; 0: it has none.
    fn window_ms(&self, question: Question, may_wait: bool, cx: &mut Context) -> u64 {
        let patience = &self.askers[&question.session].patience;
        let lost = patience.is_lost() || !may_wait;
        if !question.awaits {
            return if lost { 0 } else { patience.waits.miss };
        }
        let of_session = self.waits.range((question.session, 0)..=(question.session, u32::MAX));
        let awaiting = of_session.filter(|(_, wait)| wait.question.awaits && !wait.is_answered()).count();
        let too_many = awaiting >= QUESTIONS_MAX;
        cx.stats.handover_queries += 1;
        cx.stats.handover_without_producer += u64::from(lost);
        cx.stats.handover_beyond_limit += u64::from(too_many && !lost);
        if lost || too_many { 0 } else { patience.waits.promise }
    }

    /// True if another engine here may compute the awaited blocks: it is bound to the same namespace.
    pub(super) fn has_producer(&self, question: Question, binding: &Binding, engines: &Engines) -> bool {
        self.others(question.session, binding.namespace, engines).next().is_some()
    }

    /// Lets a question wait for a producer, if its window is open and a wait may help. True if it waits.
    pub(super) fn wait_for_producer(&mut self, question: Question, base: &mut Base) -> bool {
        let now_ms = base.cx.now_ms;
        if self.window(question).is_none_or(|window| now_ms >= window.until_ms) {
            return false;
        }
        let promise = question.awaits.then(|| self.promise_of_next(question, base)).flatten();
        let in_vain = match &promise {
            Some(promise) => !self.trusts(question, promise, base),
            None => self.is_at_tail(question) || question.awaits && self.is_in_vain(question, base),
        };
        if in_vain {
            return false;
        }
        self.wait_for_promise(question, promise);
        let Some(window) = self.window(question) else { return false };
        let (look_ms, is_new) = (window.idle(now_ms), !std::mem::replace(&mut window.waited, true));
        self.windows.look_at(look_ms);
        self.windows.waits += u64::from(is_new && !question.awaits);
        let (since, held) = (base.cx.now, Vec::new());
        self.begin_wait(Wait { question, since, held, phase: WaitPhase::ForProducer });
        self.unstood.push(question);
        true
    }

    /// Asks the peers that have promised the blocks behind a question's run for the next ones, before these are
    /// committed there.
    pub(super) fn stand_for(&mut self, question: Question, base: &mut Base) {
        let now_ms = base.cx.now_ms;
        let is_idle = self.waits.get(&(question.session, question.log)).is_some_and(|wait| {
            wait.question.op == question.op && matches!(wait.phase, WaitPhase::ForProducer)
        });
        let window = self.window(question).filter(|_| is_idle).filter(|window| window.may_stand(now_ms));
        let Some(window) = window else { return };
        let (end, peers) = (window.end, window.promise.as_ref().map_or_else(Vec::new, Promise::peers));
        if peers.is_empty() {
            return;
        }
        let Some((binding, missing)) = self.missing(question, base) else { return };
        let most = (AHEAD_BYTES / binding.block_bytes()).max(1) as usize;
        let run: Vec<BlockHash> = missing.iter().take(most).copied().collect();
        if base.sources.stand_for(&binding, &peers, (end, &run), &mut base.cx)
            && let Some(window) = self.window(question)
        {
            window.stood = Some((now_ms, end));
        }
    }

    /// True if a question may wait for a promise.
    fn trusts(&mut self, question: Question, promise: &Promise, base: &mut Base) -> bool {
        promise.is_believed
            || self.window(question).is_some_and(|window| window.knows(promise))
            || self.begin_trial(promise, base)
    }

    fn wait_for_promise(&mut self, question: Question, promise: Option<Promise>) {
        let most_ms = self.askers[&question.session].patience.waits.handover;
        if let (Some(window), Some(promise)) = (self.window(question), promise) {
            window.note_promise(promise, most_ms);
        }
    }

    /// Asks questions waiting for a producer again, if there is more to be had or their window is over.
    pub(crate) fn look_again(&mut self, base: &mut Base) {
        let now_ms = base.cx.now_ms;
        if self.windows.next_look_ms.take_if(|at| *at <= now_ms).is_none() {
            return;
        }
        for question in self.idle() {
            let Some(window) = self.window(question) else { continue };
            let (due, looks) = (now_ms >= window.until_ms, now_ms >= window.look_ms);
            // A known promise matters again when the window is due.
            let decides = question.awaits && (due || window.promise.is_none());
            let promise = decides.then(|| self.promise_of_next(question, base)).flatten();
            let promise = promise.filter(|promise| promise.is_believed);
            let is_promised = promise.is_some();
            self.wait_for_promise(question, promise);
            let Some(window) = self.window(question) else { continue };
            if due && is_promised {
                window.renew(now_ms);
            }
            if due || looks && self.next_is_here(question, base) {
                self.ask_again((question.session, question.log), base);
            } else if let Some(window) = self.window(question) {
                let look_ms = window.idle(now_ms);
                self.windows.look_at(look_ms);
                self.unstood.push(question);
            }
        }
    }

    /// Returns the keys of a question behind its window's run, one at least, and the binding of its engine.
    fn missing(&self, question: Question, base: &Base) -> Option<(Binding, &[BlockHash])> {
        let log = self.log(question.session, question.log);
        let missing = log.wanted_from(question, log.window.as_ref()?.end);
        base.engines[question.session].binding().zip(missing.filter(|missing| !missing.is_empty()))
    }

    /// True if the next block can be had.
    fn next_is_here(&self, question: Question, base: &mut Base) -> bool {
        let Some((binding, missing)) = self.missing(question, base) else { return true };
        base.cx.dram.probe(binding.namespace, &missing[..1]) > 0
            || base.sources.may_arrive(&binding, missing, question.awaits, &base.cx)
    }

    /// True if a question's run lacks only a prompt's tail: not every engine produces it, so only a promised
    /// one is waited for.
    fn is_at_tail(&self, question: Question) -> bool {
        let log = self.log(question.session, question.log);
        log.window.as_ref().is_some_and(|window| log.is_tail(window.end as usize))
    }

    /// True if another engine has computed the next block, and it is not kept.
    fn next_is_lost(&self, question: Question, base: &Base) -> bool {
        self.missing(question, base)
            .is_some_and(|(binding, missing)| base.cx.lost.has(&binding.block_key(&missing[0])))
    }

    /// True if the next block, without a promise now, will not come. Either it was computed and is not kept;
    /// or its promise has ended, no engine here may compute it, and no source has it.
    fn is_in_vain(&self, question: Question, base: &Base) -> bool {
        if self.next_is_lost(question, base) {
            return true;
        }
        let Some((binding, missing)) = self.missing(question, base) else { return false };
        self.was_promised(question)
            && !self.has_producer(question, &binding, &base.engines)
            && !base.sources.may_arrive(&binding, missing, true, &base.cx)
    }

    fn was_promised(&self, question: Question) -> bool {
        self.log(question.session, question.log)
            .window
            .as_ref()
            .is_some_and(|window| window.promise.is_some())
    }

    /// Handles new slots of saves: asks the questions waiting for these blocks again.
    pub(crate) fn look_at_saves(&mut self, base: &mut Base) {
        for question in self.idle().into_iter().filter(|question| question.awaits) {
            if self.next_is_here(question, base) {
                let now_ms = base.cx.now_ms;
                self.window(question).into_iter().for_each(|window| window.look_ms = now_ms);
                self.ask_again((question.session, question.log), base);
            }
        }
    }

    /// Handles blocks announced by a peer: asks the questions waiting for one of them again. If the blocks
    /// requested last did not come, a question keeps its pause.
    pub(crate) fn look_at_announced(&mut self, changes: &[DigestChange], base: &mut Base) {
        let waiting = self.idle();
        if waiting.is_empty() {
            return;
        }
        let added = changes.iter().filter(|change| matches!(change, DigestChange::Added(_)));
        let added: HashSet<Digest> = added.map(|change| change.digest()).collect();
        for question in waiting {
            let next = self.missing(question, base);
            let next = next.map(|(binding, missing)| binding.block_digest(&missing[0]));
            let now_ms = base.cx.now_ms;
            let is_due = next.is_some_and(|next| added.contains(&next))
                && self.window(question).is_some_and(|window| window.look_at_once(now_ms));
            if is_due && self.next_is_here(question, base) {
                self.ask_again((question.session, question.log), base);
            }
        }
    }

    /// Handles the end of an engine, of a promise (a peer's promise, too) or of a save for another engine:
    /// answers questions for blocks that will not come. `hands_over`: true for a session with unended saves
    /// for others, whose blocks will come.
    pub(crate) fn end_vain_waits(&mut self, hands_over: impl Fn(SessionId) -> bool, base: &mut Base) {
        for question in self.idle().into_iter().filter(|question| question.awaits) {
            let Some(binding) = base.engines[question.session].binding() else { continue };
            let others: Vec<SessionId> =
                self.others(question.session, binding.namespace, &base.engines).collect();
            let is_coming = || others.iter().any(|other| hands_over(*other));
            let promise = self.promise_of_next(question, base);
            let window = self.log(question.session, question.log).window.as_ref();
            let stands =
                |promise: Promise| promise.is_believed || window.is_some_and(|it| it.knows(&promise));
            let promised = promise.is_some_and(stands);
            let is_over = self.was_promised(question) && !promised && !is_coming();
            let in_vain = !promised && self.next_is_lost(question, base)
                || is_over
                || others.is_empty() && !base.sources.may_ask_peers(&binding, &base.cx);
            if !in_vain || self.next_is_here(question, base) {
                continue;
            }
            let now_ms = base.cx.now_ms;
            self.window(question).into_iter().for_each(|window| window.until_ms = now_ms);
            self.ask_again((question.session, question.log), base);
            if others.is_empty() {
                // The end of an engine says nothing about the next one.
                self.asker(question.session).patience.restore();
            }
        }
    }

    /// Returns the questions waiting for a producer.
    fn idle(&self) -> Vec<Question> {
        let idle = self.waits.values().filter(|wait| matches!(wait.phase, WaitPhase::ForProducer));
        idle.map(|wait| wait.question).collect()
    }

    /// Handles the end of all blocks requested for a query. It is asked again as long as its window is open.
    pub(super) fn all_ended(&mut self, place: (SessionId, u32), base: &mut Base) {
        let goes_on = self.goes_on(place);
        match self.askers.get_mut(&place.0).and_then(|asker| asker.logs.window(place.1)) {
            Some(window) => {
                window.pause(base.cx.now_ms);
                self.ask_again(place, base);
            }
            None if goes_on => self.ask_again(place, base),
            None => self.answer_wait(place, base),
        }
    }

    /// Closes the window of a question answered with so many hits: its request no longer waits.
    pub(super) fn end_window(&mut self, question: Question, hits: u32, base: &mut Base) {
        let now_ms = base.cx.now_ms;
        let log = self.asker(question.session).logs.known_mut(question.log);
        let missing = log.missing(question, hits);
        let Some(window) = log.window.take().filter(|window| window.waited) else { return };
        if let Some(promise) = &window.promise {
            self.judge_promise(promise, (question.from + hits, missing == 0), base);
        }
        let patience = &mut self.asker(question.session).patience;
        if missing == 0 {
            return patience.restore();
        }
        // A broken promise counts against its promiser.
        patience.exhausted += u32::from(window.promise.is_none());
        let trips = window.promise.is_none() && patience.exhausted == EXHAUSTED_MAX;
        let cx = &mut base.cx;
        match question.awaits {
            true => cx.stats.handover_exhausted += 1,
            false => self.windows.exhausted += 1,
        }
        self.windows.unreported += 1;
        if trips || now_ms >= self.windows.quiet_until_ms {
            self.windows.quiet_until_ms = now_ms + QUIET_MS;
            let (waited_ms, unreported) =
                (now_ms - window.asked_ms, std::mem::take(&mut self.windows.unreported));
            let waited = if question.awaits { AWAITED } else { MISSED };
            let scheduler = &base.engines[question.session];
            cx.actions.push(Action::Warn(warning(
                &scheduler.engine,
                waited,
                (missing, waited_ms, unreported),
                trips,
            )));
        }
    }

    /// Lets requests of all engines wait again: a peer has given a block.
    pub(crate) fn restore_patience(&mut self) {
        self.askers.values_mut().for_each(|asker| asker.patience.restore());
    }

    /// Lets requests of the other engines of a namespace wait again: an engine has saved blocks of it.
    pub(crate) fn restore_patience_beside(&mut self, namespace: u32, saver: SessionId, engines: &Engines) {
        let others: Vec<SessionId> = self.others(saver, namespace, engines).collect();
        others.into_iter().for_each(|session| self.asker(session).patience.restore());
    }

    /// Returns the mesh's figures with those of the windows.
    pub(crate) fn count_waits(&self, stats: PeersStats) -> PeersStats {
        let lost = self.askers.values().filter(|asker| asker.patience.is_lost());
        PeersStats {
            miss_waits: self.windows.waits,
            miss_waits_exhausted: self.windows.exhausted,
            miss_wait_breakers: lost.count() as u64,
            ..stats
        }
    }

    fn window(&mut self, question: Question) -> Option<&mut Window> {
        self.askers.get_mut(&question.session)?.logs.window(question.log)
    }
}

/// The cause of a request's wait, and the advice after a wait without its blocks.
const MISSED: (&str, &str) = (
    "pillion.miss_wait_ms",
    "Check that the pod that computes its prompts is in this mesh and has the same namespace",
);
const AWAITED: (&str, &str) = (
    "do_remote_prefill",
    "Check that the engine that computes its prompts gets do_remote_decode, has the same namespace, and is on this node \
     or in this mesh",
);

fn warning(
    engine: &str,
    (reason, remedy): (&str, &str),
    (missing, waited_ms, unreported): (usize, u64, u64),
    trips: bool,
) -> String {
    let breaker = match trips {
        true => format!(
            "; after {EXHAUSTED_MAX} such waits in a row its requests wait no longer, until another engine or a peer \
             delivers a block"
        ),
        false => String::new(),
    };
    format!(
        "a request of engine {engine} waited {waited_ms} ms ({reason}) for {missing} blocks that no engine has \
         produced, and computes them itself ({unreported} such requests since the last of these lines){breaker}. {remedy}"
    )
}
