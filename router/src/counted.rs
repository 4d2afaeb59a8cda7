//! A stream of events, with the cached tokens and the first token of another engine in its usage.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame};

use super::usage::{self, Usage};

/// A longer event is passed on unchanged.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// A body with changed numbers in events with usage, and with all other events byte for byte.
pub(super) struct Counted<B, F> {
    body: B,
    /// The beginning of an unfinished event.
    held: Vec<u8>,
    /// Events with numbers to change, until the right ones are known.
    waiting: Vec<u8>,
    cached: Cached,
    /// Tokens of the answer from another engine: the prompt of this stream's engine ends with them.
    passed: u64,
    /// Called with the usage of the events.
    stated: F,
    has_ended: bool,
}

enum Cached {
    Awaited(Pin<Box<dyn Future<Output = Option<u64>> + Send>>),
    Known(Option<u64>),
}

// === impl Counted ===

impl<B, F: FnMut(Usage)> Counted<B, F> {
    pub(super) fn new(
        body: B,
        cached: impl Future<Output = Option<u64>> + Send + 'static,
        passed: u64,
        stated: F,
    ) -> Self {
        let cached = Cached::Awaited(Box::pin(cached));
        Self { body, held: Vec::new(), waiting: Vec::new(), cached, passed, stated, has_ended: false }
    }

    /// The events of `waiting`, once the number is known.
    fn poll_waiting(&mut self, context: &mut Context<'_>) -> Poll<Bytes> {
        if let Cached::Awaited(cached) = &mut self.cached {
            let Poll::Ready(cached) = cached.as_mut().poll(context) else { return Poll::Pending };
            self.cached = Cached::Known(cached);
        }
        let events = std::mem::take(&mut self.waiting);
        (self.stated)(Usage::of_events(str::from_utf8(&events).unwrap_or_default()));
        let Cached::Known(cached) = self.cached else { return Poll::Ready(events.into()) };
        Poll::Ready(match String::from_utf8(events) {
            Ok(events) => usage::event_with_counts(&events, cached, self.passed).unwrap_or(events).into(),
            Err(events) => events.into_bytes().into(),
        })
    }

    fn has_counts(&self, events: &[u8]) -> bool {
        usage::states_cached(events) || self.passed > 0 && usage::states_usage(events)
    }

    /// Takes bytes of the stream. Returns whole events, or an unfinished one too long to be held.
    fn take_whole(&mut self, data: &Bytes) -> Option<Bytes> {
        if self.held.is_empty() && data.ends_with(b"\n\n") {
            return Some(data.clone());
        }
        self.held.extend_from_slice(data);
        if self.held.len() > EVENT_BYTES_MAX {
            return Some(std::mem::take(&mut self.held).into());
        }
        let behind =
            |end: &[u8]| self.held.windows(end.len()).rposition(|part| part == end).map(|at| at + end.len());
        let end = behind(b"\n\n").max(behind(b"\r\n\r\n"))?;
        let rest = self.held.split_off(end);
        Some(std::mem::replace(&mut self.held, rest).into())
    }
}

impl<B: Body<Data = Bytes> + Unpin, F: FnMut(Usage) + Unpin> Body for Counted<B, F> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            if !self.waiting.is_empty() {
                return self.poll_waiting(context).map(|events| Some(Ok(Frame::data(events))));
            }
            if self.has_ended {
                return Poll::Ready(None);
            }
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
                return Poll::Pending;
            };
            let events = match frame.transpose() {
                Err(error) => return Poll::Ready(Some(Err(error))),
                Ok(None) => {
                    self.has_ended = true;
                    Some(std::mem::take(&mut self.held).into()).filter(|rest: &Bytes| !rest.is_empty())
                }
                Ok(Some(frame)) => match frame.into_data() {
                    Ok(data) => self.take_whole(&data),
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
            };
            match events {
                Some(events) if self.has_counts(&events) => self.waiting = events.into(),
                Some(events) => return Poll::Ready(Some(Ok(Frame::data(events)))),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::body::Payload;

    const STREAM: &str = concat!(
        ": keep-alive\n\ndata: {\"choices\":[{\"text\":\" a \\\"usage\\\"\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":900,\"prompt_tokens_details\":{\"cached_tokens\":899}}}\n\n",
        "data: [DONE]\n\n"
    );

    fn passed(stream: &str, frame_bytes: usize, cached: Option<u64>) -> String {
        counted(stream, frame_bytes, cached, 0)
    }

    fn counted(stream: &str, frame_bytes: usize, cached: Option<u64>, passed: u64) -> String {
        let frames: Vec<_> = stream.as_bytes().chunks(frame_bytes).map(Bytes::copy_from_slice).collect();
        let body = Counted::new(Payload::from(frames).body(), async move { cached }, passed, |_| ());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let passed = runtime.block_on(body.collect()).unwrap().to_bytes();
        String::from_utf8(passed.to_vec()).unwrap()
    }

    #[test]
    fn only_the_number_changes_however_the_stream_is_framed() {
        for frame_bytes in [1, 2, 7, 50, usize::MAX] {
            assert_eq!(passed(STREAM, frame_bytes, Some(0)), STREAM.replace("899", "0"), "{frame_bytes}");
            assert_eq!(passed(STREAM, frame_bytes, None), STREAM);
            let moved = "data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3}}\n\n";
            let right = moved.replace('9', "8").replace('3', "4");
            assert_eq!(counted(moved, frame_bytes, None, 1), right);
            let windows = STREAM.replace('\n', "\r\n");
            assert_eq!(passed(&windows, frame_bytes, Some(0)), windows.replace("899", "0"), "{frame_bytes}");
            let cut = &STREAM[..STREAM.len() - 20];
            assert_eq!(passed(cut, frame_bytes, Some(0)), cut.replace("899", "0"), "an end within an event");
        }
    }
}
