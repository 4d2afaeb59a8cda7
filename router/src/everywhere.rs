//! Requests to all engines of both roles, because they change engines.

use std::sync::Arc;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Response, StatusCode};

use super::counters::code_of;
use super::engine::RouteEngine;
use super::forward::{Answer, ForwardError, RouteRequest};
use super::server::make_failure;
use super::{Router, watch};

// === impl Router ===

impl Router {
    /// Sends a request to all engines at once. Returns the answer of one of them, or an error with the name
    /// of each engine that did not take it.
    pub(super) async fn tell_everywhere(&self, asked: &RouteRequest) -> Response<Answer> {
        let mut engines: Vec<Arc<RouteEngine>> = Vec::new();
        for engine in self.decode.all().iter().chain(&*self.prefill.all()) {
            if engines.iter().all(|known| known.address.socket != engine.address.socket) {
                engines.push(Arc::clone(engine));
            }
        }
        let telling: Vec<_> = engines
            .iter()
            .map(|engine| {
                let (engine, asked) = (Arc::clone(engine), asked.clone());
                tokio::spawn(async move {
                    let answer = watch::await_living(&engine, engine.forwarder.ask_any_status(asked)).await;
                    engine.figures.count_answer(code_of(answer.as_ref().map(Response::status)));
                    answer
                })
            })
            .collect();
        let (mut taken, mut problems, mut status) = (None, Vec::new(), None);
        for (engine, telling) in engines.iter().zip(telling) {
            let answer = telling.await.unwrap_or_else(|error| Err(ForwardError::Broken(error.to_string())));
            let (refusal, text) = match answer {
                Ok(answer) if answer.status().is_success() => {
                    taken.get_or_insert(answer);
                    continue;
                }
                Ok(answer) => (answer.status(), String::from_utf8_lossy(answer.body()).into_owned()),
                Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()),
            };
            status.get_or_insert(refusal);
            problems.push(format!("{}: {refusal}: {text}", engine.address));
        }
        match (taken, status) {
            (Some(taken), None) => {
                taken.map(|body: Bytes| Full::new(body).map_err(|never| match never {}).boxed_unsync())
            }
            (_, status) => {
                asked.noted.note_failure("an engine did not take it");
                let text = format!(
                    "{} of {} engines did not take it; ask again once each does: {}",
                    problems.len(),
                    engines.len(),
                    problems.join("; ")
                );
                make_failure(status.unwrap_or(StatusCode::BAD_GATEWAY), &text)
            }
        }
    }
}
