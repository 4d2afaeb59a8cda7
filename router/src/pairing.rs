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
use super::counters::{Failure, PAIR};
use super::engine::{Engine, Seat};
use super::forward::{Answer, Asked, PromptAsked, continued};
use super::prompt::Whole;
use super::{Order, Router, first_token, requests};
use sidecar::pages::connections::first;

/// By load, longer prompts wait for the prefill engine alone. A decode engine waits 30 s: at 2,000 tokens a second this many are done.
const AT_ONCE_TOKENS_MAX: u64 = 65_536;
/// A decode engine has this long to refuse a prompt after its prefill engine did.
const REFUSAL_TIME_MAX: Duration = Duration::from_millis(250);

// === impl Router ===

impl Router {
    /// Answers a prompt by two engines, or by a decode engine alone.
    pub(super) async fn route(self: Arc<Self>, asked: &Asked, prompt: &PromptAsked) -> Response<Answer> {
        let (tokens, fields) = (self.token_bytes.tokens(&prompt.prompt.sizes()), &prompt.fields);
        let whole = prompt.prompt.whole.or((tokens < self.options.min_remote_tokens).then_some(Whole::Short));
        let seat = match whole {
            None => self.seat_prefill(asked, tokens, None).ok_or(Whole::NoPrefill),
            Some(whole) => Err(whole),
        };
        let seat = match seat {
            // The prefill engine may still be down: no client waits for a trial.
            Ok(seat) if seat.is_trial => {
                self.start(seat, asked, prompt).let_go();
                Err(Whole::NoPrefill)
            }
            seat => seat,
        };
        let seat = match seat {
            Ok(seat) => seat,
            Err(whole) => {
                self.count_way(&asked.noted, whole.name());
                return self.answer(asked.with(fields)).await;
            }
        };
        self.count_way(&asked.noted, PAIR);
        asked.noted.notes().prefill = Some(seat.engine.address.to_string());
        let begins = self.options.first_token
            && prompt.api == Api::Completions
            && first_token::may_be_split(fields, &prompt.prompt);
        let engine = Arc::clone(&seat.engine);
        let (answer, given_up) = match first_token::prefill(fields).ok().filter(|_| begins) {
            Some(prefill) => match Arc::clone(&self).begin(seat, tokens, asked, fields, &prefill).await {
                Ok(stream) => return stream,
                Err(opened) => opened,
            },
            None => {
                let at_once = self.is_at_once(&seat, tokens);
                self.pair(seat, tokens, at_once, None, asked, prompt).await
            }
        };
        let Some(decode) = given_up.filter(|_| asked.breaks.count() == 0) else { return answer };
        // The client has no byte yet. Both engines drop the prompt before two others get it.
        drop(answer);
        self.retried(&[&engine, &decode]);
        let Some(seat) = self.seat_prefill(asked, tokens, Some(&engine)) else {
            return self.open(Some(&decode), asked.with(fields), None).await.0;
        };
        asked.noted.notes().prefill = Some(seat.engine.address.to_string());
        // By load, the second attempt is computed first.
        let at_once = self.options.order == Order::AtOnce;
        self.pair(seat, tokens, at_once, Some(&decode), asked, prompt).await.0
    }

    /// Takes a prefill engine, `spared` only if no other is up.
    fn seat_prefill(&self, asked: &Asked, tokens: u64, spared: Option<&Engine>) -> Option<Seat> {
        let seat = self.prefill.take(&asked.trail, tokens, spared, Instant::now())?;
        self.prefill.note(&asked.trail, &seat.engine, Instant::now());
        Some(seat)
    }

    /// Returns true if the decode engine of a prompt is asked together with its prefill engine. By load, the prefill engine has answered
    /// before: its first prompt may take longer than a decode engine waits.
    fn is_at_once(&self, seat: &Seat, tokens: u64) -> bool {
        match self.options.order {
            Order::ByLoad => {
                tokens <= AT_ONCE_TOKENS_MAX
                    && seat.engine.answered().is_some()
                    && seat.is_alone(Instant::now())
            }
            Order::PrefillFirst => false,
            Order::AtOnce => true,
        }
    }

    fn start(self: &Arc<Self>, seat: Seat, asked: &Asked, prompt: &PromptAsked) -> Computing {
        let sizes = Arc::new(prompt.prompt.sizes());
        Computing::start(Arc::clone(self), seat, asked.with(&prompt.prefill), Some(sizes))
    }

    /// Counts a second attempt of a prompt, after its decode engine gave it up.
    fn retried(&self, engines: &[&Arc<Engine>]) {
        self.counters.retries.inc();
        engines.iter().for_each(|engine| engine.figures.retries.inc());
    }

    /// Returns the outcome of a prompt, `None` if its engine shows no work. Prompts of more than [`AT_ONCE_TOKENS_MAX`] may take all of
    /// `--prefill-timeout`.
    async fn worked(&self, computing: &Computing, engine: &Engine, tokens: u64) -> Option<Arc<Outcome>> {
        let stalled = async {
            computing::stalled(engine, Instant::now()).await;
            if tokens > AT_ONCE_TOKENS_MAX && engine.is_up(Instant::now()) {
                pending().await
            }
        };
        first(computing.outcome(), stalled).await
    }

    /// Answers a prompt by the engine of `seat` and a decode engine, `spared` only if there is no other. Also returns the decode engine if
    /// it gave the prompt up before anything of an answer, as a strict one does without enough KV.
    async fn pair(
        self: &Arc<Self>,
        seat: Seat,
        tokens: u64,
        at_once: bool,
        spared: Option<&Engine>,
        asked: &Asked,
        prompt: &PromptAsked,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        let (fields, engine) = (&prompt.fields, Arc::clone(&seat.engine));
        let computing = self.start(seat, asked, prompt);
        if !at_once && let Some(outcome) = self.worked(&computing, &engine, tokens).await {
            return match &*outcome {
                Ok(computed) => {
                    let params =
                        RawValue::from_string(String::from_utf8_lossy(&computed.params).into_owned());
                    let fields = requests::make_decode(fields, params.expect("JSON of an answer"));
                    self.open(spared, asked.with(&fields), Some(computing)).await
                }
                Err(failure) => self.open_alone(spared, asked.with(fields), &engine, *failure).await,
            };
        }
        let outcome = computing.outcome();
        let failing = async {
            match *outcome.await {
                // The decode engine may refuse it too: then the client is wrong, and has one answer.
                Err(Failure::Refused) => sleep(REFUSAL_TIME_MAX).await,
                Err(failure) if failure.is_soon() => {}
                _ => pending().await,
            }
        };
        let known = computing.outcome();
        let waiting = asked.with(&requests::make_decode(fields, requests::make_params(None)));
        let awaited = engine.await_prompt(Instant::now());
        let opened = first(self.open(spared, waiting, Some(computing)), failing).await;
        drop(awaited);
        // A decode engine may give the prompt up in the same moment: it waited without effect too.
        let failure = match &opened {
            Some((_, None)) => None,
            _ => first(known, ready(())).await.and_then(|outcome| outcome.as_ref().as_ref().err().copied()),
        };
        match (opened, failure.filter(|failure| failure.is_soon())) {
            (Some(opened), None) => opened,
            // The client has no byte yet: the prompt goes to a decode engine again, without a wait.
            (_, failure) => {
                let failure = failure.unwrap_or(Failure::Broken);
                self.open_alone(spared, asked.with(fields), &engine, failure).await
            }
        }
    }

    /// Asks a decode engine to compute and answer a prompt, after `engine` failed to compute it.
    async fn open_alone(
        &self,
        spared: Option<&Engine>,
        asked: Asked,
        engine: &Engine,
        failure: Failure,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        asked.noted.notes().prefill_failure = Some(failure.name());
        let opened = self.open(spared, asked, None).await;
        if failure == Failure::Refused && opened.0.status().is_success() {
            self.counters.failure(failure);
            let remedy =
                "it refused a prompt that another engine answers: give both the same models and adapters";
            tracing::warn!(engine = %engine.address, "{remedy}");
        }
        opened
    }

    /// Has a prompt computed, and streams its first token before a decode engine is asked. Returns the decode engine's answer as an error
    /// if the token would change the stream.
    async fn begin(
        self: Arc<Self>,
        seat: Seat,
        tokens: u64,
        asked: &Asked,
        fields: &Fields,
        prefill: &Fields,
    ) -> Result<Response<Answer>, (Response<Answer>, Option<Arc<Engine>>)> {
        self.lengths.ask(&self.decode, &asked.headers);
        let engine = Arc::clone(&seat.engine);
        let computing = Computing::start(Arc::clone(&self), seat, asked.with(prefill), None);
        let waiting = || asked.with(&requests::make_decode(fields, requests::make_params(None)));
        let Some(outcome) = self.worked(&computing, &engine, tokens).await else {
            let _awaited = engine.await_prompt(Instant::now());
            return Err(self.open(None, waiting(), Some(computing)).await);
        };
        let answer = match &*outcome {
            Ok(computed) => computed.answer.clone(),
            Err(failure) => return Err(self.open_alone(None, asked.with(fields), &engine, *failure).await),
        };
        let (head, answer) = answer.into_parts();
        // A decode engine refuses too long a prompt before the first event.
        let length_max = self.decode.length_max(Instant::now()).unwrap_or(0);
        let Some(first) = first_token::read(&answer, fields, length_max) else {
            return Err(self.open(None, waiting(), Some(computing)).await);
        };
        self.counters.first_tokens.inc();
        let (asked, fields) = (asked.clone(), fields.clone());
        // The event goes out before the decode engine is asked.
        Ok(continued(head, first.event.clone(), async move {
            let asked = asked.with(&first.rest(&fields));
            let (answer, given_up) = self.open(None, asked.clone(), Some(computing)).await;
            let Some(decode) = given_up.filter(|_| asked.breaks.count() == 0) else { return answer };
            // The client has no byte of the rest yet, and the prefill engine's KV is still kept.
            drop(answer);
            self.retried(&[&decode]);
            self.open(Some(&decode), asked, None).await.0
        }))
    }
}
