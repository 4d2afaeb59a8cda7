//! Waiting for a producer: where prompts are computed by another pod, a block that is missing may be on its way.
//!
//! The first question of a request opens its window, if its engine asked for one and there are peers. As long as the window is
//! open, a question whose run ends early is not answered; it is asked again when the next block of the run can be had here, from
//! a disk or from a peer. The window ends when the run has not grown for its length, and at the latest [`QUERY_WAIT_MS_MAX`]
//! after that first question; then the question is answered with what is there, and the request waits no more.
//!
//! An engine of which three windows in a row ended so, with not one block from a peer in between, most likely has no producer:
//! its requests do not wait, until a peer has given a block to anyone.

use shm_protocol::layout::QUERY_WAIT_MS_MAX;

use super::namespaces::Binding;
use super::waits::Question;
use super::{Action, Core, GROUP, SessionId};

/// How often a question is asked again at most. A look costs a search for one block here and in what is known of each peer,
/// some microseconds; a producer's blocks come by the step, every 10 ms at best, and are told of by the batch.
const LOOK_MS: u64 = 20;
/// Windows in a row that end without the blocks, after which an engine's requests do not wait.
const EXHAUSTED_MAX: u32 = 3;
/// Of exhausted windows the log tells this often at most.
const QUIET_MS: u64 = 10_000;

/// What an engine thinks of waiting.
#[derive(Debug)]
pub(super) struct Patience {
    window_ms: u64,
    /// Windows in a row that were exhausted.
    exhausted: u32,
}

/// The time in which a request's questions wait for a producer.
#[derive(Debug)]
pub(super) struct Window {
    asked_ms: u64,
    until_ms: u64,
    /// The key at which the run ends.
    end: u32,
    /// Whether a question had nothing else to wait for.
    waited: bool,
    /// Nothing is looked for before.
    look_ms: u64,
    /// How long nothing is, after blocks that were said to be there and were not: it doubles.
    pause_ms: u64,
}

/// What all windows share.
#[derive(Debug)]
pub(super) struct Windows {
    /// When a question is to be asked again.
    next_look_ms: u64,
    quiet_until_ms: u64,
    /// Windows exhausted that the log has not been told of.
    untold: u64,
}

// === impl Patience ===

impl Patience {
    pub(super) fn new(window_ms: Option<u32>) -> Self {
        Self { window_ms: window_ms.unwrap_or(0).into(), exhausted: 0 }
    }

    /// A peer has given a block.
    pub(super) fn restore(&mut self) {
        self.exhausted = 0;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.exhausted >= EXHAUSTED_MAX
    }
}

// === impl Window ===

impl Window {
    fn open(now_ms: u64, end: u32, length_ms: u64) -> Self {
        let until_ms = now_ms + length_ms;
        Self { asked_ms: now_ms, until_ms, end, waited: false, look_ms: now_ms, pause_ms: LOOK_MS }
    }

    /// The run ends here now.
    fn see(&mut self, now_ms: u64, end: u32, length_ms: u64) {
        if end > self.end {
            self.until_ms = (now_ms + length_ms).min(self.asked_ms + u64::from(QUERY_WAIT_MS_MAX));
            (self.look_ms, self.pause_ms) = (now_ms, LOOK_MS);
        }
        self.end = end;
    }

    /// What was sent for has ended; if the run has not grown by it, the same would be sent for again.
    fn pause(&mut self, now_ms: u64) {
        self.look_ms = now_ms + self.pause_ms;
        self.pause_ms *= 2;
    }

    /// There is nothing to send for now; when to look again.
    fn idle(&mut self, now_ms: u64) -> u64 {
        self.look_ms = self.look_ms.max(now_ms + LOOK_MS);
        self.look_ms.min(self.until_ms)
    }
}

// === impl Windows ===

impl Default for Windows {
    fn default() -> Self {
        Self { next_look_ms: u64::MAX, quiet_until_ms: 0, untold: 0 }
    }
}

// === impl Core ===

impl Core {
    /// When time must pass for a question to be asked again.
    pub fn next_look_ms(&self) -> Option<u64> {
        Some(self.windows.next_look_ms).filter(|at| *at < u64::MAX)
    }

    /// A question's run has so many hits; the first of a request opens its window. Whether more may be sent for now.
    pub(super) fn see_run(
        &mut self,
        now_ms: u64,
        session: SessionId,
        binding: &Binding,
        question: Question,
        hits: u32,
    ) -> bool {
        let may_open = self.may_ask_peers(binding);
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        let log = scheduler.logs.known_mut(question.log);
        let (patience, end) = (&scheduler.patience, question.from + hits);
        let is_new = !std::mem::replace(&mut log.asked, true);
        if is_new && may_open && patience.window_ms > 0 && !patience.is_lost() {
            log.window = Some(Window::open(now_ms, end, patience.window_ms));
        }
        let Some(window) = &mut log.window else { return true };
        window.see(now_ms, end, patience.window_ms);
        now_ms >= window.look_ms
    }

    /// Lets a question wait for a producer, if its window is open.
    pub(super) fn wait_for_producer(&mut self, now_ms: u64, session: SessionId, question: Question) -> bool {
        let window = self.window(session, question.log).filter(|window| now_ms < window.until_ms);
        let Some(window) = window else { return false };
        let (look_ms, is_new) = (window.idle(now_ms), !std::mem::replace(&mut window.waited, true));
        self.windows.next_look_ms = self.windows.next_look_ms.min(look_ms);
        self.arrivals.wait(session, question, 0, false, Vec::new());
        if let Some(peers) = &mut self.peers {
            peers.count_wait(is_new);
        }
        true
    }

    /// Asks the questions again that wait for a producer, where there is more to be had or their window is over.
    pub(super) fn look_again(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        if now_ms < self.windows.next_look_ms {
            return;
        }
        self.windows.next_look_ms = u64::MAX;
        for (session, question) in self.arrivals.idle() {
            let Some(window) = self.window(session, question.log) else { continue };
            let (due, looks) = (now_ms >= window.until_ms, now_ms >= window.look_ms);
            if due || looks && self.next_is_here(now_ms, session, question) {
                self.ask_again(now_ms, (session, question.log), out);
            } else if let Some(window) = self.window(session, question.log) {
                let look_ms = window.idle(now_ms);
                self.windows.next_look_ms = self.windows.next_look_ms.min(look_ms);
            }
        }
    }

    /// Whether the block at which a question's run ends can be had.
    fn next_is_here(&mut self, now_ms: u64, session: SessionId, question: Question) -> bool {
        let Some(binding) = self.binding(session) else { return true };
        let log = self.schedulers[&session].logs.known(question.log);
        let next = log.window.as_ref().and_then(|window| log.keys.get(window.end as usize));
        let Some(&hash) = next else { return true };
        self.dram.probe(binding.namespace, GROUP, &[hash]) > 0 || self.may_arrive(now_ms, &binding, &hash)
    }

    /// All that a waiting query sent for has ended. It is asked again as long as its window is open.
    pub(super) fn all_ended(&mut self, now_ms: u64, place: (SessionId, u32), out: &mut Vec<Action>) {
        match self.window(place.0, place.1) {
            Some(window) => {
                window.pause(now_ms);
                self.ask_again(now_ms, place, out);
            }
            None => self.answer_wait(now_ms, place, out),
        }
    }

    /// A question is answered with so many hits: its request waits no more.
    pub(super) fn end_window(
        &mut self,
        now_ms: u64,
        session: SessionId,
        question: Question,
        hits: u32,
        out: &mut Vec<Action>,
    ) {
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        let log = scheduler.logs.known_mut(question.log);
        let missing = log.wanted(question).len() - hits as usize;
        let Some(window) = log.window.take() else { return };
        if !window.waited {
            return;
        }
        if missing == 0 {
            return scheduler.patience.restore();
        }
        scheduler.patience.exhausted += 1;
        let trips = scheduler.patience.exhausted == EXHAUSTED_MAX;
        let engine = scheduler.engine.clone();
        if let Some(peers) = &mut self.peers {
            peers.count_exhausted();
        }
        self.windows.untold += 1;
        if trips || now_ms >= self.windows.quiet_until_ms {
            self.windows.quiet_until_ms = now_ms + QUIET_MS;
            let (waited_ms, untold) = (now_ms - window.asked_ms, std::mem::take(&mut self.windows.untold));
            out.push(Action::Warn(warning(&engine, missing, waited_ms, untold, trips)));
        }
    }

    /// Engines whose requests do not wait, because it was in vain.
    pub(super) fn lost_patience(&self) -> u64 {
        self.schedulers.values().filter(|scheduler| scheduler.patience.is_lost()).count() as u64
    }

    pub(super) fn window(&mut self, session: SessionId, log: u32) -> Option<&mut Window> {
        self.schedulers.get_mut(&session)?.logs.window(log)
    }
}

fn warning(engine: &str, missing: usize, waited_ms: u64, untold: u64, trips: bool) -> String {
    let breaker = match trips {
        true => format!(
            "; that was {EXHAUSTED_MAX} times in a row: its requests do not wait any more until a peer has given a block"
        ),
        false => String::new(),
    };
    format!(
        "a request of engine {engine} waited {waited_ms} ms (pillion.miss_wait_ms) for {missing} blocks that nobody has produced, and computes them ({untold} such since the last of these lines){breaker}. Is the pod that computes its prompts in this mesh, and of the same namespace?"
    )
}
