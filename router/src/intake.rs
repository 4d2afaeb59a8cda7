//! Bodies of requests as they arrive: their lowest speed, and their memory, of one client and of all.

use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes};
use hyper::{Response, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::counters::{CLIENT, MEMORY, SLOW};
use super::forward::Answer;
use super::memory::{BodyRoom, Full};
use super::server::make_failure;

/// The longest request: a million tokens as JSON, several times.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 20;
/// A client is refused after no byte of its body came for this long, or if it sends slower than
/// `BYTES_PER_SECOND_MIN` behind that time: the body holds a part of the memory for bodies.
const PART_TIME_MAX: Duration = Duration::from_secs(30);
const BYTES_PER_SECOND_MIN: usize = 32 << 10;
/// The first room for a body of a stated length, at most.
const FIRST_BYTES_MAX: u64 = 1 << 20;

/// Reason of an unread body.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum UnreadBody {
    Stalled,
    Broken(String),
    /// Bodies of requests take all of `--request-memory`.
    NoRoom,
    /// Bodies of this client take its half.
    ClientFull,
}

/// Reads a request's whole body. A part must come within each `PART_TIME_MAX`, and after the first one
/// `BYTES_PER_SECOND_MIN` each second.
pub(super) async fn read_body<B>(body: B, mut room: BodyRoom) -> Result<(Bytes, BodyRoom), UnreadBody>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Unpin,
{
    let first = body.size_hint().lower().min(FIRST_BYTES_MAX);
    let mut body = Limited::new(body, REQUEST_BYTES_MAX);
    let mut whole = Vec::with_capacity(first as usize);
    let begin = Instant::now();
    let end = |bytes: usize| {
        let sent = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND_MIN as f64);
        (begin + sent).min(Instant::now()) + PART_TIME_MAX
    };
    while let Some(frame) =
        timeout_at(end(whole.len()), body.frame()).await.map_err(|_| UnreadBody::Stalled)?
    {
        let frame = frame.map_err(|error| UnreadBody::Broken(error.to_string()))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        room.grow(data.len()).map_err(|full| match full {
            Full::All => UnreadBody::NoRoom,
            Full::Client => UnreadBody::ClientFull,
        })?;
        whole.extend_from_slice(data);
    }
    whole.shrink_to_fit();
    Ok((whole.into(), room))
}

// === impl UnreadBody ===

impl UnreadBody {
    /// The label of metrics; none if the client broke off, or sent more than a request may have.
    pub(super) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Stalled => Some(SLOW),
            Self::Broken(_) => None,
            Self::NoRoom => Some(MEMORY),
            Self::ClientFull => Some(CLIENT),
        }
    }

    /// The reason, for the access log.
    pub(super) fn why(&self) -> &'static str {
        self.label().unwrap_or("the body cannot be read")
    }

    /// The answer to the client.
    pub(super) fn to_response(&self) -> Response<Answer> {
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
            Self::ClientFull => {
                let text = "requests of this client take half of the router's --request-memory; ask again later, or give it more";
                (StatusCode::SERVICE_UNAVAILABLE, text.into())
            }
        };
        make_failure(status, &text)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::body::Frame;
    use tokio::time::{Sleep, sleep};

    use std::net::IpAddr;

    use super::*;
    use crate::first_frames::tests::Stalled;
    use crate::memory::BodyMemory;

    const CLIENT_OF_TESTS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// A body of `parts` parts of `bytes` bytes, one of them each second.
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

    /// A runtime with a clock that jumps to the next deadline at once.
    fn paused() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
    }

    #[test]
    fn a_body_that_comes_too_slowly_is_not_waited_for_and_one_by_a_slow_link_is() {
        let memory = BodyMemory::new(2 * REQUEST_BYTES_MAX as u64);
        let read_of = |bytes| {
            paused().block_on(async {
                let body = Trickle { parts: 100, bytes, next: Box::pin(sleep(Duration::ZERO)) };
                read_body(body, memory.room(CLIENT_OF_TESTS)).await.map(|(whole, _)| whole.len())
            })
        };
        assert_eq!(read_of(1), Err(UnreadBody::Stalled));
        assert_eq!(read_of(125_000), Ok(12_500_000), "images by 1 Mbit/s");
    }

    #[test]
    fn a_body_of_which_nothing_comes_is_not_waited_for() {
        let memory = BodyMemory::new(100);
        let begun = || Stalled([Bytes::from_static(b"a part")].into());
        let none = paused().block_on(read_body(begun(), memory.room(CLIENT_OF_TESTS))).unwrap_err();
        assert_eq!((none, memory.used().all), (UnreadBody::Stalled, 0));
    }

    #[test]
    fn bodies_have_a_budget_in_all_and_each_client_half_of_it() {
        let memory = BodyMemory::new(100);
        let of = |client: u8, bytes: usize| {
            let body = http_body_util::Full::new(Bytes::from(vec![b'a'; bytes]));
            paused().block_on(read_body(body, memory.room([10, 0, 0, client].into())))
        };
        let first = of(1, 40).unwrap();
        assert_eq!(of(1, 11).unwrap_err(), UnreadBody::ClientFull);
        let second = of(2, 50).unwrap();
        assert_eq!(of(3, 11).unwrap_err(), UnreadBody::NoRoom);
        drop(first);
        let third = of(1, 50).unwrap();
        drop((second, third));
        let used = memory.used();
        assert_eq!((used.all, used.clients.len()), (0, 0), "clients that have none are forgotten");
    }
}
