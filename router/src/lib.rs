//! `pillion route`: sends a prompt to one engine that computes it and to another that answers it. The KV goes from one to the
//! other through their sidecars, by key: the router moves none, and knows no engine but by its address.
//!
//! Job: serve clients ([`server`], [`access`], [`intake`]), read their requests ([`api`], [`body`], [`prompt`]), choose two engines
//! ([`engines`], [`affinity`]) and pass on their answers ([`forward`], [`computing`], [`passing`]).
//!
//! May depend on: sidecar, for values of options, log lines, figures of metrics and connections of an HTTP server. Never: holds unsafe
//! code, moves KV, speaks to a sidecar.

#![forbid(unsafe_code)]

mod access;
mod address;
mod affinity;
mod api;
mod body;
mod computing;
mod connector;
mod counted;
mod counters;
mod engines;
mod everywhere;
mod figures;
mod first_token;
mod forward;
pub mod fuzzed;
mod handed_over;
mod intake;
mod lead;
mod length;
mod listed;
mod memory;
mod names;
mod passing;
mod prompt;
mod refresh;
mod server;
mod tls;
mod tokens;
mod usage;
mod watch;

use std::future::{pending, ready};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use self::access::{AccessLog, Noted, Writer};
pub use self::address::EngineUrl;
use self::affinity::Trail;
use self::api::{Api, Target, without_slash};
use self::body::{Fields, Payload};
use self::computing::{Computing, Outcome};
use self::counters::{Counters, EVERYWHERE, Failure, OTHER, PAIR, REFUSED, code_of};
use self::engines::{Engine, Engines, Role, Seat};
use self::forward::{Answer, Asked, ForwardError, Opened, PromptAsked, continued};
use self::intake::Unread;
use self::length::Lengths;
use self::memory::Memory;
use self::prompt::Whole;
pub use self::server::serve;
use self::server::{failure, plain};
use self::tls::RouteTls;
use self::tokens::TokenBytes;
use sidecar::config::{IpPort, Level, LogFormat, Size, Time};
use sidecar::pages::connections::first;

const REQUEST_ID: &str = "x-request-id";
/// A longer body is read by a thread of its own: streams go on meanwhile.
const LONG_BYTES: usize = 1 << 20;
/// By load a longer prompt is computed first: the other engine waits for 30 s, in which one that computes 2,000 tokens a second is done
/// with this many.
const AT_ONCE_TOKENS_MAX: u64 = 65_536;

/// How long an engine that answers may take to refuse what the other one refused.
const REFUSAL_TIME_MAX: Duration = Duration::from_millis(250);
/// The log tells of refused requests no more often.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

/// Options of `pillion route`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// An engine that computes prompts, http://HOST:PORT or https://HOST:PORT of its OpenAI server; repeat it for each
    ///
    /// Each address of a host's name is an engine of its own, as of a headless Service. A name with IPv4 and IPv6 addresses stands for those of
    /// IPv4 alone.
    #[arg(
        long,
        env = "PILLION_PREFILL",
        value_delimiter = ',',
        required_unless_present = "engines",
        conflicts_with = "engines",
        value_name = "URL"
    )]
    pub prefill: Vec<EngineUrl>,
    /// An engine that answers; repeat it for each
    #[arg(
        long,
        env = "PILLION_DECODE",
        value_delimiter = ',',
        required_unless_present = "engines",
        conflicts_with = "engines",
        value_name = "URL"
    )]
    pub decode: Vec<EngineUrl>,
    /// A TOML file with both lists, prefill = ["URL"] and decode = ["URL"], instead of --prefill and --decode
    ///
    /// The router reads it again at each --refresh-interval, and on SIGHUP. If it is malformed, the log names the line, and the engines
    /// stay as they were.
    #[arg(long, env = "PILLION_ENGINES", value_name = "FILE")]
    pub engines: Option<PathBuf>,
    /// Time between two lookups of engines' names, and two reads of --engines and of TLS files; SIGHUP has both done at once
    ///
    /// 1s or more. A failed lookup keeps the engines of a name. An engine gets no more requests once it left the list, and ends its own.
    #[arg(long, env = "PILLION_REFRESH_INTERVAL", default_value = "10s", value_name = "TIME")]
    pub refresh_interval: Time,
    /// Where clients ask
    #[arg(long, env = "PILLION_ROUTE_LISTEN", default_value = "0.0.0.0:8000", value_name = "IP:PORT")]
    pub listen: IpPort,
    /// The engine that answers also computes a prompt of fewer tokens; how many bytes of a text make one, engines' answers tell
    #[arg(long, env = "PILLION_MIN_REMOTE_TOKENS", default_value_t = 256, value_name = "TOKENS")]
    pub min_remote_tokens: u64,
    /// When the engine that answers is asked: prefill-first, once the prompt is computed; at-once, together with the other engine;
    /// by-load, together where the router has no other prompt at the other engine and this prompt has at most 65,536 tokens
    ///
    /// Who is asked together with the other engine waits for 30 s at most, whatever --prefill-timeout says, and then computes the prompt too.
    /// Where prompts take longer, give prefill-first.
    #[arg(long, env = "PILLION_ORDER", value_enum, default_value_t = Order::ByLoad, value_name = "by-load|prefill-first|at-once")]
    pub order: Order,
    /// Stream the first token as soon as the prompt is computed, where the stream stays that of one engine
    ///
    /// The engine that computes the prompt has the first token: it goes to the client at once, and the other engine goes on behind
    /// it. For streams of /v1/completions whose request has no other fields than docs/prefill-decode.md names; whatever --order says. Not
    /// for engines with a presence_penalty or frequency_penalty of their own (generation_config.json, --override-generation-config), or
    /// with logits processors that look at an answer's tokens: the other engine would not count the first one.
    #[arg(long, env = "PILLION_FIRST_TOKEN", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "true|false")]
    pub first_token: bool,
    /// The engine that answers computes a prompt itself when the other one has not done so within this time
    #[arg(long, env = "PILLION_PREFILL_TIMEOUT", default_value = "60s", value_name = "TIME")]
    pub prefill_timeout: Time,
    /// Time after SIGTERM with new clients still accepted, while /health answers with status 503
    ///
    /// A Service stops sending clients here within this time, and each answer has Connection: close. Streams then have 20 s to end: give
    /// terminationGracePeriodSeconds more than both.
    #[arg(long, env = "PILLION_DRAIN_TIME", default_value = "5s", value_name = "TIME")]
    pub drain_time: Time,
    /// Memory for bodies of requests that wait for their answer's begin
    ///
    /// What goes beyond it is refused with status 503. One client, by its address, has half of it: behind a proxy all are one.
    #[arg(long, env = "PILLION_REQUEST_MEMORY", default_value = "128MiB", value_name = "SIZE")]
    pub request_memory: Size,
    /// Write a line for each request to standard output, as --log-format says
    ///
    /// A line has no query or body. Unread lines are dropped.
    #[arg(long, env = "PILLION_ACCESS_LOG", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "true|false")]
    pub access_log: bool,
    /// A PEM file of the authorities behind the certificates of engines with https://HOST:PORT
    ///
    /// A certificate must carry the URL's host, and the engine speak TLS 1.3. The router reads the file again as it does --engines.
    #[arg(long, env = "PILLION_ENGINE_CA", value_name = "FILE")]
    pub engine_ca: Option<PathBuf>,
    /// The router's certificate and the chain to its authority, in PEM: clients then speak TLS 1.3
    ///
    /// The router reads it and --tls-key again as it does --engines. Files without a pair change nothing, and the log says so.
    #[arg(long, env = "PILLION_TLS_CERT", requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, in PEM
    #[arg(long, env = "PILLION_TLS_KEY", requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
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
    /// With the other one where it has nothing else to do, so that a prompt does not wait its turn; else, and a very long one, once it is
    /// computed.
    ByLoad,
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
    tls: RouteTls,
    counters: Counters,
    access: Option<AccessLog>,
    lengths: Lengths,
    token_bytes: TokenBytes,
    memory: Arc<Memory>,
    /// Long bodies are read one by one: of each a copy of its longest name may be made.
    long_bodies: Semaphore,
    /// When the log last told of a body without room.
    refusal_told: Mutex<Option<Instant>>,
    /// Set after SIGTERM.
    is_draining: AtomicBool,
}

// === impl Router ===

impl Router {
    fn new(options: Options) -> anyhow::Result<(Self, Option<Writer>)> {
        let tls = RouteTls::from_options(&options).map_err(anyhow::Error::msg)?;
        let engines = |role| Engines::new(role, tls.engines.clone());
        let (prefill, decode) = (engines(Role::Prefill), engines(Role::Decode));
        let (lengths, token_bytes) = (Lengths::default(), TokenBytes::default());
        let (memory, long_bodies) = (Memory::new(options.request_memory.as_bytes()), Semaphore::new(1));
        let (counters, refusal_told) = (Counters::new()?, Mutex::default());
        let started = options
            .access_log
            .then(|| AccessLog::start_writer(options.log_format, counters.lines_dropped.clone()));
        let (access, writer) = started.transpose()?.unzip();
        let router = Self {
            prefill,
            decode,
            options,
            tls,
            counters,
            access,
            lengths,
            token_bytes,
            memory,
            long_bodies,
            refusal_told,
            is_draining: AtomicBool::new(false),
        };
        Ok((router, writer))
    }

    /// The answer to a request for a page of the router's own; `None` for any other request.
    fn own_page(
        self: &Arc<Self>,
        request: &Request<Incoming>,
    ) -> Option<impl Future<Output = Response<Answer>> + use<>> {
        let (is_metrics, router) = (request.uri().path() == "/metrics", Arc::clone(self));
        let is_own = request.method() == Method::GET && (is_metrics || request.uri().path() == "/health");
        is_own.then_some(async move {
            if !is_metrics {
                return router.health();
            }
            // Streams go on while the page is made.
            let page = tokio::task::spawn_blocking(move || router.page()).await.unwrap_or_default();
            plain(StatusCode::OK, "text/plain; version=0.0.4", page)
        })
    }

    async fn respond(
        self: Arc<Self>,
        request: Request<Incoming>,
        client: IpAddr,
        noted: Arc<Noted>,
    ) -> Response<Answer> {
        let (head, body) = request.into_parts();
        let path = without_slash(head.uri.path_and_query().map_or("/", |path| path.as_str()));
        let target = Target::of(&head.method, &path);
        if let Target::Nowhere(reason) = target {
            self.count_way(&noted, REFUSED);
            noted.failed(reason);
            return failure(StatusCode::NOT_IMPLEMENTED, reason);
        }
        let (body, room) = match intake::read(body, self.memory.room(client)).await {
            Ok(read) => read,
            Err(unread) => {
                self.refused(&unread);
                noted.failed(unread.why());
                return unread.told();
            }
        };
        noted.notes().request_bytes = body.len() as u64;
        let (breaks, room) = (Arc::default(), Some(Arc::new(room)));
        let trail = match &target {
            Target::Stored(id) => Trail::bound(prompt::response_hash(id)),
            _ => Trail::default(),
        };
        let (payload, trail) = (Payload::default(), Arc::new(trail));
        let (method, headers) = (head.method, head.headers);
        let asked = Asked {
            method,
            path,
            target,
            headers,
            body: payload,
            trail,
            breaks,
            noted: Arc::clone(&noted),
            _room: room,
        };
        let parsed = if body.len() < LONG_BYTES {
            asked.parse(body)
        } else {
            let _turn = self.long_bodies.acquire().await;
            tokio::task::spawn_blocking(|| asked.parse(body)).await.expect("no body lets it panic")
        };
        match parsed {
            Ok((asked, Some(prompt))) => self.route(&asked, &prompt).await,
            Ok((asked, None)) => self.pass(asked).await,
            Err(text) => {
                noted.failed("the body is no JSON");
                failure(StatusCode::BAD_REQUEST, &text)
            }
        }
    }

    /// What is no prompt: by the engine that has it, by all, or by any.
    async fn pass(&self, asked: Asked) -> Response<Answer> {
        match asked.target {
            Target::Everywhere => {
                self.count_way(&asked.noted, EVERYWHERE);
                return self.tell_everywhere(&asked).await;
            }
            Target::Stored(_) => self.count_way(&asked.noted, Whole::Stored.name()),
            _ => self.count_way(&asked.noted, OTHER),
        }
        self.answer(asked).await
    }

    /// Counts a request by where it goes.
    fn count_way(&self, noted: &Noted, way: &'static str) {
        self.counters.request(way);
        noted.notes().way = Some(way);
    }

    /// Counts a request whose body was not taken.
    fn refused(&self, unread: &Unread) {
        let Some(reason) = unread.label() else { return };
        self.counters.refused.with_label_values(&[reason]).inc();
        if !matches!(unread, Unread::NoRoom | Unread::ClientFull) {
            return;
        }
        let (now, mut told) =
            (Instant::now(), self.refusal_told.lock().unwrap_or_else(PoisonError::into_inner));
        if told.is_none_or(|at| now >= at + REFUSAL_PAUSE) {
            *told = Some(now);
            tracing::warn!(
                "requests are refused, since bodies take all of --request-memory, or those of one client half of it; give it more"
            );
        }
    }

    /// The page of metrics, with all engines of this moment.
    fn page(&self) -> String {
        let engines = [&self.prefill, &self.decode].map(|engines| engines.gather(Instant::now()));
        self.counters.page(engines.concat())
    }

    fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Status 200 while an engine of --decode is up, until SIGTERM.
    fn health(&self) -> Response<Answer> {
        let (now, is_draining) = (Instant::now(), self.is_draining());
        let (prefill, decode) = (self.prefill.up(now), self.decode.up(now));
        let counts = json!({ "prefill_up": prefill, "decode_up": decode, "draining": is_draining });
        let is_ready = decode > 0 && !is_draining;
        let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        plain(status, "application/json", counts.to_string())
    }

    /// A prompt: by two engines, or by the one that answers.
    async fn route(self: Arc<Self>, asked: &Asked, prompt: &PromptAsked) -> Response<Answer> {
        let (tokens, fields) = (self.token_bytes.tokens(&prompt.prompt.sizes()), &prompt.fields);
        let whole = prompt.prompt.whole.or((tokens < self.options.min_remote_tokens).then_some(Whole::Short));
        let seat = match whole {
            None => self.seat_prefill(asked, tokens, None).ok_or(Whole::NoPrefill),
            Some(whole) => Err(whole),
        };
        let seat = match seat {
            // No client waits for an engine that may still not work.
            Ok(seat) if seat.is_trial => {
                self.start(seat, asked, prompt).let_go();
                Err(Whole::NoPrefill)
            }
            seat => seat,
        };
        let seat = match seat {
            Ok(seat) => seat,
            Err(whole) => {
                self.count_way(&asked.noted, whole.name());
                return self.answer(asked.with(fields)).await;
            }
        };
        self.count_way(&asked.noted, PAIR);
        asked.noted.notes().prefill = Some(seat.engine.address.to_string());
        let begins = self.options.first_token
            && prompt.api == Api::Completions
            && first_token::may_be_split(fields, &prompt.prompt);
        let engine = Arc::clone(&seat.engine);
        let (answer, given_up) = match first_token::prefill(fields).ok().filter(|_| begins) {
            Some(prefill) => match Arc::clone(&self).begin(seat, tokens, asked, fields, &prefill).await {
                Ok(stream) => return stream,
                Err(opened) => opened,
            },
            None => {
                let at_once = self.is_at_once(&seat, tokens);
                self.pair(seat, tokens, at_once, None, asked, prompt).await
            }
        };
        let Some(decode) = given_up.filter(|_| asked.breaks.count() == 0) else { return answer };
        // Nothing of it was sent. Both engines are rid of it before others are asked.
        drop(answer);
        self.retried(&[&engine, &decode]);
        let Some(seat) = self.seat_prefill(asked, tokens, Some(&engine)) else {
            return self.open(Some(&decode), asked.with(fields), None).await.0;
        };
        asked.noted.notes().prefill = Some(seat.engine.address.to_string());
        // By load, what was given up is computed first.
        let at_once = self.options.order == Order::AtOnce;
        self.pair(seat, tokens, at_once, Some(&decode), asked, prompt).await.0
    }

    /// Takes the engine that is to compute a prompt, `spared` only where no other is up.
    fn seat_prefill(&self, asked: &Asked, tokens: u64, spared: Option<&Engine>) -> Option<Seat> {
        let seat = self.prefill.take(&asked.trail, tokens, spared, Instant::now())?;
        self.prefill.note(&asked.trail, &seat.engine, Instant::now());
        Some(seat)
    }

    /// Whether an engine that answers a prompt of so many tokens is asked together with the one of this seat. By load, that one has
    /// answered before: what computes its first prompt may be slower than the other one waits.
    fn is_at_once(&self, seat: &Seat, tokens: u64) -> bool {
        match self.options.order {
            Order::ByLoad => {
                tokens <= AT_ONCE_TOKENS_MAX
                    && seat.engine.answered().is_some()
                    && seat.is_alone(Instant::now())
            }
            Order::PrefillFirst => false,
            Order::AtOnce => true,
        }
    }

    fn start(self: &Arc<Self>, seat: Seat, asked: &Asked, prompt: &PromptAsked) -> Computing {
        let sizes = Arc::new(prompt.prompt.sizes());
        Computing::start(Arc::clone(self), seat, asked.with(&prompt.prefill), Some(sizes))
    }

    /// Counts a second attempt of a prompt, after its decode engine gave it up.
    fn retried(&self, engines: &[&Arc<Engine>]) {
        self.counters.retries.inc();
        engines.iter().for_each(|engine| engine.figures.retries.inc());
    }

    /// What became of a prompt of so many tokens; `None` where its engine shows no work. One that is longer may take all of
    /// `--prefill-timeout`.
    async fn worked(&self, computing: &Computing, engine: &Engine, tokens: u64) -> Option<Arc<Outcome>> {
        let stalled = async {
            computing::stalled(engine, Instant::now()).await;
            if tokens > AT_ONCE_TOKENS_MAX && engine.is_up(Instant::now()) {
                pending().await
            }
        };
        first(computing.outcome(), stalled).await
    }

    /// A prompt by the engine of `seat` and one that answers, `spared` only where there is no other; and that one where it gave the
    /// prompt up, with nothing of an answer, as a strict engine does that was not handed enough.
    async fn pair(
        self: &Arc<Self>,
        seat: Seat,
        tokens: u64,
        at_once: bool,
        spared: Option<&Engine>,
        asked: &Asked,
        prompt: &PromptAsked,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        let (fields, engine) = (&prompt.fields, Arc::clone(&seat.engine));
        let computing = self.start(seat, asked, prompt);
        if !at_once && let Some(outcome) = self.worked(&computing, &engine, tokens).await {
            return match &*outcome {
                Ok(computed) => {
                    let params =
                        RawValue::from_string(String::from_utf8_lossy(&computed.params).into_owned());
                    let fields = prompt::decode(fields, params.expect("JSON of an answer"));
                    self.open(spared, asked.with(&fields), Some(computing)).await
                }
                Err(failure) => self.open_alone(spared, asked.with(fields), &engine, *failure).await,
            };
        }
        let outcome = computing.outcome();
        let failing = async {
            match *outcome.await {
                // The other one may refuse it too: that is the client's, and asked for once.
                Err(Failure::Refused) => sleep(REFUSAL_TIME_MAX).await,
                Err(failure) if failure.is_soon() => {}
                _ => pending().await,
            }
        };
        let known = computing.outcome();
        let waiting = asked.with(&prompt::decode(fields, prompt::computed(None)));
        let awaited = engine.await_prompt(Instant::now());
        let opened = first(self.open(spared, waiting, Some(computing)), failing).await;
        drop(awaited);
        // An engine that gave the prompt up in the same moment waited without effect too.
        let failure = match &opened {
            Some((_, None)) => None,
            _ => first(known, ready(())).await.and_then(|outcome| outcome.as_ref().as_ref().err().copied()),
        };
        match (opened, failure.filter(|failure| failure.is_soon())) {
            (Some(opened), None) => opened,
            // Nothing of it was sent: it is asked for again, without anything to wait for.
            (_, failure) => {
                let failure = failure.unwrap_or(Failure::Broken);
                self.open_alone(spared, asked.with(fields), &engine, failure).await
            }
        }
    }

    /// Asks an engine that answers for a prompt that was not computed, since `engine` failed so.
    async fn open_alone(
        &self,
        spared: Option<&Engine>,
        asked: Asked,
        engine: &Engine,
        failure: Failure,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        asked.noted.notes().prefill_failure = Some(failure.name());
        let opened = self.open(spared, asked, None).await;
        if failure == Failure::Refused && opened.0.status().is_success() {
            self.counters.failure(failure);
            let remedy =
                "it refused a prompt that another engine answers: give both the same models and adapters";
            tracing::warn!(engine = %engine.address, "{remedy}");
        }
        opened
    }

    /// Asks an engine that answers: its answer, and the engine where it gave the prompt up. `computing` lives as long as the answer is read.
    async fn open(
        &self,
        spared: Option<&Engine>,
        asked: Asked,
        computing: Option<Computing>,
    ) -> (Response<Answer>, Option<Arc<Engine>>) {
        match self.send(spared, asked).await {
            Ok((opened, seat)) => {
                let given_up = opened.given_up.then(|| Arc::clone(&seat.engine));
                if given_up.is_none() && opened.status().is_success() {
                    computing.iter().for_each(Computing::answer_began);
                }
                (passing::pass(opened, seat, computing).await, given_up)
            }
            Err(failure) => (failure, None),
        }
    }

    /// Has a prompt computed, and streams the token that comes of it before the other engine is asked. Where the stream would be another
    /// one, `Err` is what the engine that answers says.
    async fn begin(
        self: Arc<Self>,
        seat: Seat,
        tokens: u64,
        asked: &Asked,
        fields: &Fields,
        prefill: &Fields,
    ) -> Result<Response<Answer>, (Response<Answer>, Option<Arc<Engine>>)> {
        self.lengths.ask(&self.decode, &asked.headers);
        let engine = Arc::clone(&seat.engine);
        let computing = Computing::start(Arc::clone(&self), seat, asked.with(prefill), None);
        let waiting = || asked.with(&prompt::decode(fields, prompt::computed(None)));
        let Some(outcome) = self.worked(&computing, &engine, tokens).await else {
            let _awaited = engine.await_prompt(Instant::now());
            return Err(self.open(None, waiting(), Some(computing)).await);
        };
        let answer = match &*outcome {
            Ok(computed) => computed.answer.clone(),
            Err(failure) => return Err(self.open_alone(None, asked.with(fields), &engine, *failure).await),
        };
        let (head, answer) = answer.into_parts();
        // What is too long is refused by the engine that answers, and that before an event.
        let length_max = self.decode.length_max(Instant::now()).unwrap_or(0);
        let Some(first) = first_token::read(&answer, fields, length_max) else {
            return Err(self.open(None, waiting(), Some(computing)).await);
        };
        self.counters.first_tokens.inc();
        let (asked, fields) = (asked.clone(), fields.clone());
        // The event is not to wait for what is asked behind it.
        Ok(continued(head, first.event.clone(), async move {
            let asked = asked.with(&first.rest(&fields));
            let (answer, given_up) = self.open(None, asked.clone(), Some(computing)).await;
            let Some(decode) = given_up.filter(|_| asked.breaks.count() == 0) else { return answer };
            // Nothing of it was sent, and what the other engine saved is still kept.
            drop(answer);
            self.retried(&[&decode]);
            self.open(Some(&decode), asked, None).await.0
        }))
    }

    /// The answer of one engine, whatever it is.
    async fn answer(&self, asked: Asked) -> Response<Answer> {
        self.open(None, asked, None).await.0
    }

    /// Asks the first engine that begins to answer, in the order for this beginning, which is that of the time when it is asked; what the
    /// client is told where none does. A prompt may be what ends engines: where two broke off on it, another one is not asked.
    async fn send(&self, spared: Option<&Engine>, asked: Asked) -> Result<(Opened, Seat), Response<Answer>> {
        let (mut problems, mut status) = (Vec::new(), StatusCode::BAD_GATEWAY);
        let breaks_max = u32::from(asked.api().is_some());
        let mut ranked = self.decode.ranked(&asked.trail, 1, spared, Instant::now()).into_iter().peekable();
        if ranked.peek().is_none() {
            problems.push(
                "no name of an engine has an address; the log names those that were not resolved".into(),
            );
        }
        while let Some(engine) = ranked.next() {
            if asked.breaks.count() > breaks_max {
                problems.push("engines broke off on it, so no other one is asked".into());
                break;
            }
            let mut seat = engine.seat(1, Instant::now());
            asked.noted.notes().decode = Some(engine.address.to_string());
            if !asked.trail.is_bound {
                self.decode.note(&asked.trail, &engine, Instant::now());
            }
            let opened = engine.forwarder.open(asked.clone());
            // There is none after the last: it is waited for, since an engine that was stopped may go on.
            let answer = match ranked.peek() {
                Some(_) => watch::living(&engine, opened).await,
                None => opened.await,
            };
            asked.breaks.note(&answer);
            seat.note_answer(code_of(answer.as_ref().map(Opened::status)));
            let error = match answer {
                // It is up, and has no room: vLLM's limits of its queue.
                Ok(opened)
                    if opened.status() == StatusCode::SERVICE_UNAVAILABLE && ranked.peek().is_some() =>
                {
                    engine.set_up();
                    status = StatusCode::SERVICE_UNAVAILABLE;
                    ForwardError::Status(status)
                }
                // Another one stored it: nothing here knows which.
                Ok(opened)
                    if matches!(asked.target, Target::Stored(_))
                        && opened.status() == StatusCode::NOT_FOUND
                        && ranked.peek().is_some() =>
                {
                    ForwardError::Status(opened.status())
                }
                Ok(opened) => {
                    engine.set_up();
                    if asked.api() == Some(Api::Responses)
                        && let Some(id) = opened.response_id()
                    {
                        self.decode.bind(prompt::response_hash(&id), &engine);
                    }
                    return Ok((opened, seat));
                }
                // Nothing of an answer was sent, and of one that stands still none will be: it is hung up on.
                Err(error) => {
                    if !matches!(error, ForwardError::Broken(_)) || asked.api().is_some() {
                        engine.set_down(Instant::now());
                    }
                    error
                }
            };
            problems.push(format!("{}: {error}", engine.address));
        }
        let text = format!("there is no answer from --decode: {}", problems.join("; "));
        asked.noted.failed(text.as_str());
        Err(failure(status, &text))
    }
}
