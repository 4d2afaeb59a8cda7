//! `pillion route`: sends a prompt to one engine that computes it and to another that answers it. The KV goes from one to the
//! other through their sidecars, by key: the router moves none, and knows no engine but by its address.

mod engines;
mod first_token;
mod forward;
mod length;
mod prompt;
mod watch;

use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::{IntCounter, IntCounterVec, Opts, Registry, TextEncoder};
use rustix::net::sockopt;
use serde_json::{Value, json};
use tokio::sync::watch::{Receiver, channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub use self::engines::Address;
use self::engines::{Engine, Engines, Seat};
use self::forward::{Answer, Asked, ForwardError, Forwarder, Opened, continued};
use self::length::LengthMax;
use self::prompt::{Fields, PARAMS, Prompt, Whole};
use crate::config::{Level, LogFormat, Time};

/// The longest request: a million tokens as JSON, several times.
const REQUEST_BYTES_MAX: usize = 64 << 20;
/// A request line and headers come in one packet; who takes longer is not served.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// Nor is who sends nothing of its body for so long.
const PART_TIME_MAX: Duration = Duration::from_secs(30);
const REQUEST_ID: &str = "x-request-id";

/// Options of `pillion route`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// An engine that computes prompts, http://HOST:PORT of its OpenAI server; repeat it for each
    #[arg(long, env = "PILLION_PREFILL", value_delimiter = ',', required = true, value_name = "URL")]
    pub prefill: Vec<Address>,
    /// An engine that answers; repeat it for each
    #[arg(long, env = "PILLION_DECODE", value_delimiter = ',', required = true, value_name = "URL")]
    pub decode: Vec<Address>,
    /// Where clients ask
    #[arg(long, env = "PILLION_ROUTE_LISTEN", default_value = "0.0.0.0:8000", value_name = "IP:PORT")]
    pub listen: SocketAddr,
    /// The engine that answers also computes a prompt of fewer tokens; a text counts one for each four bytes
    #[arg(long, env = "PILLION_MIN_REMOTE_TOKENS", default_value_t = 256, value_name = "TOKENS")]
    pub min_remote_tokens: u64,
    /// When the engine that answers is asked: once the prompt is computed, or together with the other one
    #[arg(long, env = "PILLION_ORDER", value_enum, default_value_t = Order::PrefillFirst, value_name = "prefill-first|at-once")]
    pub order: Order,
    /// Stream the first token as soon as the prompt is computed, where the stream stays that of one engine
    ///
    /// The engine that computes the prompt has the first token: it goes to the client at once, and the other engine goes on behind
    /// it. For streams of /v1/completions whose request has no other fields than docs/prefill-decode.md names; whatever --order says.
    #[arg(long, env = "PILLION_FIRST_TOKEN", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "true|false")]
    pub first_token: bool,
    /// The engine that answers computes a prompt itself when the other one has not done so within this time
    #[arg(long, env = "PILLION_PREFILL_TIMEOUT", default_value = "60s", value_name = "TIME")]
    pub prefill_timeout: Time,
    /// Least severe messages: error, warn, info or debug
    #[arg(long, env = "PILLION_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    pub log_level: Level,
    /// How log lines are written: text, or json for one object a line
    #[arg(long, env = "PILLION_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// When the engine that answers is asked.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub enum Order {
    /// Once the prompt is computed: it holds none of its memory for a prompt that waits its turn at the other engine.
    PrefillFirst,
    /// With the other one: it waits while the other one works, for 30 s at most.
    AtOnce,
}

/// What clients are answered with.
#[derive(Debug)]
struct Router {
    prefill: Engines,
    decode: Engines,
    options: Options,
    forwarder: Forwarder,
    registry: Registry,
    /// Prompts by where they went, and why not to two.
    prompts: IntCounterVec,
    /// Prompts that the engine asked to compute them did not, by reason.
    failures: IntCounterVec,
    /// Prompts that the engine asked to answer them gave up, and which were put to two engines once more.
    retries: IntCounter,
    /// Streams whose first token is that of the engine that computed the prompt.
    first_tokens: IntCounter,
    length_max: LengthMax,
}

/// A task that ends with its owner, and its connection with it.
struct Task(JoinHandle<()>);

/// Runs until the process is told to end; then ends once the last answer has, or `grace` later.
pub fn serve(
    options: Options,
    end: impl Future<Output = ()> + 'static,
    grace: Duration,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let listener = TcpListener::bind(options.listen).map_err(|error| {
        anyhow::anyhow!("cannot listen on {}: {error}; give another --listen", options.listen)
    })?;
    listener.set_nonblocking(true)?;
    keep_alive(&listener)?;
    let bound = listener.local_addr()?;
    let router = Arc::new(Router::new(options)?);
    tracing::info!(%bound, order = ?router.options.order, "routing");
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        // Every connection has a receiver.
        let (ending, ended) = channel(());
        let accepting = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(Arc::clone(&router).connection(stream, ended.clone()));
                    }
                    // Out of descriptors: the next attempt must not spin.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        };
        watch::first(accepting, end).await;
        // Who connects from now on is refused, and may ask another router.
        drop((listener, ended));
        let _ = ending.send(());
        let _ = tokio::time::timeout(grace, ending.closed()).await;
        Ok(())
    })
}

// === impl Router ===

impl Router {
    fn new(options: Options) -> Result<Self, prometheus::Error> {
        let prompts = Opts::new(
            "pillion_route_prompts_total",
            "Prompts, by where they went: pair, or why to one engine alone.",
        );
        let failures = Opts::new(
            "pillion_route_prefill_failures_total",
            "Prompts that the engine asked to compute them did not, by reason; the one that answers computed them.",
        );
        let (prompts, failures) =
            (IntCounterVec::new(prompts, &["way"])?, IntCounterVec::new(failures, &["reason"])?);
        let first_tokens = IntCounter::new(
            "pillion_route_first_tokens_total",
            "Streams that began with the token of the engine that computed the prompt.",
        )?;
        let retries = IntCounter::new(
            "pillion_route_retries_total",
            "Prompts that two engines were asked for once more, since the one that answers had given them up.",
        )?;
        let registry = Registry::new();
        registry.register(Box::new(retries.clone()))?;
        registry.register(Box::new(first_tokens.clone()))?;
        registry.register(Box::new(prompts.clone()))?;
        registry.register(Box::new(failures.clone()))?;
        for way in Whole::ALL.map(Whole::label).into_iter().chain([PAIR]) {
            prompts.with_label_values(&[way]);
        }
        for reason in FAILURES {
            failures.with_label_values(&[reason]);
        }
        let (prefill, decode) = (Engines::new(&options.prefill), Engines::new(&options.decode));
        let forwarder = Forwarder::new();
        Ok(Self {
            prefill,
            decode,
            options,
            forwarder,
            registry,
            prompts,
            failures,
            retries,
            first_tokens,
            length_max: LengthMax::default(),
        })
    }

    /// Serves a client until it goes, or once the router is `ended` until the answer under way is over.
    async fn connection(self: Arc<Self>, stream: tokio::net::TcpStream, mut ended: Receiver<()>) {
        let _ = stream.set_nodelay(true);
        let service = service_fn(move |request| {
            let router = Arc::clone(&self);
            async move { Ok::<_, Infallible>(router.respond(request).await) }
        });
        // A client that goes away early is its own business: its request is dropped here, and with it those to the engines.
        let mut serving = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIME_MAX)
                .serve_connection(TokioIo::new(stream), service)
        );
        let ending = async { _ = ended.changed().await };
        if watch::first(serving.as_mut(), ending).await.is_none() {
            serving.as_mut().graceful_shutdown();
            let _ = serving.await;
        }
    }

    async fn respond(self: Arc<Self>, request: Request<Incoming>) -> Response<Answer> {
        let path = request.uri().path().to_owned();
        if request.method() == Method::GET && path == "/health" {
            return self.health();
        }
        if request.method() == Method::GET && path == "/metrics" {
            let text = TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default();
            return plain(StatusCode::OK, "text/plain; version=0.0.4", text);
        }
        let (head, body) = request.into_parts();
        let body = match read(Limited::new(body, REQUEST_BYTES_MAX), PART_TIME_MAX).await {
            Some(Ok(body)) => body,
            Some(Err(error)) => {
                let text =
                    format!("the request cannot be read: {error}; it may have {REQUEST_BYTES_MAX} bytes");
                return failure(StatusCode::BAD_REQUEST, &text);
            }
            None => {
                let text = format!("nothing of the body came for {} s", PART_TIME_MAX.as_secs());
                return failure(StatusCode::REQUEST_TIMEOUT, &text);
            }
        };
        let mut headers = head.headers;
        if !headers.contains_key(REQUEST_ID) {
            let made = format!("{:016x}", RandomState::new().build_hasher().finish());
            headers.insert(REQUEST_ID, made.parse().expect("hex digits"));
        }
        let target = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let asked = Asked { method: head.method, path: target, headers, body };
        let is_prompt =
            asked.method == Method::POST && matches!(path.as_str(), COMPLETIONS | "/v1/chat/completions");
        let mut fields = match asked.fields(is_prompt) {
            Ok(Some(fields)) => fields,
            Ok(None) => return self.answer(asked, 0).await,
            Err(error) => {
                let remedy = "send UTF-8, and no NaN or Infinity";
                return failure(StatusCode::BAD_REQUEST, &format!("the body is no JSON: {error}; {remedy}"));
            }
        };
        let spoken = fields.remove(PARAMS).is_some();
        match (is_prompt, spoken) {
            (true, _) => self.route(&asked, &fields).await,
            (false, true) => self.answer(asked.with(&fields), 0).await,
            (false, false) => self.answer(asked, 0).await,
        }
    }

    /// Up while an engine that answers is.
    fn health(&self) -> Response<Answer> {
        let now = Instant::now();
        let counts = json!({ "prefill_up": self.prefill.up(now), "decode_up": self.decode.up(now) });
        let status = if self.decode.up(now) > 0 { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        plain(status, "application/json", counts.to_string())
    }

    /// A prompt: by two engines, or by the one that answers.
    async fn route(self: Arc<Self>, asked: &Asked, fields: &Fields) -> Response<Answer> {
        let prompt = Prompt::read(fields);
        let engine = self.prefill.idlest(Instant::now());
        let whole = prompt.whole.or((prompt.tokens < self.options.min_remote_tokens).then_some(Whole::Short));
        let engine = match (whole, engine) {
            (None, Some(engine)) => engine,
            (whole, _) => {
                self.prompts.with_label_values(&[whole.unwrap_or(Whole::NoPrefill).label()]).inc();
                return self.answer(asked.with(fields), prompt.start).await;
            }
        };
        self.prompts.with_label_values(&[PAIR]).inc();
        let seat = engine.seat(prompt.tokens.max(1), Instant::now());
        let begins = self.options.first_token
            && asked.path == COMPLETIONS
            && first_token::may_be_split(fields, &prompt);
        let (answer, given_up) = if begins {
            match Arc::clone(&self).begin(seat, asked, fields, prompt.start).await {
                Ok(stream) => return stream,
                Err(asked) => self.open(prompt.start, None, asked, None).await,
            }
        } else {
            Arc::clone(&self).pair(seat, prompt.start, None, asked, fields).await
        };
        let Some(decode) = given_up else { return answer };
        // Nothing of it was sent. Both engines are rid of it before others are asked.
        drop(answer);
        self.retries.inc();
        let now = Instant::now();
        let seat = self.prefill.idlest_but(&engine, now).unwrap_or(engine).seat(prompt.tokens.max(1), now);
        self.pair(seat, prompt.start, Some(&decode), asked, fields).await.0
    }

    /// A prompt by the engine of `seat` and one that answers, `spared` only where there is no other; and that one where it gave the
    /// prompt up, with nothing of an answer, as a strict engine does that was not handed enough.
    async fn pair(
        self: Arc<Self>,
        seat: Seat,
        start: u64,
        spared: Option<&Engine>,
        asked: &Asked,
        fields: &Fields,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        let ask = Arc::clone(&self).compute(seat, asked.with(&prompt::prefill(fields)));
        let (asked, task) = match self.options.order {
            Order::PrefillFirst => match ask.await {
                Some(said) => (asked.with(&prompt::decode(fields, said)), None),
                None => (asked.with(fields), None),
            },
            Order::AtOnce => {
                let task = Task(tokio::spawn(async move {
                    ask.await;
                }));
                (asked.with(&prompt::decode(fields, prompt::computed(None))), Some(task))
            }
        };
        self.open(start, spared, asked, task).await
    }

    /// Asks an engine that answers: its answer, and the engine where it gave the prompt up. `task` lives as long as the answer is read.
    async fn open(
        &self,
        start: u64,
        spared: Option<&Engine>,
        asked: Asked,
        task: Option<Task>,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        match self.send(start, spared, asked).await {
            Ok((opened, seat)) => {
                let given_up = opened.given_up.then(|| Arc::clone(&seat.engine));
                (opened.pass((seat, task)), given_up)
            }
            Err(failure) => (failure, None),
        }
    }

    /// Has a prompt computed, and streams the token that comes of it before the other engine is asked. Where the stream would be another
    /// one, `Err` is what the engine that answers is to be asked instead.
    async fn begin(
        self: Arc<Self>,
        seat: Seat,
        asked: &Asked,
        fields: &Fields,
        start: u64,
    ) -> Result<Response<Answer>, Asked> {
        let Some(answer) = self.ask_prefill(&seat, asked.with(&first_token::prefill(fields))).await else {
            return Err(asked.with(fields));
        };
        drop(seat);
        // What is too long is refused by the engine that answers, and that before an event.
        let length_max = self.length_max.of(&self.decode, &self.forwarder, &asked.headers).await.unwrap_or(0);
        let Some(first) = first_token::read(&answer, fields, length_max) else {
            return Err(asked.with(&prompt::decode(fields, prompt::computed(None))));
        };
        self.first_tokens.inc();
        let (asked, fields) = (asked.clone(), fields.clone());
        // The event is not to wait for what is asked behind it.
        Ok(continued(first.event.clone(), async move {
            self.answer(asked.with(&first.rest(&fields)), start).await
        }))
    }

    /// Has a prompt computed; what that engine says to the one that answers, or `None`, counted, where there is nothing to wait for.
    async fn compute(self: Arc<Self>, seat: Seat, asked: Asked) -> Option<Value> {
        let answer = self.ask_prefill(&seat, asked).await?;
        let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
        let said = answer.get(PARAMS).filter(|params| params.is_object()).cloned();
        if said.is_none() {
            self.failures.with_label_values(&[NO_PARAMS]).inc();
            let remedy = "its answer has no kv_transfer_params: start vLLM there with Pillion's connector";
            tracing::warn!(engine = %seat.engine.address, "{remedy}");
        }
        said
    }

    /// The whole answer of an engine that computes; `None`, counted, where it has none.
    async fn ask_prefill(&self, seat: &Seat, asked: Asked) -> Option<Bytes> {
        let engine = &seat.engine;
        let limit = Duration::from_millis(self.options.prefill_timeout.as_millis());
        let answer = watch::ask(&self.forwarder, engine, asked, limit).await;
        match answer {
            Ok(_) | Err(ForwardError::Status(_)) => engine.set_up(),
            Err(_) => engine.set_down(Instant::now()),
        }
        let counted = |error: &ForwardError| {
            self.failures.with_label_values(&[error.label()]).inc();
            tracing::warn!(engine = %engine.address, %error, "a prompt was not computed there");
        };
        answer.inspect_err(counted).ok()
    }

    /// The answer of one engine, whatever it is.
    async fn answer(&self, asked: Asked, start: u64) -> Response<Answer> {
        self.open(start, None, asked, None).await.0
    }

    /// Asks the first engine that begins to answer, in the order for this beginning, which is that of the time when it is asked; what the
    /// client is told where none does.
    async fn send(
        &self,
        start: u64,
        spared: Option<&Engine>,
        asked: Asked,
    ) -> Result<(Opened, Seat), Response<Answer>> {
        let mut problems = Vec::new();
        let mut ranked = self.decode.ranked(start, spared, Instant::now()).into_iter().peekable();
        while let Some(engine) = ranked.next() {
            let seat = engine.seat(1, Instant::now());
            let opened = self.forwarder.open(&engine.address, asked.clone());
            // There is none after the last: it is waited for, since an engine that was stopped may go on.
            let answer = match ranked.peek() {
                Some(_) => watch::living(&self.forwarder, &engine, opened).await,
                None => opened.await,
            };
            match answer {
                Ok(opened) => {
                    engine.set_up();
                    return Ok((opened, seat));
                }
                // Nothing of an answer was sent, and of one that stands still none will be: it is hung up on.
                Err(error @ (ForwardError::Unreachable(_) | ForwardError::Silent(_))) => {
                    engine.set_down(Instant::now());
                    problems.push(format!("{}: {error}", engine.address));
                }
                Err(error) => {
                    let text = format!("{}: {error}", engine.address);
                    return Err(failure(StatusCode::BAD_GATEWAY, &text));
                }
            }
        }
        let text = format!("no engine of --decode answers: {}", problems.join("; "));
        Err(failure(StatusCode::BAD_GATEWAY, &text))
    }
}

const COMPLETIONS: &str = "/v1/completions";
/// The label of a prompt that two engines work on.
const PAIR: &str = "pair";
/// The label of a prompt whose answer says nothing to the engine that answers.
const NO_PARAMS: &str = "no_params";
/// Why a prompt was not computed: the labels of [`ForwardError`], and the one above. All are there before the first failure.
const FAILURES: [&str; 6] = ["unreachable", "broken", "status", "silent", "late", NO_PARAMS];

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A client whose host vanishes says nothing: the connections of this listener, which are as it is, end then.
fn keep_alive(listener: &TcpListener) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, forward::KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(listener, forward::KEEPALIVE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(listener, forward::KEEPALIVE_RETRIES)?)
}

/// All of a body; `None` once nothing of it has come for `pause`.
async fn read<B: Body<Data = Bytes> + Unpin>(
    mut body: B,
    pause: Duration,
) -> Option<Result<Bytes, B::Error>> {
    let mut whole = Vec::new();
    while let Some(frame) = tokio::time::timeout(pause, body.frame()).await.ok()? {
        match frame {
            Ok(frame) => whole.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
            Err(error) => return Some(Err(error)),
        }
    }
    Some(Ok(whole.into()))
}

fn plain(status: StatusCode, content: &'static str, text: String) -> Response<Answer> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, content.parse().expect("a constant"));
    *response.headers_mut() = headers;
    response
}

/// As vLLM's own server says that something is wrong.
fn failure(status: StatusCode, text: &str) -> Response<Answer> {
    let error = json!({ "error": { "message": text, "type": "pillion_route", "param": null, "code": status.as_u16() } });
    plain(status, "application/json", error.to_string())
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use clap::Parser;
    use hyper::body::Frame;

    use super::*;

    /// A part, and then nothing.
    struct Stalled(Option<Bytes>);

    impl Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.take().map_or(Poll::Pending, |part| Poll::Ready(Some(Ok(Frame::data(part)))))
        }
    }

    #[test]
    fn a_body_of_which_nothing_comes_is_not_waited_for() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let body = Full::new(Bytes::from_static(b"whole"));
        let whole = runtime.block_on(read(body, Duration::from_secs(30))).unwrap().unwrap();
        assert_eq!(whole, "whole");
        let begun = Stalled(Some(Bytes::from_static(b"a part")));
        assert!(runtime.block_on(read(begun, Duration::from_millis(1))).is_none());
    }

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn every_failure_has_its_counter_from_the_start() {
        let arguments = ["route", "--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2"];
        let router = Router::new(Arguments::parse_from(arguments).options).unwrap();
        let page = TextEncoder::new().encode_to_string(&router.registry.gather()).unwrap();
        for reason in FAILURES {
            let line = format!("pillion_route_prefill_failures_total{{reason=\"{reason}\"}} 0\n");
            assert!(page.contains(&line), "{line}{page}");
        }
        let errors = [
            ForwardError::Broken(String::new()),
            ForwardError::Status(StatusCode::OK),
            ForwardError::Silent(Duration::ZERO),
            ForwardError::Late(Duration::ZERO),
        ];
        for error in errors {
            assert!(FAILURES.contains(&error.label()), "{error}");
        }
    }
}
