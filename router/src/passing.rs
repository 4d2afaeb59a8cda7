//! An engine's answer on its way to the client.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::CONTENT_LENGTH;
use hyper::{Response, StatusCode};

use super::computing::{Computing, HandOver};
use super::counted::Counted;
use super::engine::LoadShare;
use super::forward::{
    Answer, EVENTS, OpenedAnswer, PassedToken, is_of, may_be_json, remove_connection_headers,
};
use super::server::make_failure;
use super::usage::{self, Usage};

/// The longest answer changed without a stream: one of 100,000 tokens with logprobs.
const WHOLE_BYTES_MAX: u64 = 16 << 20;

/// An engine's body, and values kept until it is read.
struct PassedBody {
    first_frames: VecDeque<Frame<Bytes>>,
    body: Incoming,
    has_ended: bool,
    computing: Option<Computing>,
    share: LoadShare,
}

/// Passes an engine's answer to the client: as it comes, byte for byte, except the cached tokens of a prompt
/// computed by another engine, and the count of a token `passed` before. `share` and `computing` are dropped when the answer ends or the client goes.
pub(super) async fn pass_answer(
    opened: OpenedAnswer,
    share: LoadShare,
    computing: Option<Computing>,
    passed: Option<PassedToken>,
) -> Response<Answer> {
    let (mut head, body) = opened.answer.into_parts();
    // The length stays true if the body is not changed.
    let length = head.headers.get(CONTENT_LENGTH).cloned();
    remove_connection_headers(&mut head.headers);
    let computed = computing.as_ref().filter(|_| head.status.is_success());
    let cached = computed.map(|computing| (computing.cached(), computing.hand_over(&share.engine)));
    let is_stream = is_of(&head.headers, EVENTS);
    let held = PassedBody { first_frames: opened.first_frames, body, has_ended: false, computing, share };
    let is_short = held.size_hint().exact().is_some_and(|bytes| bytes <= WHOLE_BYTES_MAX);
    let body = match cached {
        // The engine of that token has answered before.
        hand_over if is_stream && passed.is_some() => {
            let cached = passed.and_then(|passed| passed.cached);
            let mut hand_over = hand_over.map(|(_, hand_over)| hand_over);
            let stated = move |stated| hand_over.iter_mut().for_each(|hand_over| hand_over.judge(stated));
            Counted::new(held, std::future::ready(cached), 1, stated).boxed_unsync()
        }
        Some((cached, mut hand_over)) if is_stream => {
            Counted::new(held, cached, 0, move |stated| hand_over.judge(stated)).boxed_unsync()
        }
        Some((cached, hand_over)) if is_short && may_be_json(&head.headers) => match held.collect().await {
            Ok(whole) => {
                let whole = with_cached(whole.to_bytes(), cached, hand_over).await;
                head.headers.insert(CONTENT_LENGTH, whole.len().into());
                Full::new(whole).map_err(|never| match never {}).boxed_unsync()
            }
            Err(error) => {
                let text = format!("the answer ended before its end: {error}");
                return make_failure(StatusCode::BAD_GATEWAY, &text);
            }
        },
        _ => {
            if let Some(length) = length {
                head.headers.insert(CONTENT_LENGTH, length);
            }
            held.boxed_unsync()
        }
    };
    Response::from_parts(head, body)
}

/// An answer with the cached tokens stated by the prefill engine, if it states any.
async fn with_cached(
    answer: Bytes,
    cached: impl Future<Output = Option<u64>>,
    mut hand_over: HandOver,
) -> Bytes {
    if !usage::states_cached(&answer) {
        return answer;
    }
    let cached = cached.await;
    let json = str::from_utf8(&answer).unwrap_or_default();
    hand_over.judge(Usage::of_answer(json, None));
    let made = cached.and_then(|cached| usage::with_cached(json, cached));
    made.map_or(answer, Bytes::from)
}

// === impl PassedBody ===

impl Body for PassedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(frame) = self.first_frames.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.has_ended |= matches!(polled, Poll::Ready(None));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.first_frames.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let held: usize = self.first_frames.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
        self.body
            .size_hint()
            .exact()
            .map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + held as u64))
    }
}

impl Drop for PassedBody {
    fn drop(&mut self) {
        // The client has its whole answer: the prefill engine's further work shows if it is alive.
        if self.has_ended || self.is_end_stream() {
            self.computing.iter_mut().for_each(Computing::unpin);
            self.share.note_end();
        }
    }
}
