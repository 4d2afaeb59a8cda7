//! The operator's requests to a running sidecar: HTTP with JSON over a UNIX socket for the sidecar's user
//! alone, and over TCP for clients with the token. docs/configuration.md lists the requests; `pillion ctl`
//! makes them. Routers with a token of their own ask for scores alone, at another address.
//!
//! One thread serves all. It gets the data thread's answers through the bounded [`Inbox`], and the peers'
//! answers through the mesh, and waits for each for a limited time.

mod hint;
pub mod inbox;
mod namespaces;
mod refusals;
mod requests;
mod score;

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use mesh::control::NamespaceAsker;
use prometheus::Registry;
use serde::Serialize;
use serde_json::json;
use shm_protocol::wait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::refusals::{CONTROL_HELP, ControlRefusal, ControlRefusalCause, RefusedRequests, SCORE_HELP};
pub use self::requests::{ANSWER_TIME_MAX, EVICTION_TIME_MAX};
use self::score::Scoring;
use crate::catalog;
use crate::clients::listener::{Listener, SocketUse};
use crate::config::{self, ControlTcp, Token};
use crate::control::inbox::Inbox;
use crate::error::StartError;
use crate::forecaster::ForecastCounts;
use crate::logging::LogLevel;
use crate::pages::quotas::Levels;
use crate::system::clock::Clock;

/// Connections served at once at each address; the rest wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 16;
/// The same at the address of routers, which keep theirs.
const ROUTERS_MAX: usize = 64;
/// Scores and hints read and answered at once. Each takes 7 MiB with its tokens and keys.
const SCORES_MAX: usize = 8;
/// Limit for the request line and headers, which usually come in one packet.
const HEADER_TIME_MAX: Duration = Duration::from_secs(5);
const HEADER_BYTES_MAX: usize = 16 << 10;
/// Limit for the body, which follows the headers.
const BODY_TIME_MAX: Duration = Duration::from_secs(5);
/// Twice the size of a look-up of the most keys.
const BODY_BYTES_MAX: usize = 512 << 10;
/// The tokens of a score's longest prompt, in 8 digits each.
const SCORE_BYTES_MAX: usize = 4 << 20;
/// The path of scores.
const SCORE_PATH: &str = "/score";
/// The path of hints.
const HINT_PATH: &str = "/hint";
/// Age of a connection that ends with its next answer, so clients that keep theirs are not cut off.
const CONNECTION_AGE_MAX: Duration = Duration::from_secs(60);
/// Limit of a connection: more than the longest answer takes.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(120);

/// The sources of all answers.
#[derive(Debug)]
pub struct Parts {
    pub inbox: Arc<Inbox>,
    pub catalog: catalog::SharedCatalog,
    /// The mesh, for requests to peers; `None` without a mesh.
    pub mesh: Option<NamespaceAsker>,
    pub quotas: Levels,
    pub forecast: ForecastCounts,
    pub log: LogLevel,
}

/// State shared by all connections.
#[derive(Debug)]
struct Handler {
    parts: Parts,
    /// Becomes readable once a client has requested the sidecar's end.
    end: Arc<OwnedFd>,
    clock: Clock,
    scoring: Scoring,
    /// For [`SCORES_MAX`].
    scores: Semaphore,
    refusals: RefusedRequests,
    /// Refusals at the address of routers.
    score_refusals: RefusedRequests,
}

/// Bound sockets without a server yet.
#[derive(Debug)]
pub struct Sockets {
    unix: Listener,
    tcp: Option<(TcpListener, Token)>,
    score: Option<(TcpListener, Token)>,
}

/// Running servers, until the process ends; the UNIX socket is removed on drop.
#[derive(Debug)]
pub struct ServedControl {
    _unix: Listener,
    tcp: Option<SocketAddr>,
    score: Option<SocketAddr>,
    end: Arc<OwnedFd>,
}

/// Marks an answer: the sidecar ends once it is sent.
#[derive(Copy, Clone, Debug)]
struct EndMarker;

/// A client, and its permission.
#[derive(Clone, Debug)]
enum ControlCaller {
    /// The reason of the refusal, if the client's user may not use the socket.
    Unix(Result<(), String>),
    /// The client must pass this token.
    Tcp(Token),
    /// The same, and gets scores alone.
    Router(Token),
}

// === impl Sockets ===

impl Sockets {
    /// Binds all sockets. Connections are answered only after [`Sockets::serve_sockets`].
    pub fn bind(control: &config::ControlEndpoints) -> Result<Self, StartError> {
        let unix = Listener::bind(&control.socket, SocketUse::Control, None)?;
        let bind = |option, tcp: &Option<ControlTcp>| {
            let bind = |ControlTcp { listen, token }: &ControlTcp| {
                let listener = TcpListener::bind(listen)
                    .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                    .map_err(|source| StartError::Control { option, address: *listen, source })?;
                Ok::<_, StartError>((listener, token.clone()))
            };
            tcp.as_ref().map(bind).transpose()
        };
        let (tcp, score) = (bind("--control-listen", &control.tcp)?, bind("--score-listen", &control.score)?);
        Ok(Self { unix, tcp, score })
    }

    /// Serves all sockets on a new thread, and counts their requests in `registry`.
    pub fn serve_sockets(self, parts: Parts, registry: &Registry) -> Result<ServedControl, StartError> {
        let refusals = RefusedRequests::new(registry, "control_refused_total", CONTROL_HELP)?;
        let score_refusals = RefusedRequests::new(registry, "score_refused_total", SCORE_HELP)?;
        let end = Arc::new(wait::make_eventfd().map_err(std::io::Error::from)?);
        let handler = Arc::new(Handler {
            parts,
            end: Arc::clone(&end),
            clock: Clock::start_now(),
            scoring: Scoring::new(registry)?,
            scores: Semaphore::new(SCORES_MAX),
            refusals,
            score_refusals,
        });
        let Self { unix, tcp, score } = self;
        let listener = std::os::unix::net::UnixListener::from(unix.socket().try_clone()?);
        listener.set_nonblocking(true)?;
        let bound = |tcp: &Option<(TcpListener, Token)>| {
            tcp.as_ref().map(|(listener, _)| listener.local_addr()).transpose()
        };
        let (tcp_bound, score_bound) = (bound(&tcp)?, bound(&score)?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let serve = async move {
            let unix = UnixListener::from_std(listener).expect("a non-blocking listener of this process");
            let tcp = tcp.map(|(listener, token)| (listener, ControlCaller::Tcp(token), CONNECTIONS_MAX));
            let score = score.map(|(listener, token)| (listener, ControlCaller::Router(token), ROUTERS_MAX));
            for (listener, caller, most) in tcp.into_iter().chain(score) {
                let tcp = tokio::net::TcpListener::from_std(listener)
                    .expect("a non-blocking listener of this process");
                let accept = async move || Ok((tcp.accept().await?.0, caller.clone()));
                tokio::spawn(serve_all(accept, Arc::clone(&handler), most));
            }
            let accept = async move || {
                let (stream, _) = unix.accept().await?;
                let caller = ControlCaller::Unix(Listener::permits_alone(&stream));
                Ok((stream, caller))
            };
            serve_all(accept, handler, CONNECTIONS_MAX).await;
        };
        thread::Builder::new().name("pillion-control".into()).spawn(move || runtime.block_on(serve))?;
        Ok(ServedControl { _unix: unix, tcp: tcp_bound, score: score_bound, end })
    }
}

// === impl ServedControl ===

impl ServedControl {
    /// A descriptor, readable once a client has requested the sidecar's end.
    pub fn end_signal(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// The TCP address, if there is one.
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// The address of routers, if there is one.
    pub fn score(&self) -> Option<SocketAddr> {
        self.score
    }
}

/// Serves the connections of `accept`, at most `most` at once.
async fn serve_all<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    accept: impl AsyncFn() -> std::io::Result<(S, ControlCaller)>,
    handler: Arc<Handler>,
    most: usize,
) {
    let permits = Arc::new(Semaphore::new(most));
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.expect("never closed");
        match accept().await {
            Ok((stream, caller)) => {
                tokio::spawn(connection(stream, caller, Arc::clone(&handler), permit));
            }
            // The process has no descriptors left: a pause keeps the loop from spinning.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Serves one connection until either side closes it or its time is over.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    caller: ControlCaller,
    handler: Arc<Handler>,
    permit: OwnedSemaphorePermit,
) {
    let (last, was_used, since) = (AtomicBool::new(false), AtomicBool::new(false), handler.clock.now());
    let service = service_fn(|request| async {
        was_used.store(true, Ordering::Relaxed);
        let mut answer = handler.respond(&caller, request).await;
        if handler.clock.now().saturating_sub(since) >= CONNECTION_AGE_MAX {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        last.fetch_or(answer.extensions().get::<EndMarker>().is_some(), Ordering::Relaxed);
        Ok::<_, Infallible>(answer)
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME_MAX)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIME_MAX, served).await {
        // A client may close its connection early, or keep it without a further request.
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.is_timeout() && was_used.load(Ordering::Relaxed) => {}
        Ok(Err(error)) if error.is_timeout() => handler.count_refusal(&caller, ControlRefusalCause::Slow),
        Ok(Err(error)) if error.is_parse() => handler.count_refusal(&caller, ControlRefusalCause::Malformed),
        Ok(Err(_)) => {}
        Err(_) => handler.count_refusal(&caller, ControlRefusalCause::Slow),
    }
    // The client that requested the end has its answer by now, or has closed the connection.
    if last.into_inner() {
        wait::signal_eventfd(&handler.end);
    }
    drop(permit);
}

// === impl ControlCaller ===

impl ControlCaller {
    /// Refuses a client of another user or with a wrong token, and a router's requests for anything but scores.
    fn check_permission(&self, request: &Request<Incoming>) -> Result<(), ControlRefusal> {
        let (token, file) = match self {
            Self::Unix(permitted) => {
                let refuse = |text| ControlRefusal::new(ControlRefusalCause::User, text);
                return permitted.clone().map_err(refuse);
            }
            Self::Tcp(token) => (token, "--control-token-file"),
            Self::Router(token) => (token, "--score-token-file"),
        };
        let said = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let said = said.and_then(|value| value.strip_prefix("Bearer "));
        if !said.is_some_and(|said| token.is(said)) {
            let text = format!(
                "the token is missing or wrong: pass the one of {file}, as Authorization: Bearer TOKEN"
            );
            return Err(ControlRefusal::new(ControlRefusalCause::Token, text));
        }
        if matches!(self, Self::Router(_)) && request.uri().path() != SCORE_PATH {
            let text = "this address answers POST /score alone: send other requests to --control-listen";
            return Err(ControlRefusal::new(ControlRefusalCause::Path, text));
        }
        Ok(())
    }
}

// === impl Handler ===

impl Handler {
    fn count_refusal(&self, caller: &ControlCaller, cause: ControlRefusalCause) {
        match caller {
            ControlCaller::Router(_) => self.score_refusals.count_refusal(cause),
            _ => self.refusals.count_refusal(cause),
        }
    }

    async fn respond(&self, caller: &ControlCaller, request: Request<Incoming>) -> Response<String> {
        let result = match caller.check_permission(&request) {
            Ok(()) => self.read_and_answer(request).await,
            Err(refused) => Err(refused),
        };
        result.unwrap_or_else(|ControlRefusal { cause, text }| {
            self.count_refusal(caller, cause);
            tracing::debug!(cause = cause.name(), reason = text, "a control request was refused");
            let mut answer = page(cause.status(), &json!({ "error": text }));
            if cause == ControlRefusalCause::Budget {
                answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(score::RETRY_SECONDS));
            }
            answer
        })
    }

    async fn read_and_answer(&self, request: Request<Incoming>) -> Result<Response<String>, ControlRefusal> {
        let (head, body) = request.into_parts();
        let has_prompt = [SCORE_PATH, HINT_PATH].contains(&head.uri.path());
        let most = if has_prompt { SCORE_BYTES_MAX } else { BODY_BYTES_MAX };
        let _turn = if has_prompt { Some(self.scores.acquire().await.expect("never closed")) } else { None };
        let body = Limited::new(body, most).collect();
        let body = match tokio::time::timeout(BODY_TIME_MAX, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
                let text = format!("the request is too long: send at most {most} bytes");
                return Err(ControlRefusal::new(ControlRefusalCause::TooLarge, text));
            }
            Ok(Err(error)) => {
                return Err(ControlRefusal::new(ControlRefusalCause::Malformed, error.to_string()));
            }
            Err(_) => {
                let text = format!(
                    "the body of the request did not arrive within {} s: send it faster",
                    BODY_TIME_MAX.as_secs()
                );
                return Err(ControlRefusal::new(ControlRefusalCause::Slow, text));
            }
        };
        self.answer_request(&head.method, head.uri.path(), &body).await
    }
}

/// An answer as indented JSON.
fn page(status: StatusCode, answer: &impl Serialize) -> Response<String> {
    let text = serde_json::to_string_pretty(answer).expect("texts, numbers and lists") + "\n";
    let response = Response::builder().status(status).header(CONTENT_TYPE, "application/json");
    response.body(text).expect("constant headers")
}
