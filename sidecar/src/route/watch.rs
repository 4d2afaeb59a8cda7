//! Waiting for an engine's answer while it lives: an engine that stands still must not hold a request.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use hyper::HeaderMap;
use hyper::body::Bytes;
use tokio::time::Instant;

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

/// Ends once the engine's server has not answered for too long, or could not be reached.
async fn silence(forwarder: &Forwarder, engine: &Address) {
    let health = Asked::page("/health", HeaderMap::new());
    let mut seen = Instant::now();
    while seen.elapsed() < SILENCE_MAX {
        tokio::time::sleep(LOOK).await;
        let look = tokio::time::timeout_at(seen + SILENCE_MAX, forwarder.ask(engine, health.clone()));
        if !matches!(look.await, Err(_) | Ok(Err(ForwardError::Unreachable(_)))) {
            seen = Instant::now();
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
