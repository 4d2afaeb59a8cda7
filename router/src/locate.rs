//! The place of a prompt's blocks, for conversations that the router does not know: after its start, or from another router.
//!
//! The router derives the prompt's keys and looks for them in the directory of the mesh. An engine makes the tokens of a text.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::Router;
use super::access::LocateTimes;
use super::affinity::{HeldPrompt, Trail};
use super::api::Api;
use super::body::Fields;
use super::counters::Located;
use super::forward::{ForwardError, PromptAsked, RouteRequest};
use super::members::PromptBlocks;
use super::observer::Observer;

/// The longest wait for an engine's tokens. The prompt then goes its way by its text.
const TOKENS_TIME_MAX: Duration = Duration::from_millis(200);
/// A longer text takes longer.
const TEXT_BYTES_MAX: u64 = 1 << 20;
/// The pause after an engine gave no tokens in time.
const TOKENS_PAUSE: Duration = Duration::from_secs(1);
/// Fields that decide the tokens of a prompt, as vLLM's `/tokenize` takes them.
const OF_TOKENS: [&str; 9] = [
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
];

/// Tokens as JSON.
enum TokensJson {
    /// A list in the request.
    List(Bytes),
    /// An engine's answer with a list in it.
    Answer(Bytes),
}

#[derive(Deserialize)]
struct TokensAnswer {
    tokens: Vec<u32>,
}

// === impl TokensJson ===

impl TokensJson {
    fn read(&self) -> Option<Vec<u32>> {
        match self {
            Self::List(list) => serde_json::from_slice(list).ok(),
            Self::Answer(answer) => {
                serde_json::from_slice::<TokensAnswer>(answer).ok().map(|answer| answer.tokens)
            }
        }
    }
}

// === impl Router ===

impl Router {
    /// Returns the request with the tokens of its prompt at each engine, if its conversation is unknown and the mesh shows them.
    pub(super) async fn locate(&self, mut asked: RouteRequest, prompt: &PromptAsked) -> RouteRequest {
        let Some(observer) = self.observer.as_ref().filter(|_| self.is_looked_for(&asked, prompt)) else {
            return asked;
        };
        let Some((held, times)) = self.look_up(observer, &asked.headers, prompt).await else {
            self.counters.located(Located::Untokenized);
            return asked;
        };
        asked.noted.notes().locate = Some(times);
        self.counters.located(if held.is_empty() { Located::Nowhere } else { Located::Held });
        self.token_bytes.learn(&prompt.prompt.sizes(), held.tokens);
        asked.trail = Arc::new(Trail { held, ..(*asked.trail).clone() });
        asked
    }

    /// Returns true for a prompt worth a look: long enough for another engine, of an unknown conversation, with keys by its tokens alone.
    fn is_looked_for(&self, asked: &RouteRequest, prompt: &PromptAsked) -> bool {
        prompt.prompt.whole.is_none()
            && !prompt.fields.is_set("cache_salt")
            && self.token_bytes.tokens(&prompt.prompt.sizes()) >= self.options.min_remote_tokens
            && !self.decode.knows(&asked.trail, Instant::now())
    }

    /// Returns the leading tokens at each engine, and the times of the look; `None` without the prompt's tokens.
    async fn look_up(
        &self,
        observer: &Observer,
        headers: &HeaderMap,
        prompt: &PromptAsked,
    ) -> Option<(HeldPrompt, LocateTimes)> {
        let (begin, spaces) = (Instant::now(), observer.members().spaces());
        if spaces.is_empty() {
            return None;
        }
        let json = self.find_tokens(observer, headers, prompt).await?;
        let (observer, tokens) = (observer.clone(), begin.elapsed());
        let looked = spawn_blocking(move || {
            let begin = Instant::now();
            let blocks = PromptBlocks::derive_keys(&json.read()?, &spaces);
            let keys = begin.elapsed();
            let held = observer.members().probe_prompt(&blocks);
            Some((held, LocateTimes { tokens, keys, probe: begin.elapsed() - keys }))
        });
        looked.await.expect("no list of tokens lets it panic")
    }

    /// Returns the tokens of a prompt: those of the client, or an engine's for a text.
    async fn find_tokens(
        &self,
        observer: &Observer,
        headers: &HeaderMap,
        prompt: &PromptAsked,
    ) -> Option<TokensJson> {
        let (fields, sizes) = (&prompt.fields, prompt.prompt.sizes());
        if sizes.ids > 0 {
            let name = if prompt.api == Api::Generate { "token_ids" } else { "prompt" };
            return fields.get_bytes(name).map(TokensJson::List);
        }
        let is_text = (prompt.prompt.is_one || prompt.api == Api::Chat) && sizes.text_bytes <= TEXT_BYTES_MAX;
        let now = Instant::now();
        if !is_text || !observer.may_ask_tokens(now) {
            return None;
        }
        let engine = self
            .decode
            .ranked(&Trail::default(), 1, None, now)
            .into_iter()
            .find(|engine| engine.is_up(now))?;
        let mut question = Fields::default();
        OF_TOKENS.iter().for_each(|name| question.copy_field(name, fields));
        let token = headers.get(AUTHORIZATION).map(|token| (AUTHORIZATION, token.clone()));
        let asked =
            RouteRequest::own_prompt("/tokenize", token.into_iter().collect(), &Value::Null).with(&question);
        let answer = timeout(TOKENS_TIME_MAX, engine.forwarder.ask_success(asked)).await;
        let why = match answer {
            Ok(Ok(answer)) => return Some(TokensJson::Answer(answer.into_body())),
            // The client is wrong.
            Ok(Err(ForwardError::Status(StatusCode::BAD_REQUEST))) => return None,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it took longer than {} ms", TOKENS_TIME_MAX.as_millis()),
        };
        tracing::debug!(engine = %engine.address, "POST /tokenize gave no tokens, so the text decides the way: {why}");
        observer.ask_no_tokens(now + TOKENS_PAUSE);
        None
    }
}
