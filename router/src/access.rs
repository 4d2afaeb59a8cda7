//! The access log: a line for each request, at its end. A thread of its own writes the lines: no request waits for the reader of
//! standard output.

use std::net::IpAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use prometheus::IntCounter;
use tokio::time::Instant;

use super::REQUEST_ID;
use sidecar::config::LogFormat;
use sidecar::logging;

/// The longest queue of lines. One takes 2 KiB at most.
const LINES_MAX: usize = 1024;
/// Ids and paths are cut to so many characters.
const CHARS_MAX: usize = 256;
/// The longest wait of the router's end for the last lines.
const LAST_TIME_MAX: Duration = Duration::from_secs(1);

/// The queue of lines.
#[derive(Clone, Debug)]
pub(super) struct AccessLog {
    lines: SyncSender<Line>,
    /// Lines without a place in the queue.
    dropped: IntCounter,
}

/// The end of the writing thread, once every [`AccessLog`] is dropped.
#[derive(Debug)]
pub(super) struct Writer(Receiver<()>);

/// Notes of a request's way, for its line.
#[derive(Debug, Default)]
pub(super) struct Noted(Mutex<Notes>);

/// Times of the parts of a look for a prompt's blocks.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct LocateTimes {
    pub(super) tokens: Duration,
    pub(super) keys: Duration,
    pub(super) probe: Duration,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Notes {
    pub(super) way: Option<&'static str>,
    /// Addresses of the last engines.
    pub(super) prefill: Option<String>,
    pub(super) decode: Option<String>,
    /// The reason why the prefill engine did not compute the prompt.
    pub(super) prefill_failure: Option<&'static str>,
    pub(super) request_bytes: u64,
    /// Times of the look for the prompt's blocks.
    pub(super) locate: Option<LocateTimes>,
    /// The reason of the request's failure, without words of its body.
    pub(super) error: Option<String>,
}

/// The line of a request under way. It is written on drop.
#[derive(Debug)]
pub(super) struct AccessEntry {
    log: AccessLog,
    noted: Arc<Noted>,
    id: String,
    client: IpAddr,
    method: Method,
    path: String,
    begin: Instant,
    status: Option<StatusCode>,
    first: Option<Duration>,
    bytes: u64,
    has_ended: bool,
}

#[derive(Debug)]
struct Line {
    notes: Notes,
    id: String,
    client: IpAddr,
    method: Method,
    path: String,
    status: Option<u16>,
    bytes: u64,
    first: Option<Duration>,
    whole: Duration,
}

// === impl AccessLog ===

impl AccessLog {
    /// Starts the writing thread. Fails where the process may have no more threads.
    pub(super) fn start_writer(format: LogFormat, dropped: IntCounter) -> std::io::Result<(Self, Writer)> {
        let (lines, waiting) = sync_channel::<Line>(LINES_MAX);
        let (ending, ended) = sync_channel(1);
        let write = move || {
            logging::to_stdout(format, || waiting.iter().for_each(|line| line.write_line()));
            let _ = ending.send(());
        };
        std::thread::Builder::new().name("pillion-access".into()).spawn(write)?;
        Ok((Self { lines, dropped }, Writer(ended)))
    }

    /// Begins the line of a request.
    pub(super) fn begin_line(
        &self,
        request: &Request<Incoming>,
        client: IpAddr,
        noted: &Arc<Noted>,
    ) -> AccessEntry {
        let id = request.headers().get(REQUEST_ID).map_or(&b""[..], |id| id.as_bytes());
        AccessEntry {
            log: self.clone(),
            noted: Arc::clone(noted),
            id: cut(&String::from_utf8_lossy(id)),
            client,
            method: request.method().clone(),
            path: cut(request.uri().path()),
            begin: Instant::now(),
            status: None,
            first: None,
            bytes: 0,
            has_ended: false,
        }
    }
}

fn cut(text: &str) -> String {
    text.chars().take(CHARS_MAX).collect()
}

// === impl Writer ===

impl Writer {
    /// Waits until the last lines are written, or were not read for too long.
    pub(super) fn wait_written(self) {
        let _ = self.0.recv_timeout(LAST_TIME_MAX);
    }
}

// === impl Noted ===

impl Noted {
    pub(super) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why the request failed.
    pub(super) fn note_failure(&self, error: impl Into<String>) {
        self.notes().error = Some(error.into());
    }
}

// === impl AccessEntry ===

impl AccessEntry {
    /// The head of the answer is there.
    pub(super) fn answered<B: Body>(&mut self, answer: &Response<B>) {
        self.status = Some(answer.status());
        self.has_ended = self.method == Method::HEAD || answer.body().is_end_stream();
    }

    /// So many bytes of the answer's body go to the client, the last ones where `is_over`.
    pub(super) fn passed(&mut self, bytes: usize, is_over: bool) {
        self.first.get_or_insert_with(|| self.begin.elapsed());
        self.bytes += bytes as u64;
        self.has_ended |= is_over;
    }

    /// The answer's body is over, by an error of its engine where there is one.
    pub(super) fn end_body(&mut self, error: Option<&hyper::Error>) {
        self.has_ended = true;
        if let Some(error) = error {
            self.noted.note_failure(format!("the engine broke off its answer: {error}"));
        }
    }
}

impl Drop for AccessEntry {
    fn drop(&mut self) {
        let mut notes = std::mem::take(&mut *self.noted.notes());
        if !self.has_ended {
            notes.error.get_or_insert_with(|| "the client hung up".into());
        }
        let line = Line {
            notes,
            id: std::mem::take(&mut self.id),
            client: self.client,
            method: self.method.clone(),
            path: std::mem::take(&mut self.path),
            status: self.status.map(|status| status.as_u16()),
            bytes: self.bytes,
            first: self.first,
            whole: self.begin.elapsed(),
        };
        if self.log.lines.try_send(line).is_err() {
            self.log.dropped.inc();
        }
    }
}

// === impl Line ===

impl Line {
    fn write_line(&self) {
        let locate = self.notes.locate;
        tracing::info!(
            id = self.id.as_str(),
            client = %self.client,
            method = self.method.as_str(),
            path = self.path.as_str(),
            status = self.status,
            way = self.notes.way,
            prefill = self.notes.prefill.as_deref(),
            decode = self.notes.decode.as_deref(),
            request_bytes = self.notes.request_bytes,
            answer_bytes = self.bytes,
            tokens_ms = locate.map(|times| milliseconds(times.tokens)),
            keys_ms = locate.map(|times| milliseconds(times.keys)),
            probe_ms = locate.map(|times| milliseconds(times.probe)),
            first_ms = self.first.map(milliseconds),
            whole_ms = milliseconds(self.whole),
            prefill_failure = self.notes.prefill_failure,
            error = self.notes.error.as_deref(),
            "request"
        );
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
