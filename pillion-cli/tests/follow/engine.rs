//! A server in place of an engine of a pod: it counts the tokens that the pod's memory has of each prompt, and saves the others.
#![allow(dead_code, reason = "each file uses its part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use tools::ctl::{self, ControlTarget};

use super::client::engine::Engine;
use super::client::prompts::{TOKENS, facts, keys_of};
use super::client::sidecar::Sidecar;

/// A prompt at an engine.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) tokens: u64,
    /// Leading tokens in the pod's memory.
    pub(crate) found: u64,
}

/// An engine, until it is dropped.
pub(crate) struct ScriptedEngine {
    port: u16,
    ending: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Seen>>>,
    threads: Vec<JoinHandle<()>>,
}

/// A prompt, and a channel for its answer.
type Job = (Vec<u32>, Sender<Seen>);

impl ScriptedEngine {
    /// An engine at this port with blocks in this sidecar; `run` differs between engines.
    pub(crate) fn start(port: u16, sidecar: &Sidecar, run: u8) -> Self {
        let (listener, engine) = (
            TcpListener::bind(("127.0.0.1", port)).unwrap(),
            Engine::stating(facts("m"), [run; 16], sidecar, None),
        );
        let (ending, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (jobs, waiting) = channel();
        let (control, noted) = (sidecar.control(), Arc::clone(&seen));
        let working = std::thread::spawn(move || work(engine, &control, &waiting, &noted));
        let is_ending = Arc::clone(&ending);
        let serving = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if is_ending.load(Ordering::Relaxed) {
                    return;
                }
                let (jobs, is_ending) = (jobs.clone(), Arc::clone(&is_ending));
                std::thread::spawn(move || serve(stream, &jobs, &is_ending));
            }
        });
        Self { port, ending, seen, threads: vec![serving, working] }
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) fn forget(&self) {
        self.seen.lock().unwrap().clear();
    }
}

impl Drop for ScriptedEngine {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.threads.remove(0).join();
    }
}

/// Serves prompts one by one, until no connection is left.
fn work(mut engine: Engine, control: &ControlTarget, jobs: &Receiver<Job>, seen: &Mutex<Vec<Seen>>) {
    for (tokens, reply) in jobs {
        let body = json!({ "tokens": tokens }).to_string();
        // Scores have a budget in each second.
        let score = std::iter::repeat_with(|| {
            ctl::send_request(control, "POST", "/score", &body).ok().or_else(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                None
            })
        });
        let score: Value = serde_json::from_str(&score.take(500).flatten().next().expect("a score")).unwrap();
        let found = score["memory"].as_u64().unwrap();
        engine.save_keys(&keys_of(&tokens)[found as usize / TOKENS..]);
        let noted = Seen { tokens: tokens.len() as u64, found };
        seen.lock().unwrap().push(noted.clone());
        let _ = reply.send(noted);
    }
}

fn serve(mut stream: TcpStream, jobs: &Sender<Job>, ending: &AtomicBool) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some((path, body)) = read(&mut reader) {
        if ending.load(Ordering::Relaxed) {
            return;
        }
        let body: Value = serde_json::from_str(&body).unwrap_or_default();
        let answer = match path.as_str() {
            "/health" => json!({}),
            "/tokenize" => json!({ "tokens": tokens_of(&body), "count": 0 }),
            "/v1/completions" | "/v1/chat/completions" => {
                let (reply, answered) = channel();
                jobs.send((tokens_of(&body), reply)).unwrap();
                let Seen { tokens, found } = answered.recv().unwrap();
                let details = json!({ "cached_tokens": found });
                json!({ "choices": [], "usage": { "prompt_tokens": tokens, "prompt_tokens_details": details } })
            }
            _ => json!({}),
        };
        let answer = answer.to_string();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length:";
        if write!(stream, "{head} {}\r\n\r\n{answer}", answer.len()).is_err() {
            return;
        }
    }
}

/// The tokens of a prompt: ids, or the numbers in its texts.
fn tokens_of(body: &Value) -> Vec<u32> {
    let numbers = |text: &str| text.split(' ').map(|word| word.parse().unwrap()).collect::<Vec<u32>>();
    match (&body["prompt"], &body["messages"]) {
        (Value::Array(ids), _) => ids.iter().map(|id| id.as_u64().unwrap() as u32).collect(),
        (Value::String(text), _) => numbers(text),
        (_, Value::Array(messages)) => {
            messages.iter().flat_map(|message| numbers(message["content"].as_str().unwrap())).collect()
        }
        _ => panic!("a prompt without tokens: {body}"),
    }
}

/// The path and the body of a request; `None` at the end of the connection.
fn read(reader: &mut BufReader<TcpStream>) -> Option<(String, String)> {
    let (mut path, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_lowercase();
        if line.is_empty() {
            break;
        }
        if path.is_none() {
            path = line.split(' ').nth(1).map(String::from);
        }
        if let Some(stated) = line.strip_prefix("content-length: ") {
            length = stated.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path?, String::from_utf8(body).unwrap()))
}
