//! `/healthz`, `/readyz`, `/metrics` and the page `/` for people. Their thread only reads atomics, so they
//! answer even if the data thread is stuck.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::{Gauge, Registry, TextEncoder};

use crate::pages::connections::{self, Connections};
use crate::pages::heartbeat::Heartbeat;
use crate::pages::overview::{self, Overview, Samples};
use crate::pages::progress::StartProgress;
use crate::system::clock;

/// Connections served at once: a scraper, two probes, a person. A further one replaces the oldest without a
/// request.
const CONNECTIONS_MAX: usize = 64;
/// Limit for the request line and headers, which usually come in one packet.
const HEADER_TIME_MAX: Duration = Duration::from_secs(5);
/// Limit of a connection: a probe must not wait long for its turn.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);

/// True while the sidecar accepts work: set by the server, read by `/readyz`.
pub type Ready = Arc<AtomicBool>;

/// The sources of the pages.
#[derive(Clone, Debug)]
pub struct AdminPages {
    pub registry: Registry,
    pub ready: Ready,
    /// The control socket, named in the answer to `/namespaces`.
    pub control_socket: PathBuf,
    /// Progress of a slow start, shown by `/readyz`.
    pub progress: Arc<StartProgress>,
    /// For `/healthz` and `/readyz`.
    pub heartbeat: Heartbeat,
    /// The time of the last turn, for `/metrics`.
    pub last_turn: Gauge,
}

/// Binds `address` and serves it until the process ends. Returns the bound address.
pub fn start_pages(address: SocketAddr, pages: AdminPages) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let bound = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    thread::Builder::new()
        .name("pillion-admin".into())
        .spawn(move || runtime.block_on(serve_pages(listener, pages)))?;
    Ok(bound)
}

/// Registers the metric of the data thread's last turn.
pub fn last_turn(registry: &Registry) -> Result<Gauge, prometheus::Error> {
    let help =
        "Time at which the data thread last began a turn, in seconds since 1970; 0 before the first turn.";
    let gauge = Gauge::new("pillion_last_turn_timestamp_seconds", help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

async fn serve_pages(listener: TcpListener, pages: AdminPages) {
    let listener =
        tokio::net::TcpListener::from_std(listener).expect("a non-blocking listener of this process");
    let connections = Connections::new(CONNECTIONS_MAX);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // The process has no descriptors left: a pause keeps the loop from spinning.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some(admitted) = connections.admit() else { continue };
        let (pages, closing) = (pages.clone(), admitted.closing());
        tokio::spawn(async move {
            let service = service_fn(|request| {
                admitted.set_busy();
                let response = pages.answer_request(&request);
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .keep_alive(false)
                .header_read_timeout(HEADER_TIME_MAX)
                .serve_connection(TokioIo::new(stream), service);
            // A client may close its connection early.
            let served = connections::run_until(connection, closing);
            let _ = tokio::time::timeout(CONNECTION_TIME_MAX, served).await;
        });
    }
}

// === impl AdminPages ===

impl AdminPages {
    fn answer_request(&self, request: &Request<Incoming>) -> Response<String> {
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return page(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n".into());
        }
        match request.uri().path() {
            "/healthz" => {
                self.heartbeat.unhealthy().map_or_else(|| page(StatusCode::OK, "alive\n".into()), unavailable)
            }
            "/readyz" if !self.ready.load(Ordering::Relaxed) => unavailable("starting or draining\n".into()),
            "/readyz" => {
                self.heartbeat.unready().map_or_else(|| page(StatusCode::OK, self.readiness()), unavailable)
            }
            "/metrics" => self.metrics(),
            "/namespaces" => {
                let socket = self.control_socket.display();
                page(StatusCode::GONE, format!("run pillion ctl --control-socket {socket} namespaces\n"))
            }
            "/" => self.overview(),
            _ => page(StatusCode::NOT_FOUND, "the pages are /, /healthz, /readyz and /metrics\n".into()),
        }
    }

    fn metrics(&self) -> Response<String> {
        match self.samples() {
            Ok(text) => page(StatusCode::OK, text),
            Err(error) => page(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }

    fn samples(&self) -> Result<String, prometheus::Error> {
        self.show_last_turn();
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// The page for people. It loads nothing else: its policy forbids all sources.
    fn overview(&self) -> Response<String> {
        let samples = Samples::parse_text(&self.samples().unwrap_or_default());
        let ready = match self.ready.load(Ordering::Relaxed) {
            true => self.heartbeat.unready().unwrap_or_else(|| self.readiness()),
            false => "starting or draining".into(),
        };
        let overview = Overview::new(&samples, None, clock::since_1970());
        let response = Response::builder()
            .header("content-type", "text/html; charset=utf-8")
            .header("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'");
        response.body(overview::render_page(&overview, ready.trim_end())).expect("constant headers")
    }

    /// Updates the metric: seconds since 1970; 0 before the first turn.
    fn show_last_turn(&self) {
        let turn = self.heartbeat.age().map(|age| clock::since_1970().saturating_sub(age));
        self.last_turn.set(turn.unwrap_or_default().as_secs_f64());
    }

    /// The text of `/readyz` once engines are served, with the progress of an unfinished start.
    fn readiness(&self) -> String {
        self.progress
            .progress_text()
            .map_or_else(|| "ready\n".into(), |progress| format!("ready\n{progress}\n"))
    }
}

fn unavailable(text: String) -> Response<String> {
    page(StatusCode::SERVICE_UNAVAILABLE, text)
}

fn page(status: StatusCode, text: String) -> Response<String> {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let response = Response::builder().status(status).header("content-type", kind);
    response.body(text).expect("constant headers")
}
