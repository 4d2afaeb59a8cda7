//! The terms of engines' answers, as each engine states them to the router's own requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use tokio::time::Instant;

use super::answer_terms::{self, AnswerTerms};
use super::engine::RouteEngine;
use super::engines::{EngineRole, RouteEngines};
use super::forward::{ForwardError, RouteRequest};
use super::watch;

/// The longest wait for an engine's list of models, and the pause before engines are asked again.
const PAUSE: Duration = Duration::from_secs(10);
/// The longest wait for an answer of one token, behind an engine's other prompts.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// The requests to engines without terms of lately.
#[derive(Debug, Default)]
pub(super) struct TermsAsked {
    /// Time of the next requests.
    next: Mutex<Option<Instant>>,
}

/// The reason why an engine has no terms.
enum Unknown {
    /// The question had no answer: the client's token may be wrong, or the engine busy.
    Unanswered(String),
    /// Another engine may not go on with its answers.
    Unlike(String),
}

// === impl TermsAsked ===

impl TermsAsked {
    /// Asks each engine that is up and stated no terms lately. No request waits for their answers.
    pub(super) fn ask_engines(&self, roles: [&RouteEngines; 2], headers: &HeaderMap) {
        let now = Instant::now();
        let due: Vec<_> = roles.iter().flat_map(|engines| engines.terms_due(now)).collect();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if due.is_empty() || next.is_some_and(|next| now < next) {
            return;
        }
        *next = Some(now + PAUSE);
        for (engine, role) in due {
            let headers = headers.get(AUTHORIZATION).map(|token| (AUTHORIZATION, token.clone()));
            tokio::spawn(update_terms(engine, role, headers.into_iter().collect()));
        }
    }
}

/// Asks one engine. The request is the trial of a decode engine after its pause; a prefill engine is tried by a prompt.
async fn update_terms(engine: Arc<RouteEngine>, role: EngineRole, headers: HeaderMap) {
    let _trial = (role == EngineRole::Decode).then(|| engine.add_share(0, Instant::now()));
    let models = watch::ask_within(&engine, RouteRequest::page("/v1/models", headers.clone()), PAUSE).await;
    match models {
        _ if role == EngineRole::Prefill => {}
        // First tokens do not wait for an engine in this state.
        Err(ForwardError::Unreachable(_) | ForwardError::Broken(_) | ForwardError::Silent(_)) => {
            engine.set_down(Instant::now());
        }
        // The engine's server lives. Its answer about a limit does not decide if it gets prompts.
        _ => engine.set_up(),
    }
    let models = models.map_err(|error| Unknown::Unanswered(format!("GET /v1/models: {error}")));
    let terms = match models {
        Ok(models) => ask_terms(&engine, models.body(), headers).await,
        Err(unknown) => Err(unknown),
    };
    let why = match terms {
        Ok(terms) => return engine.set_terms(terms, Instant::now()),
        Err(Unknown::Unanswered(why)) => Some(why).filter(|_| engine.are_terms_missed_first()),
        Err(Unknown::Unlike(why)) => Some(why).filter(|_| engine.refuse_terms(Instant::now())),
    };
    if let Some(why) = why {
        let effect = "with --first-token, first tokens come after the hand-over while this engine is up";
        tracing::info!(engine = %engine.address, "{effect}: {why}");
    }
}

/// Asks for one token twice: as a whole answer, with the connector's statement, and as a stream.
async fn ask_terms(engine: &RouteEngine, models: &[u8], headers: HeaderMap) -> Result<AnswerTerms, Unknown> {
    let (model, length) = answer_terms::read_models(models)
        .ok_or_else(|| Unknown::Unlike("GET /v1/models there must say id and max_model_len".into()))?;
    let [whole, stream] = answer_terms::make_questions(&model).map(|question| {
        let asked = RouteRequest::own_prompt("/v1/completions", headers.clone(), &question);
        watch::ask_within(engine, asked, ANSWER_TIME_MAX)
    });
    let unanswered = |error| Unknown::Unanswered(format!("one token of /v1/completions: {error}"));
    let (whole, stream) = (whole.await.map_err(unanswered)?, stream.await.map_err(unanswered)?);
    AnswerTerms::read(length, whole.body(), stream.body()).map_err(Unknown::Unlike)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::address::EngineAddress;

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
            runtime.block_on(update_terms(Arc::clone(&engine), EngineRole::Decode, HeaderMap::new()));
            serving.join().unwrap();
            assert_eq!(engine.is_up(Instant::now()), is_up, "{answer}");
        }
    }
}
