//! `pillion ctl`: sends a request to a running sidecar over its control socket or address, and prints the
//! answer.

mod client;

use std::io::{self, Read};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

pub use self::client::{ControlTarget, CtlError, FROZEN, send_request};
use sidecar::config::{self, Severity, default_control_socket, default_socket};

/// Most bytes of a list of keys or tokens on standard input: as many as the sidecar accepts.
const INPUT_BYTES_MAX: u64 = 4 << 20;

/// Options of `pillion ctl`.
#[derive(Args, Clone, Debug)]
pub struct CtlOptions {
    /// The sidecar's control socket [default: as pillion serve]
    #[arg(long, global = true, env = "PILLION_CONTROL_SOCKET", value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// The sidecar's --socket; its control socket lies beside it unless --control-socket is given
    #[arg(long, global = true, env = "PILLION_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The sidecar's --control-listen address, or for score its --score-listen, used instead of the socket; requires
    /// --token-file
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// File with the token for --address
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    #[command(subcommand)]
    pub ask: CtlRequest,
}

/// A request to a sidecar.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlRequest {
    /// Print the namespaces of the sidecar: facts, engines, and the number of blocks in memory, on disks and
    /// at peers.
    Namespaces {
        /// Print only the entry of this namespace, in the form for pillion doctor.
        namespace: Option<String>,
    },
    /// Print where blocks are: in memory, on a disk, at peers.
    Lookup {
        /// The namespace, 32 hex digits.
        namespace: String,
        /// Block hashes in hex, as pillion keys prints them. Without any, they are read from standard input.
        keys: Vec<String>,
    },
    /// Print how many leading tokens of a prompt this pod has, by place, and when it would have computed the rest.
    Score {
        /// The namespace, 32 hex digits; by default that of the connected engines.
        #[arg(long)]
        namespace: Option<String>,
        /// The prompt's token ids. Without any, they are read from standard input.
        tokens: Vec<u32>,
    },
    /// Retain or pin a prompt's blocks for a time, demote them, or prefetch them from disks and peers.
    Hint {
        /// The action; docs/hints.md has the effects.
        #[arg(value_name = "retain|pin|demote|prefetch")]
        action: String,
        /// The prompt's token ids. Without any, they are read from standard input.
        tokens: Vec<u32>,
        /// Seconds for retain and pin, 1 to 3,600 [default: 300]
        #[arg(long)]
        seconds: Option<u32>,
        /// The namespace, 32 hex digits; by default that of the connected engines.
        #[arg(long)]
        namespace: Option<String>,
        /// Block hashes in hex, as pillion keys prints them, in place of tokens.
        #[arg(long, value_name = "KEY", num_args = 1.., conflicts_with = "tokens")]
        keys: Vec<String>,
    },
    /// Remove the blocks of a namespace from memory and disks.
    Evict {
        /// The namespace, 32 hex digits.
        namespace: String,
    },
    /// Print the level of the least severe logged messages, or change it until the sidecar ends.
    LogLevel {
        /// The new level. Without it the present level is printed.
        #[arg(value_name = "error|warn|info|debug")]
        level: Option<Severity>,
    },
    /// Let the sidecar finish the work under way, write memory to disks, and end, as SIGTERM does.
    Drain,
}

/// Sends the request, and returns the text to print.
pub fn ask_sidecar(options: &CtlOptions) -> Result<String, CtlError> {
    let target = options.target()?;
    let post = |path, body: &Value| send_request(&target, "POST", path, &body.to_string());
    match &options.ask {
        CtlRequest::Namespaces { namespace: None } => send_request(&target, "GET", "/namespaces", ""),
        CtlRequest::Namespaces { namespace: Some(wanted) } => {
            entry(&send_request(&target, "GET", "/namespaces", "")?, wanted)
        }
        CtlRequest::Lookup { namespace, keys } => {
            let keys = if keys.is_empty() { read_words(std::io::stdin().lock())? } else { keys.clone() };
            post("/lookup", &json!({ "namespace": namespace, "keys": keys }))
        }
        CtlRequest::Score { namespace, tokens } => {
            let tokens =
                if tokens.is_empty() { read_words(std::io::stdin().lock())? } else { tokens.clone() };
            post("/score", &json!({ "namespace": namespace, "tokens": tokens }))
        }
        CtlRequest::Hint { action, tokens, seconds, namespace, keys } => {
            let mut body = json!({ "action": action, "seconds": seconds, "namespace": namespace });
            if keys.is_empty() {
                let tokens =
                    if tokens.is_empty() { read_words(std::io::stdin().lock())? } else { tokens.clone() };
                body["tokens"] = tokens.into();
            } else {
                body["keys"] = keys.clone().into();
            }
            post("/hint", &body)
        }
        CtlRequest::Evict { namespace } => post("/evict", &json!({ "namespace": namespace })),
        CtlRequest::LogLevel { level: None } => send_request(&target, "GET", "/log-level", ""),
        CtlRequest::LogLevel { level: Some(level) } => post("/log-level", &json!({ "level": level.name() })),
        CtlRequest::Drain => post("/drain", &json!({})),
    }
}

/// The entry of one namespace.
fn entry(page: &str, wanted: &str) -> Result<String, CtlError> {
    let page: Value = serde_json::from_str(page).map_err(|error| CtlError::Answer(error.to_string()))?;
    let mut entries = page["namespaces"].as_array().into_iter().flatten();
    let found = entries.find(|entry| entry["namespace"] == wanted);
    let found = found.ok_or_else(|| CtlError::Namespace(wanted.to_owned()))?;
    Ok(serde_json::to_string_pretty(found).expect("it was JSON") + "\n")
}

/// Reads keys or tokens separated by white space.
fn read_words<T: FromStr>(from: impl Read) -> Result<Vec<T>, CtlError>
where
    T::Err: std::fmt::Display,
{
    let mut text = String::new();
    from.take(INPUT_BYTES_MAX).read_to_string(&mut text).map_err(CtlError::Input)?;
    let parse = |word: &str| {
        let wrong = |error: T::Err| CtlError::Input(io::Error::other(format!("{word:?}: {error}")));
        word.parse().map_err(wrong)
    };
    text.split_whitespace().map(parse).collect()
}

// === impl CtlOptions ===

impl CtlOptions {
    fn target(&self) -> Result<ControlTarget, CtlError> {
        match (&self.address, &self.token_file) {
            (Some(address), Some(file)) => {
                Ok(ControlTarget::Tcp { address: address.clone(), token: config::read_token(file)? })
            }
            (None, None) => {
                let beside = || default_control_socket(&self.socket.clone().unwrap_or_else(default_socket));
                Ok(ControlTarget::Unix(self.control_socket.clone().unwrap_or_else(beside)))
            }
            _ => Err(CtlError::Pair),
        }
    }
}
