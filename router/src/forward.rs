//! Requests to engines, and answers as they come.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::response;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use serde_json::value::RawValue;

use super::access::Noted;
use super::address::EngineAddress;
use super::affinity::Trail;
use super::api::{Api, RequestTarget};
use super::body::{Fields, Payload, PayloadBody};
use super::connector::Connector;
use super::engine_prompts::AlonePrompt;
use super::first_frames::{self, FirstFrames};
use super::memory::BodyRoom;
use super::prompt::{self, Prompt};
use super::requests;
use super::tls::TowardsEngines;

/// Longest idle time of a connection: vLLM closes it after 5 s, and a request sent at that moment is lost.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// The longest answer read as a whole: one token, and its parameters.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The header with the session of a request, as clients and other routers send it.
const SESSION: &str = "x-session-id";
/// The id of an answer is within its first bytes.
const ID_WITHIN_BYTES: usize = 4096;
/// Bodies of this type are streams of events.
pub(super) const EVENTS: &str = "text/event-stream";
/// Headers of one connection, without a meaning for the request. Lengths are written again.
const OF_A_CONNECTION: [HeaderName; 7] =
    [CONNECTION, CONTENT_LENGTH, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// A request, read whole.
#[derive(Clone, Debug)]
pub(super) struct RouteRequest {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) target: RequestTarget,
    pub(super) headers: HeaderMap,
    pub(super) body: Payload,
    /// The hashes that decide the request's engines.
    pub(super) trail: Arc<Trail>,
    /// The prompt, if a decode engine computes it alone.
    pub(super) alone: Option<AlonePrompt>,
    /// The token of the answer that the client has from another engine.
    pub(super) passed: Option<PassedToken>,
    pub(super) breaks: Arc<Breaks>,
    pub(super) noted: Arc<Noted>,
    /// The request's room in the memory for bodies, held by each copy of it.
    pub(super) _room: Option<Arc<BodyRoom>>,
}

/// The first token of an answer, passed on before the rest is asked for: the last one of that request's prompt.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct PassedToken {
    /// Cached tokens of the prompt, as the engine of the token stated them.
    pub(super) cached: Option<u64>,
}

/// A request, and for a prompt to two engines its parsed body.
pub(super) type Parsed = (RouteRequest, Option<PromptAsked>);

/// A prompt for two engines: its fields are its whole body.
#[derive(Debug)]
pub(super) struct PromptAsked {
    pub(super) api: Api,
    pub(super) fields: Fields,
    /// The request for the prefill engine.
    pub(super) prefill: Fields,
    pub(super) prompt: Prompt,
}

/// Count of engines that broke off on a request, with any body.
#[derive(Debug, Default)]
pub(super) struct Breaks(AtomicU32);

/// The beginning of an engine's answer.
#[derive(Debug)]
pub(super) struct OpenedAnswer {
    pub(super) answer: Response<Incoming>,
    pub(super) first_frames: VecDeque<Frame<Bytes>>,
    /// True if the engine has given the prompt up: by its status, or in a stream by an error event before any
    /// part of an answer.
    pub(super) given_up: bool,
}

/// The body of an answer.
pub(super) type Answer = UnsyncBoxBody<Bytes, hyper::Error>;

/// The reason why an engine did not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    /// The request has not reached the engine.
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("the connection ended before the answer: {0}")]
    Broken(String),
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("there was no sign of life or work for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("it did not answer within {} s", .0.as_secs())]
    Late(Duration),
}

/// Keeps connections to one engine.
#[derive(Clone, Debug)]
pub(super) struct Forwarder {
    to: EngineAddress,
    client: Client<Connector, PayloadBody>,
}

/// A stream with its first event sent before the engine of the rest is asked.
struct Continued {
    first: Option<Bytes>,
    asking: Option<Pin<Box<dyn Future<Output = Answer> + Send>>>,
    rest: Option<Answer>,
}

// === impl RouteRequest ===

impl RouteRequest {
    /// The router's own request for a page of an engine.
    pub(super) fn page(path: &str, headers: HeaderMap) -> Self {
        let (method, path, target) = (Method::GET, path.into(), RequestTarget::One);
        let (body, trail, breaks, noted) =
            (Payload::default(), Arc::default(), Arc::default(), Arc::default());
        Self {
            method,
            path,
            target,
            headers,
            body,
            trail,
            alone: None,
            passed: None,
            breaks,
            noted,
            _room: None,
        }
    }

    /// The router's own prompt for an engine.
    pub(super) fn own_prompt(path: &str, mut headers: HeaderMap, body: &Value) -> Self {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let body = Payload::from(vec![Bytes::from(body.to_string())]);
        Self { method: Method::POST, body, ..Self::page(path, headers) }
    }

    /// Reads the body, and removes the client's own parameters for connectors but for its hints. Fails with the text for the
    /// client.
    pub(super) fn parse_body(mut self, body: Bytes) -> Result<Parsed, String> {
        let api = self.api();
        let no_json = |error| format!("the body is no JSON: {error}; send UTF-8, and no NaN or Infinity");
        let Some(mut fields) = self.fields(&body, api.is_some()).map_err(no_json)? else {
            self.body = body.into();
            return Ok((self, None));
        };
        let no_json = |error| format!("an object of the body is no JSON: {error}");
        let spoken = requests::reduce_params(&mut fields).map_err(no_json)?;
        let Some(api) = api else {
            self.body = if spoken { fields.payload() } else { body.into() };
            return Ok((self, None));
        };
        let mut prompt = Prompt::read_request(api, &fields);
        if let Some(session) = self.headers.get(SESSION).and_then(|session| session.to_str().ok()) {
            prompt.trail.session = Some(prompt::session_hash(session));
        }
        self.trail = Arc::new(prompt.trail.clone());
        let prefill = requests::make_prefill(api, &fields).map_err(no_json)?;
        Ok((self, Some(PromptAsked { api, fields, prefill, prompt })))
    }

    /// The fields of a JSON object; `None` for a body with another value, or not of JSON. Fails for malformed
    /// JSON: engines read more than JSON as JSON, and could find fields in it that must not reach them.
    fn fields(&self, body: &Bytes, must_be_json: bool) -> serde_json::Result<Option<Fields>> {
        if !(must_be_json || may_be_json(&self.headers) && !body.is_empty()) {
            return Ok(None);
        }
        if body.trim_ascii_start().starts_with(b"{") {
            return Fields::parse_object(body).map(Some);
        }
        serde_json::from_slice::<&RawValue>(body).map(|_| None)
    }

    /// The API of a prompt for two engines. Asking another engine for it again changes nothing.
    pub(super) fn api(&self) -> Option<Api> {
        match self.target {
            RequestTarget::Prompt(api) => Some(api),
            _ => None,
        }
    }

    /// The same request with another body, of a prompt that another engine computes.
    pub(super) fn with(&self, fields: &Fields) -> Self {
        Self { body: fields.payload(), ..self.clone() }
    }

    /// The same request with another body, of a prompt that a decode engine computes alone.
    pub(super) fn with_alone(&self, fields: &Fields, alone: AlonePrompt) -> Self {
        Self { alone: Some(alone), ..self.with(fields) }
    }
}

// === impl Breaks ===

impl Breaks {
    /// Counts an answer that broke off.
    pub(super) fn count_break<T>(&self, answer: &Result<T, ForwardError>) {
        self.0.fetch_add(matches!(answer, Err(ForwardError::Broken(_))).into(), Ordering::Relaxed);
    }

    pub(super) fn break_count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

// === impl Forwarder ===

impl Forwarder {
    pub(super) fn new(to: EngineAddress, tls: Option<Arc<TowardsEngines>>) -> Self {
        let connector = Connector::new(to.socket, tls);
        let client = Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_MAX).build(connector);
        Self { to, client }
    }

    /// Sends a request to the engine, and returns the answer's head. Dropping the future, or the answer,
    /// hangs up.
    async fn send_request(&self, asked: RouteRequest) -> Result<Response<Incoming>, ForwardError> {
        let mut request = Request::new(asked.body.body());
        let broken = |error: &dyn std::error::Error| ForwardError::Broken(error.to_string());
        *request.uri_mut() = self.to.at(&asked.path).map_err(|error| broken(&error))?;
        *request.method_mut() = asked.method;
        *request.headers_mut() = asked.headers;
        remove_connection_headers(request.headers_mut());
        let mut answer = self.client.request(request).await.map_err(|error| match error.is_connect() {
            true => ForwardError::Unreachable(with_cause(&error)),
            false => broken(&error),
        })?;
        // A client reaches no engine by the engine's own address.
        let location = answer.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        if let Some(path) = location.and_then(|location| self.to.path_of(location)) {
            answer.headers_mut().insert(LOCATION, path);
        }
        Ok(answer)
    }

    /// Sends a request to the engine, and waits until a part of its answer can be passed on.
    pub(super) async fn open_answer(&self, asked: RouteRequest) -> Result<OpenedAnswer, ForwardError> {
        let mut answer = self.send_request(asked).await?;
        if answer.status() == StatusCode::INTERNAL_SERVER_ERROR {
            return Ok(OpenedAnswer { answer, first_frames: VecDeque::new(), given_up: true });
        }
        let is_stream = is_of(answer.headers(), EVENTS);
        let first_frames =
            first_frames::read_first_frames(answer.body_mut(), is_stream, first_frames::TIME_MAX).await;
        let FirstFrames { frames, given_up } =
            first_frames.map_err(|error| ForwardError::Broken(error.to_string()))?;
        Ok(OpenedAnswer { answer, first_frames: frames, given_up })
    }

    /// Sends a request to the engine, and reads its whole answer, with any status.
    pub(super) async fn ask_any_status(&self, asked: RouteRequest) -> Result<Response<Bytes>, ForwardError> {
        let (mut head, body) = self.send_request(asked).await?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| ForwardError::Broken(error.to_string()))?.to_bytes();
        remove_connection_headers(&mut head.headers);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request to the engine, and reads its whole answer. Fails if its status is no success.
    pub(super) async fn ask_success(&self, asked: RouteRequest) -> Result<Response<Bytes>, ForwardError> {
        let answer = self.ask_any_status(asked).await?;
        if answer.status().is_success() { Ok(answer) } else { Err(ForwardError::Status(answer.status())) }
    }
}

/// An error with the last of its causes: of the network, or of TLS.
fn with_cause(error: &dyn std::error::Error) -> String {
    let cause = std::iter::successors(error.source(), |cause| cause.source()).last();
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Returns true if an engine may read a body as JSON: `application/json`, or any type with `json` in it.
pub(super) fn may_be_json(headers: &HeaderMap) -> bool {
    let said = headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    said.to_ascii_lowercase().windows(4).any(|part| part == b"json")
}

/// Returns true if the body's type begins with `wanted`, with any bytes behind it, also of no letter.
pub(super) fn is_of(headers: &HeaderMap, wanted: &str) -> bool {
    let said = headers.get(CONTENT_TYPE).map(|value| value.as_bytes().trim_ascii_start());
    said.and_then(|said| said.get(..wanted.len()))
        .is_some_and(|said| said.eq_ignore_ascii_case(wanted.as_bytes()))
}

/// Removes the headers of one connection, and those named by its `Connection` header.
pub(super) fn remove_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in OF_A_CONNECTION.iter().chain(&named) {
        headers.remove(name);
    }
    headers.remove("keep-alive");
}

// === impl OpenedAnswer ===

impl OpenedAnswer {
    pub(super) fn status(&self) -> StatusCode {
        self.answer.status()
    }

    /// Returns true if a part of a successful stream is there: its prompt is computed.
    pub(super) fn is_begun_stream(&self) -> bool {
        let is_begun = self.status().is_success() && !self.given_up && !self.first_frames.is_empty();
        is_begun && is_of(self.answer.headers(), EVENTS)
    }

    /// The id of the response stored by the engine: the first id in its answer.
    pub(super) fn response_id(&self) -> Option<String> {
        let said =
            self.first_frames.iter().filter_map(Frame::data_ref).flatten().copied().take(ID_WITHIN_BYTES);
        let said = String::from_utf8_lossy(&said.collect::<Vec<_>>()).into_owned();
        let (_, behind) = said.split_once("\"id\"")?;
        let id = behind.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
        id.split_once('"').map(|(id, _)| id.to_owned())
    }
}

/// A stream of the event `first` with this head, and behind it the body of `rest`, which is polled after
/// `first` was sent. A `rest` without success becomes an error event, as vLLM writes it within a stream.
pub(super) fn continue_stream(
    mut head: response::Parts,
    first: Bytes,
    rest: impl Future<Output = Response<Answer>> + Send + 'static,
) -> Response<Answer> {
    let asking = async move {
        let rest = rest.await;
        if rest.status().is_success() {
            return rest.into_body();
        }
        let error = Limited::new(rest.into_body(), ANSWER_BYTES_MAX).collect().await;
        let error = error.map(|error| error.to_bytes()).unwrap_or_default();
        let error = String::from_utf8_lossy(&error).replace('\n', " ");
        let told = Bytes::from(format!("data: {error}\n\ndata: [DONE]\n\n"));
        Full::new(told).map_err(|never| match never {}).boxed_unsync()
    };
    let body = Continued { first: Some(first), asking: Some(Box::pin(asking)), rest: None };
    remove_connection_headers(&mut head.headers);
    Response::from_parts(head, body.boxed_unsync())
}

// === impl Continued ===

impl Body for Continued {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if let Some(asking) = &mut self.asking {
            let Poll::Ready(rest) = asking.as_mut().poll(context) else { return Poll::Pending };
            (self.asking, self.rest) = (None, Some(rest));
        }
        match &mut self.rest {
            Some(rest) => Pin::new(rest).poll_frame(context),
            None => Poll::Ready(None),
        }
    }
}
