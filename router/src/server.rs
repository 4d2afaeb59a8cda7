//! The router as an HTTP server: the connections and bodies of its clients, and the router's own answers.

use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use rustix::process::{Resource, getrlimit};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::sync::watch::{Receiver, channel};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::access::{AccessEntry, Writer};
use super::counters::CONNECTIONS;
use super::forward::Answer;
use super::refresh::Refresher;
use super::tls::TowardsClients;
use super::{REQUEST_ID, RouteOptions, Router, connector};
use sidecar::clients::listener;
use sidecar::pages::connections::{Admitted, Connections, run_until};

/// The longest time for a request's head, which comes in one packet: the router hangs up on a slower client.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// The time of a new connection for its first request, once the router ends.
const FIRST_REQUEST_TIME_MAX: Duration = Duration::from_secs(2);
/// The most bytes of a request's head, and of a body read at once.
const BUFFER_BYTES: usize = 64 << 10;
/// Descriptors kept for the runtime, the log, signals and lookups of names.
const OWN_DESCRIPTORS: usize = 64;
/// The most clients at once: each takes some 10 KiB.
const CLIENTS_MAX: usize = 65_536;
/// The shortest interval of lookups, to spare name servers.
const REFRESH_MS_MIN: u64 = 1000;
/// The router hangs up on a client that confirms no data for this long, since its host vanished or it reads
/// nothing. A stream always has data to confirm, and the kernel alone would wait 15 minutes.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Accepts clients.
struct Clients {
    router: Arc<Router>,
    connections: Arc<Connections>,
    ended: Receiver<()>,
}

/// A client's connection, and its place among all.
struct ClientConnection {
    stream: TcpStream,
    address: IpAddr,
    admitted: Arc<Admitted>,
}

/// A request under way, until its answer is over.
struct Busy(Arc<Admitted>);

/// An answer's body; the request is under way until it is dropped.
struct Answered {
    body: Answer,
    _busy: Busy,
    entry: Option<AccessEntry>,
}

/// Serves clients until `end`, then for `--drain-time`, then until the last answer has ended, for `grace` at
/// most. Each `reload` has files read and names looked up again.
pub fn serve_router(
    options: RouteOptions,
    reload: Arc<Notify>,
    end: impl Future<Output = ()> + 'static,
    grace: Duration,
) -> anyhow::Result<()> {
    let interval = options.refresh_interval;
    anyhow::ensure!(
        interval.as_millis() >= REFRESH_MS_MIN,
        "--refresh-interval is {interval}; give 1s or more"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let listener = TcpListener::bind(options.listen.0).map_err(|error| {
        anyhow::anyhow!("cannot listen on {}: {error}; give another --listen", options.listen.0)
    })?;
    listener.set_nonblocking(true)?;
    keep_alive(&listener)?;
    let bound = listener.local_addr()?;
    let (router, writer) = Router::new(options)?;
    let router = Arc::new(router);
    tracing::info!(%bound, order = ?router.options.order, "routing");
    listener::raise_descriptor_limit();
    let connections = Connections::new(clients_max(getrlimit(Resource::Nofile).current));
    let mut refresher = Refresher::new(Arc::clone(&router)).map_err(anyhow::Error::msg)?;
    let observer = router.observer.as_ref();
    let control = observer.map(|observer| observer.start_control(&router.options.follow)).transpose()?;
    let served = runtime.block_on(async move {
        refresher.resolve().await;
        tokio::spawn(refresher.refresh_forever(reload));
        if let (Some(observer), Some(control)) = (router.observer.clone(), control) {
            tokio::spawn(async move { observer.attend_members(control).await });
        }
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let drain_time = Duration::from_millis(router.options.drain_time.as_millis());
        // Every connection has a receiver.
        let (ending, ended) = channel(());
        let clients = Clients { router: Arc::clone(&router), connections, ended };
        {
            let mut accepting = pin!(clients.accept_all(&listener));
            run_until(accepting.as_mut(), end).await;
            router.is_draining.store(true, Ordering::Relaxed);
            tracing::info!(
                ?drain_time,
                "draining: /health answers 503, and clients are accepted for a while"
            );
            run_until(accepting, tokio::time::sleep(drain_time)).await;
        }
        clients.accept_rest(listener)?;
        let _ = ending.send(());
        let _ = timeout(grace, ending.closed()).await;
        Ok(())
    });
    // Requests under way end here, and leave their lines. A lookup of a name may still wait for a name server.
    runtime.shutdown_background();
    writer.into_iter().for_each(Writer::wait_written);
    served
}

/// Gives a request an id, for engines and the access log.
fn give_id(headers: &mut HeaderMap) {
    if !headers.contains_key(REQUEST_ID) {
        let made = format!("{:016x}", RandomState::new().build_hasher().finish());
        headers.insert(REQUEST_ID, made.parse().expect("hex digits"));
    }
}

/// The most clients of a process with so many descriptors: each client may need two engines.
fn clients_max(descriptors: Option<u64>) -> usize {
    let descriptors = usize::try_from(descriptors.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    (descriptors.saturating_sub(OWN_DESCRIPTORS) / 3).clamp(1, CLIENTS_MAX)
}

/// Ends connections of this listener to vanished hosts: such a host sends nothing. Connections inherit the
/// options of their listener.
fn keep_alive(listener: &TcpListener) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, connector::KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(listener, connector::KEEPALIVE_INTERVAL)?;
    // The longest time without a confirmation, also of probes: with it the kernel does not count probes.
    Ok(sockopt::set_tcp_user_timeout(listener, SILENCE_MAX.as_millis() as u32)?)
}

// === impl Clients ===

impl Clients {
    /// Accepts all clients, without an end.
    async fn accept_all(&self, listener: &tokio::net::TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, client)) => self.admit_client(stream, client),
                // Out of descriptors: the next attempt must not spin.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Accepts the clients in the queue, and closes it: the kernel refuses later ones, and they may ask another router.
    fn accept_rest(self, listener: tokio::net::TcpListener) -> std::io::Result<()> {
        let listener = listener.into_std()?;
        loop {
            match listener.accept() {
                Ok((stream, client)) => {
                    stream.set_nonblocking(true)?;
                    self.admit_client(TcpStream::from_std(stream)?, client);
                }
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(_) => return Ok(()),
            }
        }
    }

    fn admit_client(&self, stream: TcpStream, client: SocketAddr) {
        match self.connections.admit() {
            Some(admitted) => {
                let client = ClientConnection { stream, address: client.ip(), admitted: Arc::new(admitted) };
                tokio::spawn(client.serve_requests(Arc::clone(&self.router), self.ended.clone()));
            }
            None => self.router.counters.refused.with_label_values(&[CONNECTIONS]).inc(),
        }
    }
}

// === impl ClientConnection ===

impl ClientConnection {
    /// Serves the client until it leaves, or after the router has `ended` until its answer is over. It hangs up on a client without a TLS
    /// session in time, and on one to make room for another.
    async fn serve_requests(self, router: Arc<Router>, ended: Receiver<()>) {
        let Self { stream, address, admitted } = self;
        let _ = stream.set_nodelay(true);
        let closing = admitted.closing();
        let serving = async {
            match router.tls.clients.clone() {
                None => converse(stream, address, admitted, router, ended).await,
                Some(tls) => {
                    if let Some(stream) = greet(stream, &tls, ended.clone()).await {
                        converse(stream, address, admitted, router, ended).await;
                    }
                }
            }
        };
        run_until(serving, closing).await;
    }
}

/// The TLS session of a client; `None` if there is none in time.
async fn greet(
    stream: TcpStream,
    tls: &TowardsClients,
    mut ended: Receiver<()>,
) -> Option<TlsStream<TcpStream>> {
    let greeting = timeout(HEADER_TIME_MAX, TlsAcceptor::from(tls.current()).accept(stream));
    run_until(greeting, ending(&mut ended, &AtomicBool::new(false))).await?.ok()?.ok()
}

/// Answers the requests of one connection.
async fn converse<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    address: IpAddr,
    admitted: Arc<Admitted>,
    router: Arc<Router>,
    mut ended: Receiver<()>,
) {
    let has_asked = AtomicBool::new(false);
    let service = service_fn(|mut request| {
        has_asked.store(true, Ordering::Relaxed);
        let (router, busy) = (Arc::clone(&router), Busy::mark_busy(&admitted));
        give_id(request.headers_mut());
        let (own, noted) = (router.own_page(&request), Arc::default());
        let log = router.access.as_ref().filter(|_| own.is_none());
        let mut entry = log.map(|log| log.begin_line(&request, address, &noted));
        async move {
            let mut answer = match own {
                Some(own) => own.await,
                None => Arc::clone(&router).respond(request, address, noted).await,
            };
            if router.is_draining() {
                // The client's next request goes to another router, and this connection ends.
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            entry.iter_mut().for_each(|entry| entry.answered(&answer));
            Ok::<_, Infallible>(answer.map(|body| Answered { body, _busy: busy, entry }))
        }
    });
    // The request of a client that left early is dropped here, and with it the requests to its engines.
    let mut serving = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIME_MAX)
            .max_buf_size(BUFFER_BYTES)
            .serve_connection(TokioIo::new(stream), service)
    );
    if run_until(serving.as_mut(), ending(&mut ended, &has_asked)).await.is_none() {
        serving.as_mut().graceful_shutdown();
        let _ = serving.await;
    }
}

/// Ends with the router, which waits for every receiver to be dropped. A client without a request yet may be about to send one, and has [`FIRST_REQUEST_TIME_MAX`] for it.
async fn ending(ended: &mut Receiver<()>, has_asked: &AtomicBool) {
    _ = ended.changed().await;
    if !has_asked.load(Ordering::Relaxed) {
        tokio::time::sleep(FIRST_REQUEST_TIME_MAX).await;
    }
}

// === impl Busy ===

impl Busy {
    fn mark_busy(admitted: &Arc<Admitted>) -> Self {
        admitted.set_busy();
        Self(Arc::clone(admitted))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_idle();
    }
}

// === impl Answered ===

impl Body for Answered {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { body, entry, .. } = &mut *self;
        let polled = Pin::new(&mut *body).poll_frame(context);
        if let Some(entry) = entry {
            match &polled {
                Poll::Ready(Some(Ok(frame))) => {
                    entry.passed(frame.data_ref().map_or(0, Bytes::len), body.is_end_stream())
                }
                Poll::Ready(Some(Err(error))) => entry.end_body(Some(error)),
                Poll::Ready(None) => entry.end_body(None),
                Poll::Pending => {}
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pub(super) fn make_answer(status: StatusCode, content: &'static str, text: String) -> Response<Answer> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
    response
}

/// An error in the form of vLLM's own server.
pub(super) fn make_failure(status: StatusCode, text: &str) -> Response<Answer> {
    let error = json!({ "error": { "message": text, "type": "pillion_route", "param": null, "code": status.as_u16() } });
    make_answer(status, "application/json", error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;
    use crate::intake::UnreadBody;
    use crate::tls::tests::issued;

    #[test]
    fn what_is_refused_is_counted_by_its_reason() {
        let arguments = ["route", "--prefill=http://p:1", "--decode=http://d:1"];
        let matches = RouteOptions::augment_args(Command::new("route")).get_matches_from(arguments);
        let (router, _) = Router::new(RouteOptions::from_arg_matches(&matches).unwrap()).unwrap();
        let count = |reason| router.counters.refused.with_label_values(&[reason]).get();
        for reason in ["memory", "client", "slow", "connections"] {
            let line = format!("pillion_route_requests_refused_total{{reason=\"{reason}\"}} 0\n");
            assert!(router.page().contains(&line), "there from the start: {line}");
        }
        for unread in [
            UnreadBody::Stalled,
            UnreadBody::Stalled,
            UnreadBody::NoRoom,
            UnreadBody::ClientFull,
            UnreadBody::Broken(String::new()),
        ] {
            router.refused(&unread);
        }
        assert_eq!(
            (count("memory"), count("client"), count("slow")),
            (1, 1, 2),
            "a client that breaks off is not refused"
        );
    }

    #[test]
    fn connections_are_asked_for_signs_of_life_as_their_listener_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        keep_alive(&listener).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), connector::KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), connector::KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), SILENCE_MAX.as_millis() as u32);
    }

    #[test]
    fn a_client_without_a_tls_session_is_hung_up_on() {
        let folder = tempfile::tempdir().unwrap();
        let tls = issued(folder.path());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let silent = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let (_ending, ended) = channel(());
            let begun = tokio::time::Instant::now();
            assert!(greet(stream, &tls, ended).await.is_none());
            assert_eq!(begun.elapsed(), HEADER_TIME_MAX);
            drop(silent);
        });
    }

    #[test]
    fn engines_have_descriptors_whatever_clients_take() {
        assert_eq!([Some(1024), Some(64), None].map(clients_max), [320, 1, CLIENTS_MAX]);
    }
}
