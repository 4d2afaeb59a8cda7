//! Waits for an engine's answer while the engine lives: a hung engine must not hold a request.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::{HeaderMap, Response};
use tokio::time::Instant;

use super::engine::RouteEngine;
use super::forward::{ForwardError, RouteRequest};
use sidecar::pages::connections::run_until;

/// The interval of looks at an engine without an answer yet, and its longest silence.
const LOOK: Duration = Duration::from_secs(1);
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Sends a request, and returns the whole answer if it comes within `limit` from an engine that lives.
pub(super) async fn ask_within(
    to: &RouteEngine,
    asked: RouteRequest,
    limit: Duration,
) -> Result<Response<Bytes>, ForwardError> {
    let answer = tokio::time::timeout(limit, to.forwarder.ask_success(asked));
    await_living(to, async { answer.await.unwrap_or(Err(ForwardError::Late(limit))) }).await
}

/// The output of `work`, if the engine's server goes on answering `/health` until then.
pub(super) async fn await_living<T>(
    engine: &RouteEngine,
    work: impl Future<Output = Result<T, ForwardError>>,
) -> Result<T, ForwardError> {
    run_until(work, silence(engine)).await.unwrap_or(Err(ForwardError::Silent(SILENCE_MAX)))
}

/// Ends once the engine's server has not answered for [`SILENCE_MAX`].
async fn silence(engine: &RouteEngine) {
    let mut seen = Instant::now();
    while seen.elapsed() < SILENCE_MAX {
        tokio::time::sleep(LOOK).await;
        if let Ok(Some(at)) = tokio::time::timeout_at(seen + SILENCE_MAX, ask_health(engine)).await {
            seen = seen.max(at);
        }
    }
}

/// Sets an engine up after a late prompt if its server answers and no second prompt in a row was late;
/// otherwise down.
pub(super) async fn judge_engine(engine: Arc<RouteEngine>) {
    let seen = tokio::time::timeout(SILENCE_MAX, ask_health(&engine)).await;
    match seen {
        Ok(Some(at)) if at.elapsed() < SILENCE_MAX && engine.may_be_up() => engine.set_up(),
        _ => engine.set_down(Instant::now()),
    }
}

/// Returns the time of the last answer of the engine's server, after a new look if it is older than [`LOOK`].
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
