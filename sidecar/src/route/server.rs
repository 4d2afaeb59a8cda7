//! The router as an HTTP server: its clients' connections, the bodies they send, and answers that are the router's own.

use std::convert::Infallible;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use serde_json::json;
use tokio::sync::watch::{Receiver, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::counters::{MEMORY, SLOW};
use super::forward::{self, Answer};
use super::{Options, Router, watch};

/// The longest request: a million tokens as JSON, several times.
const REQUEST_BYTES_MAX: usize = 64 << 20;
/// A request line and headers come in one packet; who takes longer is not served.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// Nor is who sends nothing of its body for so long, or less than this of it a second behind that time: it holds a part of the memory for
/// bodies.
const PART_TIME_MAX: Duration = Duration::from_secs(30);
const BYTES_PER_SECOND_MIN: usize = 32 << 10;
/// A client that confirms nothing for so long, since its host vanished or it reads nothing, is hung up on. While a stream goes on there
/// is always something to confirm, for which the kernel would wait 15 minutes.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Why there is no body.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Unread {
    Stalled,
    Broken(String),
    /// Bodies of requests take all of `--request-memory`.
    NoRoom,
}

/// Runs until the process is told to end; then ends once the last answer has, or `grace` later.
pub fn serve(
    options: Options,
    end: impl Future<Output = ()> + 'static,
    grace: Duration,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let listener = TcpListener::bind(options.listen.0).map_err(|error| {
        anyhow::anyhow!("cannot listen on {}: {error}; give another --listen", options.listen.0)
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
                        tokio::spawn(connection(Arc::clone(&router), stream, ended.clone()));
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
        let _ = timeout(grace, ending.closed()).await;
        Ok(())
    })
}

/// A client whose host vanishes says nothing: the connections of this listener, which are as it is, end then.
fn keep_alive(listener: &TcpListener) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, forward::KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(listener, forward::KEEPALIVE_INTERVAL)?;
    // How long nothing is confirmed, also of probes: their number does not count then.
    Ok(sockopt::set_tcp_user_timeout(listener, SILENCE_MAX.as_millis() as u32)?)
}

/// Serves a client until it goes, or once the router is `ended` until the answer under way is over.
async fn connection(router: Arc<Router>, stream: tokio::net::TcpStream, mut ended: Receiver<()>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let router = Arc::clone(&router);
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

/// All of a request's body, and its room in this memory. Something of it comes within each `PART_TIME_MAX`, and after the first one
/// `BYTES_PER_SECOND_MIN` each second.
pub(super) async fn read<B>(body: B, memory: &Arc<Semaphore>) -> Result<(Bytes, OwnedSemaphorePermit), Unread>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Unpin,
{
    let mut body = Limited::new(body, REQUEST_BYTES_MAX);
    let take = |bytes| Arc::clone(memory).try_acquire_many_owned(bytes as u32).map_err(|_| Unread::NoRoom);
    let (mut whole, mut room) = (Vec::new(), take(0)?);
    let begin = Instant::now();
    let end = |bytes: usize| {
        let sent = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND_MIN as f64);
        (begin + sent).min(Instant::now()) + PART_TIME_MAX
    };
    while let Some(frame) = timeout_at(end(whole.len()), body.frame()).await.map_err(|_| Unread::Stalled)? {
        let frame = frame.map_err(|error| Unread::Broken(error.to_string()))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        room.merge(take(data.len())?);
        whole.extend_from_slice(data);
    }
    Ok((whole.into(), room))
}

// === impl Unread ===

impl Unread {
    /// The label of metrics; none where the client broke off, or sent more than a request may have.
    pub(super) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Stalled => Some(SLOW),
            Self::Broken(_) => None,
            Self::NoRoom => Some(MEMORY),
        }
    }

    /// What the client is told.
    pub(super) fn told(&self) -> Response<Answer> {
        let (status, text) = match self {
            Self::Stalled => {
                let (pause, rate) = (PART_TIME_MAX.as_secs(), BYTES_PER_SECOND_MIN >> 10);
                let text = format!(
                    "the body came too slowly: send a part each {pause} s, and {rate} KiB a second after {pause} s"
                );
                (StatusCode::REQUEST_TIMEOUT, text)
            }
            Self::Broken(error) => {
                let text =
                    format!("the request cannot be read: {error}; it may have {REQUEST_BYTES_MAX} bytes");
                (StatusCode::BAD_REQUEST, text)
            }
            Self::NoRoom => {
                let text =
                    "requests take all of the router's --request-memory; ask again later, or give it more";
                (StatusCode::SERVICE_UNAVAILABLE, text.into())
            }
        };
        failure(status, &text)
    }
}

pub(super) fn plain(status: StatusCode, content: &'static str, text: String) -> Response<Answer> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
    response
}

/// As vLLM's own server says that something is wrong.
pub(super) fn failure(status: StatusCode, text: &str) -> Response<Answer> {
    let error = json!({ "error": { "message": text, "type": "pillion_route", "param": null, "code": status.as_u16() } });
    plain(status, "application/json", error.to_string())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use clap::{Args, Command, FromArgMatches};
    use hyper::body::Frame;
    use tokio::time::{Sleep, sleep};

    use super::*;
    use crate::route::lead::tests::Stalled;

    /// A body of `parts` parts, each of `bytes` bytes, of which one comes each second.
    struct Trickle {
        parts: u32,
        bytes: usize,
        next: Pin<Box<Sleep>>,
    }

    impl Body for Trickle {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.parts == 0 {
                return Poll::Ready(None);
            }
            if self.next.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.parts -= 1;
            self.next = Box::pin(sleep(Duration::from_secs(1)));
            Poll::Ready(Some(Ok(Frame::data(vec![b'a'; self.bytes].into()))))
        }
    }

    /// A runtime whose clock goes on to the next deadline at once.
    fn paused() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
    }

    #[test]
    fn a_body_that_comes_too_slowly_is_not_waited_for_and_one_by_a_slow_link_is() {
        let memory = Arc::new(Semaphore::new(REQUEST_BYTES_MAX));
        let read_of = |bytes| {
            paused().block_on(async {
                let body = Trickle { parts: 100, bytes, next: Box::pin(sleep(Duration::ZERO)) };
                read(body, &memory).await.map(|(whole, _)| whole.len())
            })
        };
        assert_eq!(read_of(1), Err(Unread::Stalled));
        assert_eq!(read_of(125_000), Ok(12_500_000), "images by 1 Mbit/s");
    }

    #[test]
    fn a_body_of_which_nothing_comes_is_not_waited_for() {
        let body = Full::new(Bytes::from_static(b"whole"));
        let memory = Arc::new(Semaphore::new(9));
        let (whole, room) = paused().block_on(read(body, &memory)).unwrap();
        assert_eq!((&whole[..], memory.available_permits()), (&b"whole"[..], 4));
        let begun = || Stalled([Bytes::from_static(b"a part")].into());
        let none = paused().block_on(read(begun(), &memory)).unwrap_err();
        assert_eq!(none, Unread::NoRoom);
        drop(room);
        let none = paused().block_on(read(begun(), &memory)).unwrap_err();
        assert_eq!((none, memory.available_permits()), (Unread::Stalled, 9));
    }

    #[test]
    fn what_is_refused_is_counted_by_its_reason() {
        let arguments = ["route", "--prefill=http://p:1", "--decode=http://d:1"];
        let matches = Options::augment_args(Command::new("route")).get_matches_from(arguments);
        let router = Router::new(Options::from_arg_matches(&matches).unwrap()).unwrap();
        let count = |reason| router.counters.refused.with_label_values(&[reason]).get();
        for reason in ["memory", "slow"] {
            let line = format!("pillion_route_requests_refused_total{{reason=\"{reason}\"}} 0\n");
            assert!(router.counters.page().contains(&line), "there from the start: {line}");
        }
        for unread in [Unread::Stalled, Unread::Stalled, Unread::NoRoom, Unread::Broken(String::new())] {
            router.refused(&unread);
        }
        assert_eq!((count("memory"), count("slow")), (1, 2), "a client that breaks off is not refused");
    }

    #[test]
    fn connections_are_asked_for_signs_of_life_as_their_listener_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        keep_alive(&listener).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), forward::KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), forward::KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), SILENCE_MAX.as_millis() as u32);
    }
}
