//! A server in place of an engine: it keeps its requests, and answers in a given manner.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// The answer to all requests but those for `/health`.
#[derive(Clone, Debug)]
pub(crate) enum Manner {
    Json(u16, String),
    /// Server-sent events, a chunk each with a pause between, and the end behind the last one.
    Events(Vec<String>),
    /// The same, with the last one only after the test's release.
    Held(Vec<String>, Arc<AtomicBool>),
    Hang,
    /// After this time, if the request's prompt is computed by another engine.
    Awaits(Duration, Box<Manner>),
    /// A redirection to another path at its own address.
    Redirects(String),
    /// One response with this id, also for later requests; no other response.
    Stores(String, Box<Manner>),
    /// No prompt for an adapter before the engine has loaded it.
    Adapts(Box<Manner>),
    /// As `Hang`, also for the router's own requests.
    Freeze,
    /// As `Hang`, and refuses connections after the first.
    Vanish,
    /// As `Hang`, after the head of an answer and before its body.
    Stall,
    /// This part of an answer, and then the end of the connection.
    Breaks(String),
    /// No answer before this count of requests.
    Behind(usize, Box<Manner>),
    /// No answer before the test's release.
    Once(Arc<AtomicBool>, Box<Manner>),
    /// With this default sampling.
    Samples(Value, Box<Manner>),
    /// The first request in one manner, all others in the other one.
    First(Box<Manner>, Box<Manner>),
}

/// An engine's answer to a stream of one token.
pub(crate) const ONE_TOKEN: &str = concat!(
    r#"data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":[5,6],"token_ids":[9]}]}"#,
    "\n\ndata: [DONE]\n\n"
);
/// The same, with usage.
pub(crate) fn one_token_with_usage() -> String {
    let usage = json!({ "prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3 });
    let event = json!({ "id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [], "usage": usage });
    ONE_TOKEN.replace("data: [DONE]", &format!("data: {event}\n\ndata: [DONE]"))
}

/// The model of prompts that every engine answers as streams, and that no test counts.
pub(crate) const WARM_UP: &str = "warm-up";
/// The adapter in a request.
pub(crate) const ADAPTER: &str = "an-adapter";

/// A request as received.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) line: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

#[derive(Debug, Default)]
struct State {
    asked: Vec<Asked>,
    models_asked: usize,
    own_asked: usize,
    hung_up: usize,
}

pub(crate) struct Engine {
    pub(crate) port: u16,
    state: Arc<Mutex<State>>,
}

/// A message's first line, headers and, if it states a length, body; `None` at the end of the connection.
pub(crate) fn read(stream: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut lines = Vec::new();
    loop {
        let mut line = Vec::new();
        if stream.read_until(b'\n', &mut line).ok()? == 0 {
            return None;
        }
        match String::from_utf8_lossy(&line).trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let pair =
        |line: &String| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
    let mut asked = Asked {
        line: lines[0].clone(),
        headers: lines[1..].iter().filter_map(pair).collect(),
        body: String::new(),
    };
    let length = asked.header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    asked.body = String::from_utf8(body).unwrap();
    Some(asked)
}

impl Asked {
    pub(crate) fn header(&self, wanted: &str) -> Option<&str> {
        self.headers.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

impl Engine {
    pub(crate) fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let seen = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let vanishes = matches!(manner, Manner::Vanish);
                let (manner, seen) = (manner.clone(), Arc::clone(&seen));
                thread::spawn(move || serve(stream, &manner, &seen));
                if vanishes {
                    return;
                }
            }
        });
        Self { port, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests except those for its health.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.state.lock().unwrap().asked.clone()
    }

    /// Count of the router's requests for its models.
    pub(crate) fn models_asked(&self) -> usize {
        self.state.lock().unwrap().models_asked
    }

    /// Count of the router's own prompts.
    pub(crate) fn own_asked(&self) -> usize {
        self.state.lock().unwrap().own_asked
    }

    /// Count of requests hung up on before their whole answer.
    pub(crate) fn hung_up(&self) -> usize {
        self.state.lock().unwrap().hung_up
    }
}

fn serve(stream: TcpStream, manner: &Manner, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(asked) = read(&mut reader) {
        if let Some(goes_on) = own_question_answered(&asked, &stream, manner, state) {
            if goes_on {
                continue;
            }
            hold(&mut reader);
            return;
        }
        let (line, body) = (asked.line.clone(), asked.body.clone());
        let earlier = {
            let mut state = state.lock().unwrap();
            state.asked.push(asked);
            state.asked.len() - 1
        };
        let unknown = Manner::Json(404, "{}".into());
        let manner = known(due(manner, earlier, state), &line, &body, state).unwrap_or(&unknown);
        let whole = match manner {
            Manner::Redirects(path) => {
                let to = format!("http://{}{path}", stream.local_addr().unwrap());
                let head = format!("HTTP/1.1 307 Else\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
                (&stream).write_all(head.as_bytes()).is_ok()
            }
            Manner::First(..)
            | Manner::Behind(..)
            | Manner::Once(..)
            | Manner::Stores(..)
            | Manner::Adapts(..)
            | Manner::Samples(..)
            | Manner::Awaits(..) => {
                unreachable!("it is due")
            }
            Manner::Json(status, body) => {
                let head = format!(
                    "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {}",
                    body.len()
                );
                (&stream).write_all(format!("{head}\r\n\r\n{body}").as_bytes()).is_ok()
            }
            Manner::Events(events) => events_sent(&stream, events, &AtomicBool::new(true)),
            Manner::Held(events, released) => events_sent(&stream, events, released),
            Manner::Breaks(begin) => {
                let _ = (&stream).write_all(begin.as_bytes());
                return;
            }
            Manner::Stall => {
                let head =
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked";
                let _ = (&stream).write_all(&[&head[..], b"\r\n\r\n"].concat());
                hold(&mut reader);
                false
            }
            Manner::Hang | Manner::Freeze | Manner::Vanish => {
                hold(&mut reader);
                false
            }
        };
        if !whole {
            state.lock().unwrap().hung_up += 1;
            return;
        }
    }
}

/// Answers the router's own requests; false without an answer, and `None` for any other request.
fn own_question_answered(
    asked: &Asked,
    mut stream: &TcpStream,
    manner: &Manner,
    state: &Mutex<State>,
) -> Option<bool> {
    if asked.line.starts_with("GET /health ") {
        if matches!(manner, Manner::Freeze | Manner::Stall) {
            return Some(false);
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        return Some(true);
    }
    if asked.body.contains(WARM_UP) {
        let is_computing = asked.body.contains("\"return_token_ids\":true");
        let event = if is_computing { ONE_TOKEN } else { "data: 1\n\n" };
        return Some(events_sent(stream, &[event.to_owned()], &AtomicBool::new(true)));
    }
    if asked.header("x-request-id").is_some() {
        return None;
    }
    state.lock().unwrap().own_asked += usize::from(asked.line.starts_with("POST "));
    state.lock().unwrap().models_asked += usize::from(asked.line.starts_with("GET /v1/models "));
    if matches!(manner, Manner::Freeze) {
        return Some(false);
    }
    let sampling = match manner {
        Manner::Samples(defaults, _) => json!({ "defaults": defaults, "counts": false }),
        _ => json!({ "defaults": {}, "counts": false }),
    };
    let said = if asked.line.starts_with("GET /v1/models ") {
        r#"{"data": [{"id": "m", "max_model_len": 1000}]}"#.to_owned()
    } else if asked.body.contains("\"stream\":true") {
        one_token_with_usage()
    } else {
        json!({ "choices": [], "kv_transfer_params": { "pillion": { "sampling": sampling.to_string() } } })
            .to_string()
    };
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", said.len());
    let _ = stream.write_all((head + &said).as_bytes());
    Some(true)
}

/// The manner for a request after `earlier` ones, once it is due.
fn due<'a>(manner: &'a Manner, earlier: usize, state: &Mutex<State>) -> &'a Manner {
    let (is_due, manner): (&dyn Fn() -> bool, _) = match manner {
        Manner::First(first, _) if earlier == 0 => (&|| true, first),
        Manner::First(_, rest) => (&|| true, rest),
        Manner::Behind(count, manner) => (&|| state.lock().unwrap().asked.len() >= *count, manner),
        Manner::Once(released, manner) => (&|| released.load(Ordering::Relaxed), manner),
        manner => return manner,
    };
    while !is_due() {
        thread::sleep(Duration::from_millis(1));
    }
    due(manner, earlier, state)
}

/// The manner for a request of this line and body; `None` for an unknown response or adapter.
fn known<'a>(manner: &'a Manner, line: &str, body: &str, state: &Mutex<State>) -> Option<&'a Manner> {
    match manner {
        Manner::Stores(id, _) if line.contains("/v1/responses/") && !line.contains(id) => None,
        Manner::Adapts(_) if body.contains(ADAPTER) && !has_loaded(state) => None,
        Manner::Stores(_, manner) | Manner::Adapts(manner) | Manner::Samples(_, manner) => Some(manner),
        Manner::Awaits(time, manner) => {
            if body.contains("\"do_remote_prefill\":true") {
                thread::sleep(*time);
            }
            Some(manner)
        }
        manner => Some(manner),
    }
}

/// Returns true once the engine was asked to load an adapter.
fn has_loaded(state: &Mutex<State>) -> bool {
    state.lock().unwrap().asked.iter().any(|asked| asked.line.contains("/v1/load_lora_adapter"))
}

/// Waits until the other side hangs up.
fn hold(reader: &mut BufReader<TcpStream>) {
    let mut byte = [0; 1];
    let _ = reader.read(&mut byte);
}

fn events_sent(mut stream: &TcpStream, events: &[String], released: &AtomicBool) -> bool {
    let types = "content-type: text/event-stream\r\ntransfer-encoding: chunked";
    let head = format!("HTTP/1.1 200 OK\r\n{types}\r\nconnection: keep-alive\r\nx-engine: it\r\n\r\n");
    let chunks = events.iter().zip(1..).map(|(event, number)| {
        while number == events.len() && !released.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        format!("{:x}\r\n{event}\r\n", event.len())
    });
    [head].into_iter().chain(chunks).chain(["0\r\n\r\n".to_owned()]).all(|part| {
        thread::sleep(Duration::from_millis(5));
        stream.write_all(part.as_bytes()).is_ok()
    })
}
