//! A prompt at the prefill engine, and the signs of the engine's work on it.

use std::sync::Arc;
use std::time::Duration;

use hyper::Response;
use hyper::body::Bytes;
use tokio::sync::Notify;
use tokio::sync::watch::{Receiver, channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::body::find_entry;
use super::counters::{PromptFailure, code_of};
use super::engine::{LoadShare, RouteEngine};
use super::forward::{ForwardError, OpenedAnswer, RouteRequest};
use super::handed_over::HandedOver;
use super::requests::PARAMS;
use super::tokens::PromptSizes;
use super::usage::Usage;
use super::{Router, first_token, watch};
use sidecar::pages::connections::run_until;

/// A prefill engine that answered no prompt for this time is not waited for alone any more: the router also
/// asks the decode engine, whose sidecar knows if the prompt is promised, and which computes it after a
/// second without a promise. With a look and [`USAGE_TIME_MAX`] a client waits 5 s at most.
const STALL_MAX: Duration = Duration::from_millis(3500);
/// Interval of looks at an engine without an answer yet.
const LOOK: Duration = Duration::from_millis(250);
/// The longest time from the decode engine's first answer to the prefill engine's answer: the decode engine
/// had all blocks before.
const BEHIND_MAX: Duration = Duration::from_secs(1);
/// The longest wait for the prefill engine's usage: both engines end at one time.
const USAGE_TIME_MAX: Duration = Duration::from_millis(250);

/// The result of a prompt at its prefill engine.
pub(super) type Outcome = Result<Computed, PromptFailure>;

/// The answer of a prefill engine with a computed prompt.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) answer: Response<Bytes>,
    /// Its `kv_transfer_params` for the decode engine, as JSON; empty in a stream.
    pub(super) params: Bytes,
    pub(super) usage: Usage,
    at: Instant,
}

/// A prompt under way at a prefill engine. Dropping it gives the prompt up, except after `let_go`.
#[derive(Debug)]
pub(super) struct Computing {
    outcome: Receiver<Option<Arc<Outcome>>>,
    /// Notified once the decode engine begins to answer.
    began: Arc<Notify>,
    engine: Arc<RouteEngine>,
    /// The decode engine computes a prompt of fewer tokens.
    tokens_min: u64,
    task: Option<JoinHandle<()>>,
}

/// A prompt on its way from a prefill engine to a decode engine. It is counted once, at both: by the answer's
/// usage, or without any on drop.
#[derive(Debug)]
pub(super) struct HandOver {
    engines: [Arc<RouteEngine>; 2],
    /// The prefill engine's answer. Its failures are counted in `compute`.
    outcome: Receiver<Option<Arc<Outcome>>>,
    tokens_min: u64,
    is_judged: bool,
}

// === impl Computing ===

impl Computing {
    /// Asks the engine of a share of load for its answer to a prompt of these sizes: a stream of one token, or a whole.
    pub(super) fn ask_engine(
        router: Arc<Router>,
        share: LoadShare,
        asked: RouteRequest,
        sizes: PromptSizes,
        is_stream: bool,
    ) -> Self {
        let (tell, outcome) = channel(None);
        let began = Arc::new(Notify::new());
        let reported = Arc::clone(&began);
        let (engine, tokens_min) = (Arc::clone(&share.engine), router.options.min_remote_tokens);
        let task = tokio::spawn(async move {
            let outcome = router.compute(share, asked, sizes, is_stream, &reported).await;
            let _ = tell.send(Some(Arc::new(outcome)));
        });
        Self { outcome, began, engine, tokens_min, task: Some(task) }
    }

    /// The prompt on its way to a decode engine.
    pub(super) fn hand_over(&self, to: &Arc<RouteEngine>) -> HandOver {
        let engines = [&self.engine, to].map(Arc::clone);
        HandOver { engines, outcome: self.outcome.clone(), tokens_min: self.tokens_min, is_judged: false }
    }

    /// Returns the result of the prompt, once it is known.
    pub(super) fn outcome(&self) -> impl Future<Output = Arc<Outcome>> + Send + 'static {
        let mut outcome = self.outcome.clone();
        async move {
            let known = outcome.wait_for(Option::is_some).await;
            known.ok().and_then(|known| known.clone()).unwrap_or_else(|| Arc::new(Err(PromptFailure::Broken)))
        }
    }

    /// The cached tokens stated by the prefill engine, if it answers within [`USAGE_TIME_MAX`].
    pub(super) fn cached(&self) -> impl Future<Output = Option<u64>> + Send + 'static {
        let outcome = self.outcome();
        async move {
            let outcome = tokio::time::timeout(USAGE_TIME_MAX, outcome).await.ok()?;
            outcome.as_ref().as_ref().ok()?.usage.cached_tokens
        }
    }

    /// Notes that the decode engine began to answer. A stream's beginning shows the time of the hand-over, if the prefill engine answered
    /// before.
    pub(super) fn answer_began(&self, engine: &RouteEngine, opened: &OpenedAnswer) {
        self.began.notify_one();
        if opened.is_begun_stream()
            && let Some(Ok(computed)) = self.outcome.borrow().as_deref()
        {
            engine.prompts().hand_over.add_time(computed.at.elapsed());
        }
    }

    /// Lets the prefill engine go on with the prompt to its end, or to a sign that it does not work.
    pub(super) fn unpin(&mut self) {
        self.task = None;
    }
}

impl Drop for Computing {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

// === impl HandOver ===

impl HandOver {
    /// Judges by the usage of the decode engine. Only the first statement counts.
    pub(super) fn judge(&mut self, answered: Usage) {
        let computed = match self.outcome.borrow().as_deref() {
            Some(Ok(computed)) => computed.usage,
            Some(Err(_)) => return,
            None => Usage::default(),
        };
        if !self.is_judged
            && let Some(result) = HandedOver::judge_usage(answered, computed, self.tokens_min)
        {
            self.is_judged = true;
            self.count_result(result);
        }
    }

    fn count_result(&self, result: HandedOver) {
        self.engines.iter().for_each(|engine| engine.figures.count_result(result));
    }
}

impl Drop for HandOver {
    fn drop(&mut self) {
        if !self.is_judged && matches!(self.outcome.borrow().as_deref(), Some(Ok(_))) {
            self.count_result(HandedOver::Unstated);
        }
    }
}

/// Ends once an engine has shown no work since `asked` for too long, or did not work before. While a decode
/// engine waits for another prompt of this engine, that prompt shows the engine's state: during a long step
/// the engine promises no other prompt.
pub(super) async fn await_stall(engine: &RouteEngine, asked: Instant) {
    let is_early = || engine.answered().max(Some(asked)).is_some_and(|at| at.elapsed() < STALL_MAX);
    while (is_early() || engine.is_awaited() && !engine.is_unpromised()) && engine.is_up(Instant::now()) {
        sleep(LOOK).await;
    }
}

/// Ends once the decode engine answers, if the prefill engine then answers no prompt for
/// [`watch::SILENCE_MAX`] and no decode engine waits for a promised one.
async fn left_behind(engine: &RouteEngine, asked: Instant, began: &Notify) {
    began.notified().await;
    engine.set_unpromised();
    let soonest = Instant::now() + BEHIND_MAX;
    loop {
        let until = engine.answered().max(Some(asked)).unwrap_or(asked) + watch::SILENCE_MAX;
        if Instant::now() < until.max(soonest) {
            sleep_until(until.max(soonest)).await;
        } else if engine.is_promised() {
            sleep(LOOK).await;
        } else {
            return;
        }
    }
}

// === impl Router ===

impl Router {
    /// Has a prompt computed. A failure is counted, except a refusal of the prompt: the client may have
    /// caused it.
    async fn compute(
        &self,
        mut share: LoadShare,
        asked: RouteRequest,
        sizes: PromptSizes,
        is_stream: bool,
        began: &Notify,
    ) -> Outcome {
        let (engine, begin) = (Arc::clone(&share.engine), Instant::now());
        let limit = Duration::from_millis(self.options.prefill_timeout.as_millis());
        let breaks = Arc::clone(&asked.breaks);
        let ask = watch::ask_within(&engine, asked, limit);
        let answer = run_until(ask, left_behind(&engine, begin, began)).await;
        let answer = answer.unwrap_or(Err(ForwardError::Silent(watch::SILENCE_MAX)));
        breaks.count_break(&answer);
        share.note_answer(code_of(answer.as_ref().map(Response::status)));
        share.note_end();
        match &answer {
            Ok(_) | Err(ForwardError::Status(_)) => engine.was_in_time(Instant::now()),
            // The prompt may be a long one. No request waits for the look at the engine's health.
            Err(ForwardError::Late(_)) if engine.is_late_once() => {
                tokio::spawn(watch::judge_engine(Arc::clone(&engine)));
            }
            Err(_) => engine.set_down(Instant::now()),
        }
        let answer = answer.map_err(|error| {
            let failure = PromptFailure::from(&error);
            if failure != PromptFailure::Refused {
                tracing::warn!(engine = %engine.address, %error, "a prompt was not computed there");
                self.counters.failure(failure);
            }
            failure
        })?;
        let (said, at) = (str::from_utf8(answer.body()).unwrap_or_default(), Instant::now());
        if is_stream {
            let cached_tokens = Usage::of_events(said).cached_tokens;
            let usage = Usage { prompt_tokens: first_token::count_prompt(said), cached_tokens };
            self.learn_prompt(&share, &sizes, usage);
            return Ok(Computed { answer, params: Bytes::new(), usage, at });
        }
        let params = find_entry(said, PARAMS).filter(|params| params.starts_with('{'));
        let usage = Usage::of_answer(said, params);
        self.learn_prompt(&share, &sizes, usage);
        let Some(params) = params.map(|params| answer.body().slice_ref(params.as_bytes())) else {
            self.counters.failure(PromptFailure::NoParams);
            let remedy = "its answer has no kv_transfer_params: start vLLM there with Pillion's connector";
            tracing::warn!(engine = %engine.address, "{remedy}");
            return Err(PromptFailure::NoParams);
        };
        Ok(Computed { answer, params, usage, at })
    }

    /// Learns from a computed prompt: the bytes of its tokens, and the time of those that were not cached.
    fn learn_prompt(&self, share: &LoadShare, sizes: &PromptSizes, usage: Usage) {
        let Some(prompt) = &share.prompt else { return };
        let (expected, stated) = (self.token_bytes.tokens(sizes), usage.prompt_tokens);
        let computed = match (stated, usage.cached_tokens) {
            (Some(tokens), Some(cached)) => tokens.saturating_sub(cached),
            (Some(tokens), None) => (prompt.tokens() as f64 * tokens as f64 / expected.max(1) as f64) as u64,
            (None, _) => prompt.tokens(),
        };
        prompt.learn_time(computed);
        stated.into_iter().for_each(|tokens| self.token_bytes.learn(sizes, tokens));
    }
}
