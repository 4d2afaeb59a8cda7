//! A prompt by two engines: the prefill engine computes it, the decode engine answers.

use std::future::{pending, ready};
use std::sync::Arc;
use std::time::Duration;

use hyper::Response;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep};

use super::api::Api;
use super::body::Fields;
use super::computing::{self, Computing, Outcome};
use super::counters::{PAIR, PromptFailure};
use super::engine::{LoadShare, RouteEngine};
use super::engine_prompts::AlonePrompt;
use super::forward::{Answer, PromptAsked, RouteRequest, continue_stream};
use super::placement::place_prompt;
use super::prompt::Whole;
use super::prompt_times::KnownTimes;
use super::{AskOrder, Router, first_token, requests};
use sidecar::pages::connections::run_until;

/// By load, longer prompts wait for the prefill engine alone. A decode engine waits 30 s: at 2,000 tokens a second this many are done.
const AT_ONCE_TOKENS_MAX: u64 = 65_536;
/// A decode engine has this long to refuse a prompt after its prefill engine did.
const REFUSAL_TIME_MAX: Duration = Duration::from_millis(250);

// === impl Router ===

impl Router {
    /// Answers a prompt by two engines, or by a decode engine alone.
    pub(super) async fn route(
        self: Arc<Self>,
        asked: &RouteRequest,
        prompt: &PromptAsked,
    ) -> Response<Answer> {
        let (tokens, fields) = (self.token_bytes.tokens(&prompt.prompt.sizes()), &prompt.fields);
        let begins = self.options.first_token
            && !self.is_plain()
            && prompt.api == Api::Completions
            && first_token::may_be_split(fields, &prompt.prompt)
            && self.length_of_all(asked).is_some();
        let token_request = first_token::make_token_request(fields).ok().filter(|_| begins);
        let share = match self.choose_way(asked, prompt, tokens, token_request.is_some()) {
            Ok(share) => share,
            Err((whole, alone)) => {
                self.count_way(&asked.noted, whole.name());
                return self.answer_once(asked.with_alone(fields, alone)).await;
            }
        };
        self.count_way(&asked.noted, PAIR);
        asked.noted.notes().prefill = Some(share.engine.address.to_string());
        let engine = Arc::clone(&share.engine);
        let (answer, given_up) = match token_request {
            Some(prefill) => {
                match Arc::clone(&self).begin_stream(share, tokens, asked, prompt, &prefill).await {
                    Ok(stream) => return stream,
                    Err(opened) => opened,
                }
            }
            None => {
                let at_once = self.is_at_once(&share, tokens);
                self.pair(share, tokens, at_once, None, asked, prompt).await
            }
        };
        let Some(decode) = given_up.filter(|_| asked.breaks.break_count() == 0) else { return answer };
        // The client has no byte yet. Both engines drop the prompt before two others get it.
        drop(answer);
        self.retried(&[&engine, &decode]);
        let Some(share) = self.take_prefill_share(asked, tokens, Some(&engine)) else {
            let asked = asked.with_alone(fields, AlonePrompt::of_request(fields, tokens));
            return self.open_answer(Some(&decode), asked, None).await.0;
        };
        asked.noted.notes().prefill = Some(share.engine.address.to_string());
        // By load, the second attempt is computed first.
        let at_once = self.options.order == AskOrder::AtOnce;
        self.pair(share, tokens, at_once, Some(&decode), asked, prompt).await.0
    }

    /// Returns the most tokens of a prompt and its answer at every engine that is up, if each of them goes on with the answers of all others
    /// as with its own. Engines that stated no terms lately are asked.
    fn length_of_all(&self, asked: &RouteRequest) -> Option<u64> {
        self.terms.ask_engines([&self.prefill, &self.decode], &asked.headers);
        let now = Instant::now();
        let (prefill, decode) = (self.prefill.terms(now)?, self.decode.terms(now)?);
        let first = decode.first()?;
        let are_alike = prefill.iter().chain(&decode).all(|terms| terms.is_like(first));
        decode.iter().map(|terms| terms.length).min().filter(|_| are_alike)
    }

    /// Takes a prefill engine for a prompt; without one, returns the reason for a decode engine alone. The client of a prompt with
    /// `begins` has the first token before the hand-over.
    fn choose_way(
        self: &Arc<Self>,
        asked: &RouteRequest,
        prompt: &PromptAsked,
        tokens: u64,
        begins: bool,
    ) -> Result<LoadShare, (Whole, AlonePrompt)> {
        let (alone, now) = (AlonePrompt::of_request(&prompt.fields, tokens), Instant::now());
        if let Some(whole) = prompt.prompt.whole {
            return Err((whole, alone));
        }
        if tokens < self.options.min_remote_tokens {
            return Err((Whole::Short, alone));
        }
        if self.is_plain() {
            let engine = self.place_plain(asked, tokens, now).map(|engine| engine.number);
            return Err((Whole::Plain, AlonePrompt { engine, ..alone }));
        }
        let engines = self.decode.unknown_at_each(&asked.trail, tokens, now);
        if let Some((engine, unknown)) = engines.first()
            && *unknown < self.options.min_remote_tokens
            && engine.prompts().is_trusted(now)
        {
            return Err((Whole::Held, AlonePrompt { engine: Some(engine.number), is_held: true, ..alone }));
        }
        if let Some((whole, engine)) = self.place(asked, tokens, &engines, begins, now) {
            return Err((whole, AlonePrompt { engine: Some(engine.number), ..alone }));
        }
        match self.take_prefill_share(asked, tokens, None) {
            // The prefill engine may still be down: no client waits for a trial.
            Some(share) if share.is_trial => {
                self.start_prefill(share, asked, prompt).unpin();
                Err((Whole::NoPrefill, alone))
            }
            share => share.ok_or((Whole::NoPrefill, alone)),
        }
    }

    /// Places a prompt at one of the decode `engines` alone, by its expected times; `None` for both roles, also without known times.
    fn place(
        &self,
        asked: &RouteRequest,
        tokens: u64,
        engines: &[(Arc<RouteEngine>, u64)],
        begins: bool,
        now: Instant,
    ) -> Option<(Whole, Arc<RouteEngine>)> {
        let share = f64::from(self.options.decode_prompt_share) / 100.0;
        let (prefill, unknown) = self.prefill.choose_engine(&asked.trail, tokens, None, now)?;
        if share == 0.0 || prefill.is_trial_due(now) {
            return None;
        }
        let (mut both, other) = {
            let mut prompts = prefill.prompts();
            (prompts.times.expect_prompt(unknown, None, now)?, prompts.times.known(now))
        };
        if !begins {
            both.wait +=
                engines.first().and_then(|(engine, _)| engine.prompts().hand_over.seconds()).unwrap_or(0.0);
        }
        let offer = |(engine, unknown): &(Arc<RouteEngine>, u64)| {
            engine.prompts().offer_prompt(*unknown, other, share, engine.under_way() == 0, now)
        };
        let offers: Vec<_> = engines.iter().map(offer).collect::<Option<_>>()?;
        let target = self.options.ttft_target.map(|target| target.as_millis() as f64 / 1e3);
        let (whole, at) = place_prompt(Some(both), &offers, target)?;
        let (engine, unknown) = &engines[at];
        if engine.under_way() > 0 {
            engine.prompts().budget.spend(offers[at].expected.work, share, now);
        }
        engine.figures.alone_tokens.inc_by(*unknown);
        Some((whole, Arc::clone(engine)))
    }

    /// Returns true for a pool without prefill engines: each engine computes the prompts that it answers.
    fn is_plain(&self) -> bool {
        let is_named = self.options.engines.is_some() || !self.options.prefill.is_empty();
        !is_named && self.prefill.all().is_empty()
    }

    /// Places a prompt of such a pool at the engine with the soonest first token; `None` if no engine is up.
    fn place_plain(&self, asked: &RouteRequest, tokens: u64, now: Instant) -> Option<Arc<RouteEngine>> {
        let engines = self.decode.unknown_at_free(&asked.trail, tokens, now);
        let known = engines.iter().find_map(|(engine, _)| engine.prompts().times.known(now));
        let other = known.unwrap_or(KnownTimes::ASSUMED);
        let offer = |(engine, unknown): &(Arc<RouteEngine>, u64)| {
            engine.prompts().offer_prompt(*unknown, Some(other), 1.0, true, now)
        };
        let offers: Vec<_> = engines.iter().map(offer).collect::<Option<_>>()?;
        let (_, at) = place_prompt(None, &offers, None)?;
        Some(Arc::clone(&engines[at].0))
    }

    /// Takes a prefill engine, `spared` only if no other is up.
    fn take_prefill_share(
        &self,
        asked: &RouteRequest,
        tokens: u64,
        spared: Option<&RouteEngine>,
    ) -> Option<LoadShare> {
        let share = self.prefill.take_share(&asked.trail, tokens, spared, Instant::now())?;
        self.prefill.note_prompt(&asked.trail, &share.engine, Instant::now());
        Some(share)
    }

    /// Returns true if the decode engine of a prompt is asked together with its prefill engine. By load, the prefill engine has answered
    /// before: its first prompt may take longer than a decode engine waits.
    fn is_at_once(&self, share: &LoadShare, tokens: u64) -> bool {
        match self.options.order {
            AskOrder::ByLoad => {
                tokens <= AT_ONCE_TOKENS_MAX
                    && share.engine.answered().is_some()
                    && share.is_alone(Instant::now())
            }
            AskOrder::PrefillFirst => false,
            AskOrder::AtOnce => true,
        }
    }

    fn start_prefill(
        self: &Arc<Self>,
        share: LoadShare,
        asked: &RouteRequest,
        prompt: &PromptAsked,
    ) -> Computing {
        let sizes = prompt.prompt.sizes();
        Computing::ask_engine(Arc::clone(self), share, asked.with(&prompt.prefill), sizes, false)
    }

    /// Counts a second attempt of a prompt, after its decode engine gave it up.
    fn retried(&self, engines: &[&Arc<RouteEngine>]) {
        self.counters.retries.inc();
        engines.iter().for_each(|engine| engine.figures.retries.inc());
    }

    /// Returns the outcome of a prompt, `None` if its engine shows no work. Prompts of more than [`AT_ONCE_TOKENS_MAX`] may take all of
    /// `--prefill-timeout`.
    async fn worked(&self, computing: &Computing, engine: &RouteEngine, tokens: u64) -> Option<Arc<Outcome>> {
        let stalled = async {
            computing::await_stall(engine, Instant::now()).await;
            if tokens > AT_ONCE_TOKENS_MAX && engine.is_up(Instant::now()) {
                pending().await
            }
        };
        run_until(computing.outcome(), stalled).await
    }

    /// Answers a prompt by the engine of `share` and a decode engine, `spared` only if there is no other. Also returns the decode engine if
    /// it gave the prompt up before anything of an answer, as a strict one does without enough KV.
    async fn pair(
        self: &Arc<Self>,
        share: LoadShare,
        tokens: u64,
        at_once: bool,
        spared: Option<&RouteEngine>,
        asked: &RouteRequest,
        prompt: &PromptAsked,
    ) -> (Response<Answer>, Option<Arc<RouteEngine>>) {
        let (fields, engine) = (&prompt.fields, Arc::clone(&share.engine));
        let alone = || asked.with_alone(fields, AlonePrompt::of_request(fields, tokens));
        let computing = self.start_prefill(share, asked, prompt);
        if !at_once && let Some(outcome) = self.worked(&computing, &engine, tokens).await {
            return match &*outcome {
                Ok(computed) => {
                    let params =
                        RawValue::from_string(String::from_utf8_lossy(&computed.params).into_owned());
                    let fields = requests::make_decode(fields, params.expect("JSON of an answer"));
                    self.open_answer(spared, asked.with(&fields), Some(computing)).await
                }
                Err(failure) => self.open_alone(spared, alone(), &engine, *failure).await,
            };
        }
        let outcome = computing.outcome();
        let failing = async {
            match *outcome.await {
                // The decode engine may refuse it too: then the client is wrong, and has one answer.
                Err(PromptFailure::Refused) => sleep(REFUSAL_TIME_MAX).await,
                Err(failure) if failure.is_soon() => {}
                _ => pending().await,
            }
        };
        let known = computing.outcome();
        let waiting = asked.with(&requests::make_decode(fields, requests::make_params(None)));
        let awaited = engine.await_prompt(Instant::now());
        let opened = run_until(self.open_answer(spared, waiting, Some(computing)), failing).await;
        drop(awaited);
        // A decode engine may give the prompt up in the same moment: it waited without effect too.
        let failure = match &opened {
            Some((_, None)) => None,
            _ => {
                run_until(known, ready(())).await.and_then(|outcome| outcome.as_ref().as_ref().err().copied())
            }
        };
        match (opened, failure.filter(|failure| failure.is_soon())) {
            (Some(opened), None) => opened,
            // The client has no byte yet: the prompt goes to a decode engine again, without a wait.
            (_, failure) => {
                let failure = failure.unwrap_or(PromptFailure::Broken);
                self.open_alone(spared, alone(), &engine, failure).await
            }
        }
    }

    /// Asks a decode engine to compute and answer a prompt, after `engine` failed to compute it.
    async fn open_alone(
        &self,
        spared: Option<&RouteEngine>,
        asked: RouteRequest,
        engine: &RouteEngine,
        failure: PromptFailure,
    ) -> (Response<Answer>, Option<Arc<RouteEngine>>) {
        asked.noted.notes().prefill_failure = Some(failure.name());
        let opened = self.open_answer(spared, asked, None).await;
        if failure == PromptFailure::Refused && opened.0.status().is_success() {
            self.counters.failure(failure);
            let remedy =
                "it refused a prompt that another engine answers: give both the same models and adapters";
            tracing::warn!(engine = %engine.address, "{remedy}");
        }
        opened
    }

    /// Has a prompt computed, and streams its first token before a decode engine is asked. Returns the decode engine's answer as an error
    /// if the token would change the stream.
    async fn begin_stream(
        self: Arc<Self>,
        share: LoadShare,
        tokens: u64,
        asked: &RouteRequest,
        prompt: &PromptAsked,
        prefill: &Fields,
    ) -> Result<Response<Answer>, (Response<Answer>, Option<Arc<RouteEngine>>)> {
        let (engine, fields, sizes) = (Arc::clone(&share.engine), &prompt.fields, prompt.prompt.sizes());
        let computing = Computing::ask_engine(Arc::clone(&self), share, asked.with(prefill), sizes, true);
        let waiting = || asked.with(&requests::make_decode(fields, requests::make_params(None)));
        let Some(outcome) = self.worked(&computing, &engine, tokens).await else {
            let _awaited = engine.await_prompt(Instant::now());
            return Err(self.open_answer(None, waiting(), Some(computing)).await);
        };
        let answer = match &*outcome {
            Ok(computed) => computed.answer.clone(),
            Err(failure) => {
                let alone = asked.with_alone(fields, AlonePrompt::of_request(fields, tokens));
                return Err(self.open_alone(None, alone, &engine, *failure).await);
            }
        };
        let (head, answer) = answer.into_parts();
        // A decode engine refuses too long a prompt before the first event.
        let length_max = self.length_of_all(asked).unwrap_or(0);
        let Some(first) = first_token::read_first_token(&answer, fields, length_max) else {
            return Err(self.open_answer(None, waiting(), Some(computing)).await);
        };
        self.counters.first_tokens.inc();
        let (asked, fields) = (asked.clone(), fields.clone());
        // The event goes out before the decode engine is asked.
        Ok(continue_stream(head, first.event.clone(), async move {
            let passed = Some(first.passed);
            let asked = RouteRequest { passed, ..asked.with(&first.remaining_request(&fields)) };
            let (answer, given_up) = self.open_answer(None, asked.clone(), Some(computing)).await;
            let Some(decode) = given_up.filter(|_| asked.breaks.break_count() == 0) else { return answer };
            // The client has no byte of the rest yet, and the prefill engine's KV is still kept.
            drop(answer);
            self.retried(&[&decode]);
            self.open_answer(Some(&decode), asked, None).await.0
        }))
    }
}
