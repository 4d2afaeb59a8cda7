//! Waiting for an engine's answer while it lives: an engine that stands still must not hold a request.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, Method};
use serde_json::Value;

use super::engines::Address;
use super::forward::{Asked, ForwardError, Forwarder};

/// How often an engine that has not answered yet is asked for a sign of life, and how long it may give none.
const LOOK: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The whole answer, if it comes before `limit` from an engine whose server goes on answering `/health`.
pub(super) async fn ask(
    forwarder: &Forwarder,
    to: &Address,
    asked: Asked,
    limit: Duration,
) -> Result<Bytes, ForwardError> {
    let answer = tokio::time::timeout(limit, forwarder.ask(to, asked));
    match first(answer, silence(forwarder, to)).await {
        Some(Ok(answer)) => answer,
        Some(Err(_)) => Err(ForwardError::Late(limit)),
        None => Err(ForwardError::Silent(SILENCE_MAX)),
    }
}

/// The tokens that an engine takes of a prompt and its answer, as its list of models has it; the least where it has several.
pub(super) async fn length_max(forwarder: &Forwarder, to: &Address, headers: &HeaderMap) -> Option<u64> {
    let mut asked = Asked {
        method: Method::GET,
        path: "/v1/models".into(),
        headers: HeaderMap::new(),
        body: Bytes::new(),
    };
    let token = headers.get(AUTHORIZATION).map(|token| (AUTHORIZATION, token.clone()));
    asked.headers.extend(token);
    let answer = tokio::time::timeout(LOOK, forwarder.ask(to, asked)).await.ok()?.ok()?;
    let models: Value = serde_json::from_slice(&answer).ok()?;
    let lengths = models["data"].as_array()?.iter().map(|model| model["max_model_len"].as_u64());
    lengths.collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// Ends once the engine's server has not answered for too long.
async fn silence(forwarder: &Forwarder, engine: &Address) {
    let health =
        Asked { method: Method::GET, path: "/health".into(), headers: HeaderMap::new(), body: Bytes::new() };
    loop {
        tokio::time::sleep(LOOK).await;
        if tokio::time::timeout(SILENCE_MAX, forwarder.ask(engine, health.clone())).await.is_err() {
            return;
        }
    }
}

/// The output of `work`, or `None` if `end` comes first.
pub(super) async fn first<T>(work: impl Future<Output = T>, end: impl Future<Output = ()>) -> Option<T> {
    let (mut work, mut end) = (pin!(work), pin!(end));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}
