//! The beginning of an engine's answer, read until it shows if the engine has given the prompt up.
//!
//! vLLM's stream of a chat begins with an event of the role alone, and with `--sse-keep-alive-interval`
//! comments come before any event. Both have no part of the answer, so an error behind them still comes
//! before the answer.

use std::collections::VecDeque;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

/// The begin of vLLM's error event at the end of a stream.
const ERROR_EVENT: &[u8] = b"data: {\"error\"";
/// The most bytes held of a stream before it is passed on without a judgement: the event with the role may
/// have a prompt's token ids.
const BYTES_MAX: usize = 1 << 20;
/// Comments are held for this long after the request: they must reach the client before a proxy ends the
/// connection after 60 s. An engine gives a prompt up after 30 s of waiting.
pub(super) const TIME_MAX: Duration = Duration::from_secs(40);
/// The longest time from the role to an error: vLLM writes both at once.
const ERROR_TIME_MAX: Duration = Duration::from_secs(1);

/// The meaning of a stream's beginning.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum StreamBegin {
    /// Comments, or no whole event.
    Nothing,
    Role,
    Answer,
    Error,
}

/// The first frames of an answer, in their order.
#[derive(Debug, Default)]
pub(super) struct FirstFrames {
    pub(super) frames: VecDeque<Frame<Bytes>>,
    /// True if the frames have an error before any part of an answer.
    pub(super) given_up: bool,
}

/// Reads the first frame of a body; of a stream of events all frames until one has a part of the answer or an
/// error, or `time_max` is over.
pub(super) async fn read_first_frames<B: Body<Data = Bytes> + Unpin>(
    body: &mut B,
    is_stream: bool,
    time_max: Duration,
) -> Result<FirstFrames, B::Error> {
    let mut first_frames = FirstFrames::default();
    let (mut until, mut unread, mut held) = (Instant::now() + time_max, Vec::new(), 0);
    loop {
        let frame = if first_frames.frames.is_empty() {
            body.frame().await
        } else {
            let Ok(frame) = timeout_at(until, body.frame()).await else { return Ok(first_frames) };
            frame
        };
        let Some(frame) = frame.transpose()? else { return Ok(first_frames) };
        let data = frame.data_ref().map_or(&[][..], |data| data);
        unread.extend_from_slice(if is_stream { data } else { &[] });
        held += data.len();
        first_frames.frames.push_back(frame);
        let shown = judge(&mut unread);
        first_frames.given_up = shown == StreamBegin::Error;
        if !is_stream || shown >= StreamBegin::Answer || held > BYTES_MAX {
            return Ok(first_frames);
        }
        if shown == StreamBegin::Role {
            until = Instant::now() + ERROR_TIME_MAX;
        }
    }
}

/// Judges the beginning of a stream, and removes its whole events without a part of the answer.
fn judge(unread: &mut Vec<u8>) -> StreamBegin {
    let mut shown = StreamBegin::Nothing;
    loop {
        if unread.starts_with(ERROR_EVENT) {
            return StreamBegin::Error;
        }
        let Some(end) = event_end(unread) else { return shown };
        shown = shown.max(said(&unread[..end]));
        if shown == StreamBegin::Answer {
            return shown;
        }
        unread.drain(..end);
    }
}

/// The end of the first event, with the empty line behind it.
fn event_end(unread: &[u8]) -> Option<usize> {
    let mut lines = unread.split_inclusive(|byte| *byte == b'\n');
    let mut end = 0;
    lines.find_map(|line| {
        end += line.len();
        matches!(line, b"\n" | b"\r\n").then_some(end)
    })
}

/// The meaning of an event without an error: `Nothing` for a comment, `Role` for a part of a chat with the
/// role alone.
fn said(event: &[u8]) -> StreamBegin {
    let Ok(event) = std::str::from_utf8(event) else { return StreamBegin::Answer };
    let mut lines = event.lines().filter(|line| !line.is_empty() && !line.starts_with(':'));
    let Some(line) = lines.next() else { return StreamBegin::Nothing };
    let part = line.strip_prefix("data:").and_then(|part| serde_json::from_str::<Value>(part).ok());
    let is_role = lines.next().is_none() && part.is_some_and(|part| has_role_alone(&part));
    if is_role { StreamBegin::Role } else { StreamBegin::Answer }
}

fn has_role_alone(part: &Value) -> bool {
    let is_empty = |value: &Value| value.is_null() || value == "";
    let is_role = |choice: &Value| {
        let delta = choice["delta"].as_object();
        choice["finish_reason"].is_null()
            && delta.is_some_and(|delta| {
                delta.contains_key("role")
                    && delta.iter().all(|(name, value)| name == "role" || is_empty(value))
            })
    };
    part["choices"].as_array().is_some_and(|choices| !choices.is_empty() && choices.iter().all(is_role))
}

#[cfg(test)]
pub(super) mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::*;

    const COMMENT: &str = ": keep-alive\n\n";
    const ROLE: &str = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}"#;
    const ERROR: &str = "data: {\"error\": {\"message\": \"Internal server error\"}}\n\n";
    const WORD: &str =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";

    /// A body with some frames, and without an end.
    pub(crate) struct Stalled(pub(crate) VecDeque<Bytes>);

    impl Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.pop_front().map_or(Poll::Pending, |part| Poll::Ready(Some(Ok(Frame::data(part)))))
        }
    }

    fn read_of(text: &str, frame_bytes: usize, time_max: Duration) -> (String, bool) {
        let frames = text.as_bytes().chunks(frame_bytes).map(Bytes::copy_from_slice).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let first_frames = runtime.block_on(read_first_frames(&mut Stalled(frames), true, time_max)).unwrap();
        let held: Vec<u8> =
            first_frames.frames.into_iter().flat_map(|frame| frame.into_data().unwrap()).collect();
        (String::from_utf8(held).unwrap(), first_frames.given_up)
    }

    #[test]
    fn an_error_is_seen_behind_what_says_nothing_however_it_is_framed() {
        let role = format!("{ROLE}\n\n");
        let windows = role.replace('\n', "\r\n");
        for begin in ["", COMMENT, &role, &format!("{COMMENT}{role}{COMMENT}{role}"), &windows] {
            for frame_bytes in [1, 20, usize::MAX] {
                let (held, given_up) = read_of(&format!("{begin}{ERROR}"), frame_bytes, TIME_MAX);
                assert!(given_up && format!("{begin}{ERROR}").starts_with(&held), "{held}");
            }
        }
    }

    #[test]
    fn what_says_something_is_passed_on_with_all_before_it() {
        let role = format!("{ROLE}\n\n");
        let others = [
            role.replace("\"content\":\"\"", "\"content\":\"a\""),
            role.replace("\"content\":\"\"", "\"content\":\"\",\"reasoning\":\"a\""),
            role.replace("\"finish_reason\":null", "\"finish_reason\":\"stop\""),
            "data: {\"choices\":[],\"usage\":{}}\n\n".into(),
            "data: [DONE]\n\n".into(),
            "data: 1\n\n".into(),
            WORD.into(),
        ];
        for said in others {
            let begin = format!("{COMMENT}{role}{said}");
            for frame_bytes in [1, usize::MAX] {
                assert_eq!(read_of(&begin, frame_bytes, TIME_MAX), (begin.clone(), false));
            }
            let (held, given_up) = read_of(&format!("{begin}{ERROR}"), 7, TIME_MAX);
            assert!(!given_up && held.len() < begin.len() + 7, "an error within an answer: {held}");
        }
    }

    #[test]
    fn a_stream_that_says_nothing_is_held_for_a_time_and_up_to_a_length() {
        assert_eq!(read_of(COMMENT, usize::MAX, Duration::from_millis(1)), (COMMENT.into(), false));
        let role = format!("{ROLE}\n\n");
        assert_eq!(read_of(&role, 20, TIME_MAX), (role.clone(), false), "no error follows the role");
        let (held, given_up) = read_of(&COMMENT.repeat(BYTES_MAX / 10), 1 << 14, TIME_MAX);
        assert!(!given_up && (BYTES_MAX..BYTES_MAX + (2 << 14)).contains(&held.len()), "{}", held.len());
    }
}
