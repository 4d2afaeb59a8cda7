//! Waiting for an engine's answer while it lives: an engine that stands still must not hold a request.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::{HeaderMap, Response};
use tokio::time::Instant;

use super::engine::RouteEngine;
use super::forward::{ForwardError, RouteRequest};
use sidecar::pages::connections::run_until;

/// How often an engine that has not answered yet is asked for a sign of life, and how long it may give none.
const LOOK: Duration = Duration::from_secs(1);
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The whole answer, if it comes before `limit` from an engine that lives.
pub(super) async fn ask_within(
    to: &RouteEngine,
    asked: RouteRequest,
    limit: Duration,
) -> Result<Response<Bytes>, ForwardError> {
    let answer = tokio::time::timeout(limit, to.forwarder.ask_success(asked));
    await_living(to, async { answer.await.unwrap_or(Err(ForwardError::Late(limit))) }).await
}

/// The output of `work`, if it comes from an engine whose server goes on answering `/health`.
pub(super) async fn await_living<T>(
    engine: &RouteEngine,
    work: impl Future<Output = Result<T, ForwardError>>,
) -> Result<T, ForwardError> {
    run_until(work, silence(engine)).await.unwrap_or(Err(ForwardError::Silent(SILENCE_MAX)))
}

/// Ends once the engine's server has not answered for too long, or could not be reached.
async fn silence(engine: &RouteEngine) {
    let mut seen = Instant::now();
    while seen.elapsed() < SILENCE_MAX {
        tokio::time::sleep(LOOK).await;
        if let Ok(Some(at)) = tokio::time::timeout_at(seen + SILENCE_MAX, ask_health(engine)).await {
            seen = seen.max(at);
        }
    }
}

/// Whether an engine is up that was late with a prompt: its server says so, and it was late with one alone.
pub(super) async fn judge_engine(engine: Arc<RouteEngine>) {
    let seen = tokio::time::timeout(SILENCE_MAX, ask_health(&engine)).await;
    match seen {
        Ok(Some(at)) if at.elapsed() < SILENCE_MAX && engine.may_be_up() => engine.set_up(),
        _ => engine.set_down(Instant::now()),
    }
}

/// When the engine's server last answered; it is asked where it did not lately.
async fn ask_health(engine: &RouteEngine) -> Option<Instant> {
    let mut seen = engine.seen.lock().await;
    if seen.is_none_or(|at| at.elapsed() >= LOOK) {
        let answer = engine.forwarder.ask_success(RouteRequest::page("/health", HeaderMap::new())).await;
        if !matches!(answer, Err(ForwardError::Unreachable(_))) {
            *seen = Some(Instant::now());
        }
    }
    *seen
}
