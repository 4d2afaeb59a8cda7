//! One engine: its work, its state, and the router's knowledge of it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use prometheus::proto::MetricFamily;
use tokio::time::Instant;

use super::address::EngineAddress;
use super::answer_terms::AnswerTerms;
use super::engine_prompts::{AlonePrompt, EnginePrompts};
use super::figures::{DROPPED, EngineFigures};
use super::forward::Forwarder;
use super::prompt_times::BegunPrompt;
use super::tls::TowardsEngines;

/// One request tries an engine again this long after it was unreachable or silent. Each failed trial doubles the pause, up to the longest.
pub(super) const DOWN: Duration = Duration::from_secs(5);
pub(super) const DOWN_MAX: Duration = Duration::from_secs(30);
/// A decode engine waits one second without a promise, and has one more to begin.
const UNPROMISED_MAX: Duration = Duration::from_secs(2);
/// Conversations given to an engine count half after this.
const RECENT_HALF: Duration = Duration::from_secs(60);
/// Terms are asked for again after this: an engine may be replaced unnoticed between two requests.
pub(super) const TERMS_AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct RouteEngine {
    pub(super) address: EngineAddress,
    pub(super) forwarder: Forwarder,
    /// Work under way: tokens of prompts, or requests.
    load: AtomicU64,
    /// Conversations of the last minutes, ended ones included.
    recent: Mutex<Recent>,
    /// Time of the last answered prompt since it was down.
    answered: Mutex<Option<Instant>>,
    /// Begins of the waits for its prompts at decode engines.
    awaited: Mutex<Vec<Instant>>,
    /// True once a waiting decode engine began to answer before this engine did.
    is_unpromised: AtomicBool,
    /// The number of the engine within its role.
    pub(super) number: u32,
    /// Count of its last prompts in a row without an answer in time.
    late: AtomicU32,
    down: Mutex<Option<Down>>,
    terms: Mutex<KnownTerms>,
    prompts: Mutex<EnginePrompts>,
    pub(super) figures: EngineFigures,
    /// Time of its last sign of life to a waiting request. All waiting requests share a look.
    pub(super) seen: tokio::sync::Mutex<Option<Instant>>,
}

/// The pause of an engine after a failure.
#[derive(Copy, Clone, Debug)]
struct Down {
    until: Instant,
    pause: Duration,
    /// True while a request tries it, with nothing known yet.
    tried: bool,
}

/// The known terms of the engine's answers.
#[derive(Debug, Default)]
struct KnownTerms {
    /// The terms since the engine was last down, `None` if no other engine goes on with its answers, and their time: the engine may come
    /// back with others.
    said: Option<(Option<Arc<AnswerTerms>>, Instant)>,
    /// True if a question had no answer since the last answered one.
    is_missed: bool,
}

/// A sum of parts, each worth less with time.
#[derive(Copy, Clone, Debug, Default)]
struct Recent {
    sum: f64,
    at: Option<Instant>,
}

/// A share of an engine's load, given back on drop.
#[derive(Debug)]
pub(super) struct LoadShare {
    pub(super) engine: Arc<RouteEngine>,
    pub(super) weight: u64,
    /// True if its request tries an engine after a failure.
    pub(super) is_trial: bool,
    /// The prompt that the engine computes, until the answer shows the end.
    pub(super) prompt: Option<PromptShare>,
    begin: Instant,
    is_answered: bool,
    is_success: bool,
}

/// A prompt that an engine computes, until it is dropped.
#[derive(Debug)]
pub(super) struct PromptShare {
    engine: Arc<RouteEngine>,
    begun: BegunPrompt,
}

/// A prompt under way, awaited by a decode engine.
#[derive(Debug)]
pub(super) struct AwaitedPrompt(Arc<RouteEngine>, Instant);

// === impl RouteEngine ===

impl RouteEngine {
    /// Returns an engine of the role of this name.
    pub(super) fn new(
        address: EngineAddress,
        role: &'static str,
        tls: Option<Arc<TowardsEngines>>,
        number: u32,
    ) -> Arc<Self> {
        Arc::new(Self {
            figures: EngineFigures::new(role, address.to_string()),
            forwarder: Forwarder::new(address.clone(), tls),
            address,
            number,
            load: AtomicU64::new(0),
            recent: Mutex::default(),
            answered: Mutex::default(),
            awaited: Mutex::default(),
            is_unpromised: AtomicBool::new(false),
            late: AtomicU32::new(0),
            down: Mutex::default(),
            terms: Mutex::default(),
            prompts: Mutex::default(),
            seen: Default::default(),
        })
    }

    /// Returns its work under way: tokens of prompts, or requests.
    pub(super) fn under_way(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Returns the count of its conversations of the last minutes.
    pub(super) fn lately(&self, now: Instant) -> f64 {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).remaining_load(now)
    }

    /// Notes a share of a conversation as given to this engine.
    pub(super) fn note_given(&self, share: f64, now: Instant) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        *recent = Recent { sum: recent.remaining_load(now) + share, at: Some(now) };
    }

    fn down(&self) -> MutexGuard<'_, Option<Down>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_terms(&self) -> MutexGuard<'_, KnownTerms> {
        self.terms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the terms of its answers, `None` if unknown since the engine was last down.
    pub(super) fn terms(&self) -> Option<Arc<AnswerTerms>> {
        self.known_terms().said.as_ref().and_then(|(terms, _)| terms.clone())
    }

    pub(super) fn set_terms(&self, terms: AnswerTerms, now: Instant) {
        *self.known_terms() = KnownTerms { said: Some((Some(Arc::new(terms)), now)), is_missed: false };
    }

    /// Returns true if its terms must be asked for again.
    pub(super) fn are_terms_due(&self, now: Instant) -> bool {
        self.known_terms().said.as_ref().is_none_or(|(_, at)| now >= *at + TERMS_AGE_MAX)
    }

    /// Notes a question for the terms without an answer. Returns true for the first one while the terms are unknown. Known terms stay:
    /// the question carries a client's token, and the token may be wrong.
    pub(super) fn are_terms_missed_first(&self) -> bool {
        let mut terms = self.known_terms();
        terms.said.is_none() && !std::mem::replace(&mut terms.is_missed, true)
    }

    /// Notes that no other engine goes on with its answers. Returns true the first time.
    pub(super) fn refuse_terms(&self, now: Instant) -> bool {
        let before = self.known_terms().said.replace((None, now));
        before.is_none_or(|(terms, _)| terms.is_some())
    }

    /// Returns the time of its last answered prompt, `None` if there is none since it was down.
    pub(super) fn answered(&self) -> Option<Instant> {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the wait of a decode engine for a prompt of this one, until the guard is dropped.
    pub(super) fn await_prompt(self: &Arc<Self>, now: Instant) -> AwaitedPrompt {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).push(now);
        AwaitedPrompt(Arc::clone(self), now)
    }

    /// Returns the begin of the longest wait for a prompt of this engine.
    fn awaited(&self) -> Option<Instant> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).iter().min().copied()
    }

    /// Returns true if a decode engine waits for a prompt of this one.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited().is_some()
    }

    /// Returns true if one waits longer than decode engines do without a promise.
    pub(super) fn is_promised(&self) -> bool {
        self.awaited().is_some_and(|since| since.elapsed() >= UNPROMISED_MAX)
    }

    /// Notes a waiting decode engine's answer, which came before one of this engine.
    pub(super) fn set_unpromised(&self) {
        self.is_unpromised.store(true, Ordering::Relaxed);
    }

    /// Returns true if prompts of this engine seem not to be promised.
    pub(super) fn is_unpromised(&self) -> bool {
        self.is_unpromised.load(Ordering::Relaxed)
    }

    /// Notes a failure to reach the engine, or its silence.
    pub(super) fn set_down(&self, now: Instant) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.known_terms().said = None;
        let mut down = self.down();
        let pause = match *down {
            None => DOWN,
            Some(Down { pause, tried: true, .. }) => (pause * 2).min(DOWN_MAX),
            Some(Down { pause, tried: false, .. }) => pause,
        };
        *down = Some(Down { until: now + pause, pause, tried: false });
    }

    /// Notes a late prompt, and returns true for the first one in a row. After a second one an engine is left alone though its server is
    /// up: its computation may hang.
    pub(super) fn is_late_once(&self) -> bool {
        self.late.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Returns true if its late prompts leave open that it is up.
    pub(super) fn may_be_up(&self) -> bool {
        self.late.load(Ordering::Relaxed) <= 1
    }

    /// Notes an answered prompt.
    pub(super) fn was_in_time(&self, now: Instant) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        self.is_unpromised.store(false, Ordering::Relaxed);
        self.late.store(0, Ordering::Relaxed);
        self.set_up();
    }

    /// Notes an answer, and forgets earlier failures.
    pub(super) fn set_up(&self) {
        if self.down().take().is_some() {
            self.known_terms().is_missed = false;
        }
    }

    pub(super) fn is_up(&self, now: Instant) -> bool {
        self.down().is_none_or(|down| down.until <= now)
    }

    /// Returns true if the next request tries the engine after a failure.
    pub(super) fn is_trial_due(&self, now: Instant) -> bool {
        self.down().is_some_and(|down| down.until <= now)
    }

    pub(super) fn prompts(&self) -> MutexGuard<'_, EnginePrompts> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_prompt(self: &Arc<Self>, tokens: u64, until: Option<Instant>, now: Instant) -> PromptShare {
        let begun = self.prompts().times.begin_prompt(tokens, until, now);
        PromptShare { engine: Arc::clone(self), begun }
    }

    /// Adds a prompt of so many tokens to compute to a prefill engine's work, until the share is dropped.
    pub(super) fn add_prompt(self: &Arc<Self>, tokens: u64, now: Instant) -> LoadShare {
        let mut share = self.add_share(tokens, now);
        share.prompt = Some(self.begin_prompt(tokens, None, now));
        share
    }

    /// Adds a request to a decode engine's work, until the share is dropped, with the prompt that it computes alone. Only a stream shows the
    /// end of that: another one counts for its expected time.
    pub(super) fn add_request(
        self: &Arc<Self>,
        alone: Option<AlonePrompt>,
        unknown: u64,
        now: Instant,
    ) -> LoadShare {
        let mut share = self.add_share(1, now);
        share.prompt = alone.map(|alone| {
            let expected = self.prompts().times.expect_prompt(unknown, None, now);
            let end = now + Duration::from_secs_f64(expected.map_or(0.0, |expected| expected.finish()));
            self.begin_prompt(unknown, (!alone.is_stream).then_some(end), now)
        });
        share
    }

    /// The metrics of the engine, as it is now.
    pub(super) fn gather(&self, now: Instant) -> Vec<MetricFamily> {
        let prompts = self.prompts();
        self.figures.show_times(prompts.times.tokens_per_second(), prompts.hand_over.seconds());
        drop(prompts);
        self.figures.gather(self.is_up(now), self.under_way())
    }

    /// Adds `weight` to its work until the share is dropped, for a request sent at once. The first request after a pause is a trial: without
    /// its answer the engine is left alone as long again.
    pub(super) fn add_share(self: &Arc<Self>, weight: u64, now: Instant) -> LoadShare {
        let mut down = self.down();
        let due = down.as_mut().filter(|down| down.until <= now);
        let is_trial = due.map(|down| (down.until, down.tried) = (now + down.pause, true)).is_some();
        drop(down);
        self.load.fetch_add(weight, Ordering::Relaxed);
        self.figures.open.add(i64::from(weight > 0));
        LoadShare {
            engine: Arc::clone(self),
            weight,
            is_trial,
            prompt: None,
            begin: now,
            is_answered: false,
            is_success: false,
        }
    }
}

// === impl Recent ===

impl Recent {
    fn remaining_load(&self, now: Instant) -> f64 {
        let age = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.sum * (-age.as_secs_f64() / RECENT_HALF.as_secs_f64()).exp2()
    }
}

// === impl LoadShare ===

impl LoadShare {
    /// Returns true if its engine has no other work, and the request is no trial: an engine on trial may be away.
    pub(super) fn is_alone(&self, now: Instant) -> bool {
        self.engine.load.load(Ordering::Relaxed) == self.weight && self.engine.is_up(now)
    }

    /// Counts the answer by its status, or the code of its absence, and notes its time to begin. The router's own questions have no weight
    /// and are not counted.
    pub(super) fn note_answer(&mut self, answer: Result<StatusCode, &str>) {
        if self.weight == 0 {
            return;
        }
        self.is_answered = true;
        self.is_success = answer.is_ok_and(|status| status.is_success());
        self.engine.figures.count_answer(answer);
        if self.is_success {
            self.engine.figures.note_first(self.begin.elapsed());
        }
    }

    /// Ends the prompt that a decode engine computed alone, and learns its time if the beginning of the answer shows it. Prompts of fewer
    /// than `tokens_min` tokens show no more than what every prompt takes.
    pub(super) fn end_prompt(&mut self, alone: Option<AlonePrompt>, is_shown: bool, tokens_min: u64) {
        let (Some(prompt), Some(alone)) = (self.prompt.take(), alone) else { return };
        if is_shown && alone.is_held && alone.engine == Some(self.engine.number) {
            let (unknown, now) = (prompt.tokens(), Instant::now());
            self.engine.prompts().judge_held(alone.tokens, unknown, self.begin.elapsed(), now);
        } else if is_shown && prompt.tokens() >= tokens_min {
            prompt.learn_time(prompt.tokens());
        }
    }

    /// Notes the time of a whole answer.
    pub(super) fn note_end(&self) {
        if self.is_success {
            self.engine.figures.note_whole(self.begin.elapsed());
        }
    }
}

// === impl PromptShare ===

impl PromptShare {
    /// Learns from the prompt, computed until now, of so many tokens.
    pub(super) fn learn_time(&self, tokens: u64) {
        self.engine.prompts().times.learn_time(self.begun, tokens, Instant::now());
    }

    /// Returns the tokens to compute, as they were expected.
    pub(super) fn tokens(&self) -> u64 {
        self.begun.tokens
    }
}

impl Drop for PromptShare {
    fn drop(&mut self) {
        self.engine.prompts().times.end_prompt(self.begun, Instant::now());
    }
}

impl Drop for AwaitedPrompt {
    fn drop(&mut self) {
        let mut awaited = self.0.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        let own = awaited.iter().position(|since| *since == self.1);
        own.into_iter().for_each(|own| _ = awaited.swap_remove(own));
    }
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.engine.load.fetch_sub(self.weight, Ordering::Relaxed);
        if self.weight > 0 {
            self.engine.figures.open.dec();
            if !self.is_answered {
                self.engine.figures.count_answer(Err(DROPPED));
            }
        }
    }
}
