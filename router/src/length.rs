//! The most tokens of a prompt and its answer, as each decode engine states it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use serde_json::Value;
use tokio::time::Instant;

use super::engine::RouteEngine;
use super::engines::RouteEngines;
use super::forward::{ForwardError, RouteRequest};
use super::watch;

/// The longest wait for an engine's limit, and the pause before engines are asked again.
const PAUSE: Duration = Duration::from_secs(10);

/// The requests to engines without a limit of lately.
#[derive(Debug, Default)]
pub(super) struct Lengths {
    /// Time of the next requests.
    next: Mutex<Option<Instant>>,
}

// === impl Lengths ===

impl Lengths {
    /// Asks each engine that is up and stated no limit lately. No request waits for their answers.
    pub(super) fn ask_lengths(&self, engines: &RouteEngines, headers: &HeaderMap) {
        let now = Instant::now();
        let due = engines.lengths_due(now);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if due.is_empty() || next.is_some_and(|next| now < next) {
            return;
        }
        *next = Some(now + PAUSE);
        for engine in due {
            let headers = headers.get(AUTHORIZATION).map(|token| (AUTHORIZATION, token.clone()));
            tokio::spawn(update_length(engine, headers.into_iter().collect()));
        }
    }
}

/// Asks one engine. The request is the trial of an engine after its pause.
async fn update_length(engine: Arc<RouteEngine>, headers: HeaderMap) {
    let _trial = engine.add_share(0, Instant::now());
    let answer = watch::ask_within(&engine, RouteRequest::page("/v1/models", headers), PAUSE).await;
    match answer {
        // First tokens do not wait for an engine in this state.
        Err(ForwardError::Unreachable(_) | ForwardError::Broken(_) | ForwardError::Silent(_)) => {
            engine.set_down(Instant::now());
        }
        // The engine's server lives. Its answer about a limit does not decide if it gets prompts.
        _ => engine.set_up(),
    }
    let length = answer.map_err(|error| error.to_string());
    let length =
        length.and_then(|answer| parse_length(answer.body()).ok_or_else(|| "its answer has none".into()));
    match length {
        Ok(length) => engine.set_length(length, Instant::now()),
        Err(why) if engine.is_length_missed_first() => {
            let needed = "GET /v1/models there must say max_model_len, which --first-token needs of each engine that is up";
            tracing::warn!(engine = %engine.address, "{needed}: {why}");
        }
        Err(_) => {}
    }
}

/// The limit in an engine's list of models; the least of several models.
fn parse_length(models: &[u8]) -> Option<u64> {
    let models: Value = serde_json::from_slice(models).ok()?;
    let lengths = models["data"].as_array()?.iter().map(|model| model["max_model_len"].as_u64());
    lengths.collect::<Option<Vec<_>>>()?.into_iter().min()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::address::EngineAddress;
    use crate::engines::EngineRole;

    #[test]
    fn an_engine_that_answers_is_back_also_where_it_does_not_say_its_length() {
        for (answer, is_up) in [
            ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", true),
            // A proxy without its engine accepts the connection and ends it.
            ("", false),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = listener.local_addr().unwrap();
            let address = EngineAddress::new(format!("http://{socket}").parse().unwrap(), socket);
            let serving = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                lines.map_while(Result::ok).find(String::is_empty).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            let engines = RouteEngines::new(EngineRole::Decode, None);
            engines.update(vec![address]);
            let engine = Arc::clone(&engines.all()[0]);
            // The pause is over: the request is the engine's trial.
            engine.set_down(Instant::now() - Duration::from_secs(5));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(update_length(Arc::clone(&engine), HeaderMap::new()));
            serving.join().unwrap();
            assert_eq!(engine.is_up(Instant::now()), is_up, "{answer}");
        }
    }
}
