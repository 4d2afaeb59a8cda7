//! `pillion route`: sends each prompt to a prefill engine, which computes it, and to a decode engine, which
//! answers it. The KV goes from one to the other through their sidecars, by key: the router moves no KV, and
//! knows an engine by its address alone.
//!
//! Job: serve clients ([`server`], [`access`], [`intake`]), read their requests ([`api`], [`body`], [`prompt`]), choose two engines
//! ([`engines`], [`affinity`]; [`observer`], [`locate`] by the blocks of a mesh), ask both ([`pairing`], [`requests`]) and pass on their answers ([`forward`], [`computing`], [`passing`]).
//!
//! May depend on: sidecar, for values of options, log lines, figures of metrics and connections of an HTTP server; mesh and
//! shm-protocol, to follow the members and derive keys. Never: holds unsafe code, moves KV, serves a member.

#![forbid(unsafe_code)]

mod access;
mod address;
mod affinity;
mod answer_terms;
mod api;
mod body;
mod computing;
mod connector;
mod counted;
mod counters;
mod engine;
mod engine_prompts;
mod engines;
mod everywhere;
mod figures;
mod first_frames;
mod first_token;
mod forward;
pub mod fuzzed;
mod handed_over;
mod intake;
mod listed;
mod locate;
mod members;
mod memory;
mod names;
mod observer;
mod pairing;
mod passing;
mod placement;
mod prompt;
mod prompt_times;
mod refresh;
mod requests;
mod server;
mod terms;
mod tls;
mod tokens;
mod usage;
mod watch;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::access::{AccessLog, Noted, Writer};
pub use self::address::EngineUrl;
use self::affinity::Trail;
use self::api::{Api, RequestTarget, without_slash};
use self::body::Payload;
use self::computing::Computing;
use self::counters::{EVERYWHERE, OTHER, REFUSED, RouteCounters, code_of};
use self::engine::{LoadShare, RouteEngine};
use self::engines::{EngineRole, RouteEngines};
use self::forward::{Answer, ForwardError, OpenedAnswer, RouteRequest};
use self::intake::UnreadBody;
use self::memory::BodyMemory;
use self::observer::{FollowOptions, Observer};
use self::prompt::Whole;
pub use self::server::serve_router;
use self::server::{make_answer, make_failure};
use self::terms::TermsAsked;
use self::tls::RouteTls;
use self::tokens::TokenBytes;
use sidecar::config::{IpPort, LogFormat, Severity, Size, Time};
use sidecar::pages::metrics::figures::show_gauge;

const REQUEST_ID: &str = "x-request-id";
/// A thread of its own reads a longer body, so streams go on meanwhile.
const LONG_BYTES: usize = 1 << 20;

/// Shortest time between two log lines about refused requests.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

/// Options of `pillion route`.
#[derive(Args, Clone, Debug)]
pub struct RouteOptions {
    /// An engine that computes prompts, http://HOST:PORT or https://HOST:PORT of its OpenAI server; repeat it for each
    ///
    /// Each address of a host's name is a separate engine, as of a headless Service. A name with IPv4 and IPv6 addresses counts
    /// by those of IPv4 alone.
    #[arg(
        long,
        env = "PILLION_PREFILL",
        value_delimiter = ',',
        required_unless_present_any = ["engines", "mesh_peer", "etcd"],
        conflicts_with = "engines",
        value_name = "URL"
    )]
    pub prefill: Vec<EngineUrl>,
    /// An engine that answers; repeat it for each
    #[arg(
        long,
        env = "PILLION_DECODE",
        value_delimiter = ',',
        required_unless_present_any = ["engines", "mesh_peer", "etcd"],
        conflicts_with = "engines",
        value_name = "URL"
    )]
    pub decode: Vec<EngineUrl>,
    /// A TOML file with both lists, prefill = ["URL"] and decode = ["URL"], instead of --prefill and --decode
    ///
    /// The router reads it again at each --refresh-interval, and on SIGHUP. A malformed file changes nothing; the log names the line.
    #[arg(long, env = "PILLION_ENGINES", value_name = "FILE")]
    pub engines: Option<PathBuf>,
    #[command(flatten)]
    follow: FollowOptions,
    /// Time between two lookups of engines' names, and two reads of --engines and of TLS files; SIGHUP starts both at once
    ///
    /// 1s or more. A failed lookup keeps the engines of a name. An engine that left finishes its requests.
    #[arg(long, env = "PILLION_REFRESH_INTERVAL", default_value = "10s", value_name = "TIME")]
    pub refresh_interval: Time,
    /// Address for clients
    #[arg(long, env = "PILLION_ROUTE_LISTEN", default_value = "0.0.0.0:8000", value_name = "IP:PORT")]
    pub listen: IpPort,
    /// Least tokens for a prefill engine: a decode engine alone gets a prompt of which it has all but fewer tokens
    #[arg(long, env = "PILLION_MIN_REMOTE_TOKENS", default_value_t = 256, value_name = "TOKENS")]
    pub min_remote_tokens: u64,
    /// Most of a decode engine's time, in percent of any 10 s, for prompts that would wait longer for a prefill engine
    ///
    /// Gaps between tokens of its answers grow meanwhile. Without answers it may spend any time. 0: none.
    #[arg(long, env = "PILLION_DECODE_PROMPT_SHARE", default_value_t = 25, value_parser = clap::value_parser!(u8).range(0..=100), value_name = "PERCENT")]
    pub decode_prompt_share: u8,
    /// Wanted time to the first token: a decode engine computes a prompt alone only if a prefill engine would exceed it, and be later
    ///
    /// Without it, if that saves at least the decode engine's own time.
    #[arg(long, env = "PILLION_TTFT_TARGET", value_name = "TIME")]
    pub ttft_target: Option<Time>,
    /// When the decode engine gets the request: prefill-first, once the prompt is computed; at-once, together with the prefill engine;
    /// by-load, together if the router has no other prompt at the prefill engine and this prompt has at most 65,536 tokens
    ///
    /// Together, the decode engine waits at most 30 s, then computes the prompt itself. Use prefill-first if prompts take longer.
    #[arg(long, env = "PILLION_ORDER", value_enum, default_value_t = AskOrder::ByLoad, value_name = "by-load|prefill-first|at-once")]
    pub order: AskOrder,
    /// Stream the prefill engine's first token before the decode engine continues, if the stream stays equal to that of one engine
    ///
    /// For streams of /v1/completions, with any --order, while all engines state equal terms.
    #[arg(long, env = "PILLION_FIRST_TOKEN", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub first_token: bool,
    /// Time after which the decode engine computes a prompt that the prefill engine has not computed
    #[arg(long, env = "PILLION_PREFILL_TIMEOUT", default_value = "60s", value_name = "TIME")]
    pub prefill_timeout: Time,
    /// Time after SIGTERM with new clients still accepted, while /health answers with status 503
    ///
    /// A Service stops sending clients here within this time. Streams then have 20 s to end: give terminationGracePeriodSeconds more than
    /// both.
    #[arg(long, env = "PILLION_DRAIN_TIME", default_value = "5s", value_name = "TIME")]
    pub drain_time: Time,
    /// Memory for bodies of requests whose answers have not begun
    ///
    /// Requests beyond it are refused with status 503. One client, by its address, has half of it: all clients behind a proxy are one.
    #[arg(long, env = "PILLION_REQUEST_MEMORY", default_value = "128MiB", value_name = "SIZE")]
    pub request_memory: Size,
    /// Write a line for each request to standard output, as --log-format says
    ///
    /// A line has no query or body. Unread lines are dropped.
    #[arg(long, env = "PILLION_ACCESS_LOG", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "true|false")]
    pub access_log: bool,
    /// A PEM file of the authorities behind the certificates of engines with https://HOST:PORT
    ///
    /// A certificate must carry the URL's host, and the engine speak TLS 1.3. The router reads the file again like --engines.
    #[arg(long, env = "PILLION_ENGINE_CA", value_name = "FILE")]
    pub engine_ca: Option<PathBuf>,
    /// The router's certificate and the chain to its authority, in PEM: clients then speak TLS 1.3
    ///
    /// The router reads it and --tls-key again like --engines. Files that are no pair change nothing, and the log says so.
    #[arg(long, env = "PILLION_TLS_CERT", requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, in PEM
    #[arg(long, env = "PILLION_TLS_KEY", requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Least severe messages: error, warn, info or debug
    #[arg(long, env = "PILLION_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    pub log_level: Severity,
    /// How log lines are written: text, or json for one object a line
    #[arg(long, env = "PILLION_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// The time at which the decode engine is asked.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub enum AskOrder {
    /// Together with the prefill engine if that has no other work, so that the prompt does not wait its turn;
    /// otherwise, and for a very long prompt, after the prefill engine computed it.
    ByLoad,
    /// After the prompt is computed: the decode engine holds no memory for a prompt that waits its turn at
    /// the prefill engine.
    PrefillFirst,
    /// Together with the prefill engine: the decode engine waits meanwhile, for 30 s at most.
    AtOnce,
}

/// The state of one router.
#[derive(Debug)]
struct Router {
    prefill: RouteEngines,
    decode: RouteEngines,
    options: RouteOptions,
    tls: RouteTls,
    counters: RouteCounters,
    access: Option<AccessLog>,
    /// The mesh that the router follows.
    observer: Option<Observer>,
    terms: TermsAsked,
    token_bytes: TokenBytes,
    memory: Arc<BodyMemory>,
    /// Long bodies are read one by one: the reader of a body may copy its longest name.
    long_bodies: Semaphore,
    /// Time of the last log line about a body without room.
    refusal_logged: Mutex<Option<Instant>>,
    /// Set after SIGTERM.
    is_draining: AtomicBool,
}

// === impl Router ===

impl Router {
    fn new(options: RouteOptions) -> anyhow::Result<(Self, Option<Writer>)> {
        let tls = RouteTls::from_options(&options).map_err(anyhow::Error::msg)?;
        let observer = options.follow.has_mesh().then(|| Observer::new(tls.engines.is_some()));
        let engines = |role| RouteEngines::new(role, tls.engines.clone());
        let (prefill, decode) = (engines(EngineRole::Prefill), engines(EngineRole::Decode));
        let (terms, token_bytes) = (TermsAsked::default(), TokenBytes::default());
        let (memory, long_bodies) = (BodyMemory::new(options.request_memory.as_bytes()), Semaphore::new(1));
        let (counters, refusal_logged) = (RouteCounters::new()?, Mutex::default());
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
            observer,
            terms,
            token_bytes,
            memory,
            long_bodies,
            refusal_logged,
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
            make_answer(StatusCode::OK, "text/plain; version=0.0.4", page)
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
        let target = RequestTarget::of_request(&head.method, &path);
        if let RequestTarget::Nowhere(reason) = target {
            self.count_way(&noted, REFUSED);
            noted.note_failure(reason);
            return make_failure(StatusCode::NOT_IMPLEMENTED, reason);
        }
        let (body, room) = match intake::read_body(body, self.memory.room(client)).await {
            Ok(read) => read,
            Err(unread) => {
                self.refused(&unread);
                noted.note_failure(unread.why());
                return unread.to_response();
            }
        };
        noted.notes().request_bytes = body.len() as u64;
        let (breaks, room) = (Arc::default(), Some(Arc::new(room)));
        let trail = match &target {
            RequestTarget::Stored(id) => Trail::bound(prompt::response_hash(id)),
            _ => Trail::default(),
        };
        let (payload, trail) = (Payload::default(), Arc::new(trail));
        let (method, headers) = (head.method, head.headers);
        let asked = RouteRequest {
            method,
            path,
            target,
            headers,
            body: payload,
            trail,
            alone: None,
            passed: None,
            breaks,
            noted: Arc::clone(&noted),
            _room: room,
        };
        let parsed = if body.len() < LONG_BYTES {
            asked.parse_body(body)
        } else {
            let _turn = self.long_bodies.acquire().await;
            tokio::task::spawn_blocking(|| asked.parse_body(body)).await.expect("no body lets it panic")
        };
        match parsed {
            Ok((asked, Some(prompt))) => {
                let asked = self.locate(asked, &prompt).await;
                self.route(&asked, &prompt).await
            }
            Ok((asked, None)) => self.pass(asked).await,
            Err(text) => {
                noted.note_failure("the body is no JSON");
                make_failure(StatusCode::BAD_REQUEST, &text)
            }
        }
    }

    /// Answers a request without a prompt: by the engine with its stored response, by all engines, or by any
    /// engine.
    async fn pass(&self, asked: RouteRequest) -> Response<Answer> {
        match asked.target {
            RequestTarget::Everywhere => {
                self.count_way(&asked.noted, EVERYWHERE);
                return self.tell_everywhere(&asked).await;
            }
            RequestTarget::Stored(_) => self.count_way(&asked.noted, Whole::Stored.name()),
            _ => self.count_way(&asked.noted, OTHER),
        }
        self.answer_once(asked).await
    }

    /// Counts a request by where it goes.
    fn count_way(&self, noted: &Noted, way: &'static str) {
        self.counters.request(way);
        noted.notes().way = Some(way);
    }

    /// Counts a request with an unread body.
    fn refused(&self, unread: &UnreadBody) {
        let Some(reason) = unread.label() else { return };
        self.counters.refused.with_label_values(&[reason]).inc();
        if !matches!(unread, UnreadBody::NoRoom | UnreadBody::ClientFull) {
            return;
        }
        let (now, mut reported) =
            (Instant::now(), self.refusal_logged.lock().unwrap_or_else(PoisonError::into_inner));
        if reported.is_none_or(|at| now >= at + REFUSAL_PAUSE) {
            *reported = Some(now);
            tracing::warn!(
                "requests are refused, since bodies take all of --request-memory, or those of one client half of it; give it more"
            );
        }
    }

    /// The page of metrics, with all engines of this moment.
    fn page(&self) -> String {
        let engines = [&self.prefill, &self.decode].map(|engines| engines.gather(Instant::now()));
        let members = self.observer.as_ref().map_or(0, |observer| observer.members().count_members());
        show_gauge(&self.counters.members, members as u64);
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
        make_answer(status, "application/json", counts.to_string())
    }

    /// Asks a decode engine. Returns its answer, and the engine if it gave the prompt up. `computing` lives
    /// until the answer is read.
    async fn open_answer(
        &self,
        spared: Option<&RouteEngine>,
        asked: RouteRequest,
        computing: Option<Computing>,
    ) -> (Response<Answer>, Option<Arc<RouteEngine>>) {
        let passed = asked.passed;
        match self.send_to_engine(spared, asked).await {
            Ok((opened, share)) => {
                let given_up = opened.given_up.then(|| Arc::clone(&share.engine));
                if given_up.is_none() && opened.status().is_success() {
                    computing.iter().for_each(|computing| computing.answer_began(&share.engine, &opened));
                }
                (passing::pass_answer(opened, share, computing, passed).await, given_up)
            }
            Err(failure) => (failure, None),
        }
    }

    /// Returns the answer of one decode engine, with any status.
    async fn answer_once(&self, asked: RouteRequest) -> Response<Answer> {
        self.open_answer(None, asked, None).await.0
    }

    /// Asks decode engines in the order of [`RouteRouteEngines::ranked`], until one begins to answer. Fails with the
    /// answer for the client if no engine does. A prompt may be the cause of engines' ends: after two engines
    /// broke off on it, no other engine is asked.
    async fn send_to_engine(
        &self,
        spared: Option<&RouteEngine>,
        asked: RouteRequest,
    ) -> Result<(OpenedAnswer, LoadShare), Response<Answer>> {
        let (mut problems, mut status) = (Vec::new(), StatusCode::BAD_GATEWAY);
        let breaks_max = u32::from(asked.api().is_some());
        let mut ranked = self.decode.ranked_for(&asked, spared, Instant::now()).into_iter().peekable();
        if ranked.peek().is_none() {
            problems.push(
                "no name of an engine has an address; the log names those that were not resolved".into(),
            );
        }
        while let Some(engine) = ranked.next() {
            if asked.breaks.break_count() > breaks_max {
                problems.push("engines broke off on it, so no other one is asked".into());
                break;
            }
            let mut share = self.decode.add_request(&engine, &asked, Instant::now());
            asked.noted.notes().decode = Some(engine.address.to_string());
            if !asked.trail.is_bound {
                self.decode.note_prompt(&asked.trail, &engine, Instant::now());
            }
            let opened = engine.forwarder.open_answer(asked.clone());
            // The last engine is waited for without a look at its health: a stopped engine may go on.
            let answer = match ranked.peek() {
                Some(_) => watch::await_living(&engine, opened).await,
                None => opened.await,
            };
            asked.breaks.count_break(&answer);
            share.note_answer(code_of(answer.as_ref().map(OpenedAnswer::status)));
            let is_shown = answer.as_ref().is_ok_and(OpenedAnswer::is_begun_stream);
            share.end_prompt(asked.alone, is_shown, self.options.min_remote_tokens);
            let error = match answer {
                // The engine is up, and its queue is full: vLLM limits it.
                Ok(opened)
                    if opened.status() == StatusCode::SERVICE_UNAVAILABLE && ranked.peek().is_some() =>
                {
                    engine.set_up();
                    status = StatusCode::SERVICE_UNAVAILABLE;
                    ForwardError::Status(status)
                }
                // Another engine may have stored the response: the router does not know which.
                Ok(opened)
                    if matches!(asked.target, RequestTarget::Stored(_))
                        && opened.status() == StatusCode::NOT_FOUND
                        && ranked.peek().is_some() =>
                {
                    ForwardError::Status(opened.status())
                }
                Ok(opened) => {
                    engine.set_up();
                    if asked.api().is_some() && opened.status().is_success() && !opened.given_up {
                        self.decode.note_answered(&asked.trail, &engine);
                    }
                    if asked.api() == Some(Api::Responses)
                        && let Some(id) = opened.response_id()
                    {
                        self.decode.bind(prompt::response_hash(&id), &engine);
                    }
                    return Ok((opened, share));
                }
                // Nothing of an answer was sent to the client. The router hangs up on a hung engine.
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
        asked.noted.note_failure(text.as_str());
        Err(make_failure(status, &text))
    }
}
