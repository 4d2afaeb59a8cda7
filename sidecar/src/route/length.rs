//! How many tokens a prompt and its answer may have, which every engine that answers says of itself.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::engines::{Address, Engines};
use super::forward::{Asked, Forwarder};

/// How long an engine has to say it, and how long none is asked again after one has not.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_secs(5);

/// The least of all engines that answer, once each has said it.
#[derive(Debug, Default)]
pub(super) struct LengthMax {
    known: OnceLock<u64>,
    /// When they are asked next.
    next: Mutex<Option<Instant>>,
}

// === impl LengthMax ===

impl LengthMax {
    /// The least length of these engines; `None` while one of them has not said its own. A request waits only where it is the one that
    /// has the engines asked.
    pub(super) async fn of(
        &self,
        engines: &Engines,
        forwarder: &Forwarder,
        headers: &HeaderMap,
    ) -> Option<u64> {
        if let Some(known) = self.known.get() {
            return Some(*known);
        }
        let mut next = self.next.try_lock().ok()?;
        if next.is_some_and(|next| Instant::now() < next) {
            return None;
        }
        *next = Some(Instant::now() + PAUSE);
        let mut asking = JoinSet::new();
        for engine in engines.iter().map(Arc::clone) {
            let (forwarder, token) = (forwarder.clone(), headers.get(AUTHORIZATION).cloned());
            asking.spawn(async move {
                let headers = token.map(|token| (AUTHORIZATION, token)).into_iter().collect();
                ask(&forwarder, &engine.address, headers).await
            });
        }
        let said: Option<Vec<u64>> = asking.join_all().await.into_iter().collect();
        let least = said?.into_iter().min()?;
        Some(*self.known.get_or_init(|| least))
    }
}

/// The length that one engine's list of models states; the least where it has several models.
async fn ask(forwarder: &Forwarder, to: &Address, headers: HeaderMap) -> Option<u64> {
    let asked = forwarder.ask(to, Asked::page("/v1/models", headers));
    let answer = tokio::time::timeout(ANSWER_TIME_MAX, asked).await.ok()?.ok()?;
    let models: Value = serde_json::from_slice(answer.body()).ok()?;
    let lengths = models["data"].as_array()?.iter().map(|model| model["max_model_len"].as_u64());
    lengths.collect::<Option<Vec<_>>>()?.into_iter().min()
}
