//! The control requests and their answers.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::header::{CONNECTION, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::prefill::PrefillRate;
use tokio::sync::oneshot;

use super::refusals::{ControlRefusal, ControlRefusalCause};
use super::{EndMarker, HINT_PATH, Handler, SCORE_PATH, page};
use crate::config::Severity;
use crate::control::inbox::{ControlAsk, Evicted, FoundBlock, KEYS_MAX, KnownRates, Reply};
use crate::core::KeptCounts;

/// The data thread takes a request within milliseconds; counting ten million blocks takes 0.1 s.
pub const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// Evicting some million blocks takes a second. An eviction goes on after this limit.
pub const EVICTION_TIME_MAX: Duration = Duration::from_secs(60);
/// Keys of one request: a prompt of 65,536 tokens in blocks of 16.
const LOOKUP_KEYS_MAX: usize = 4096;

const PATHS: &str = "GET /namespaces, POST /lookup, POST /score, POST /hint, POST /evict, GET or POST /log-level, POST /drain";

#[derive(Deserialize)]
struct Evict {
    namespace: String,
}

#[derive(Deserialize)]
struct Lookup {
    namespace: String,
    /// Block hashes in hex, as printed by `pillion keys`.
    keys: Vec<String>,
}

#[derive(Deserialize)]
struct SetLevel {
    level: String,
}

fn rates_page(rates: &KnownRates) -> Value {
    let engine = |(engine, rate, token_bytes): &(String, PrefillRate, f64)| {
        let (token_ns, slope_ns) = rate.nanoseconds();
        json!({ "engine": engine, "token_ns": token_ns, "slope_ns": slope_ns, "token_bytes": token_bytes })
    };
    let source = |(source, rate): &(String, u64)| json!({ "source": source, "bytes_per_second": rate });
    let engines: Vec<Value> = rates.engines.iter().map(engine).collect();
    let sources: Vec<Value> = rates.sources.iter().map(source).collect();
    json!({ "engines": engines, "sources": sources })
}

// === impl Handler ===

impl Handler {
    pub(super) async fn answer_request(
        &self,
        method: &Method,
        path: &str,
        body: &[u8],
    ) -> Result<Response<String>, ControlRefusal> {
        let answer = match (method.as_str(), path) {
            ("GET", "/namespaces") => self.namespaces().await?,
            ("GET", "/forecast") => {
                let (asked, found) = self.parts.forecast.block_counts();
                json!({ "asked_blocks": asked, "hit_blocks": found.collect::<BTreeMap<_, _>>() })
            }
            ("GET", "/rates") => rates_page(&self.ask_data_thread(ANSWER_TIME_MAX, ControlAsk::Rates).await?),
            ("POST", "/lookup") => self.lookup(parse_body(body)?).await?,
            ("POST", SCORE_PATH) => self.score(body).await?,
            ("POST", HINT_PATH) => self.hint(body).await?,
            ("POST", "/evict") => self.evict(parse_body(body)?).await?,
            ("GET", "/log-level") => self.show_level()?,
            ("POST", "/log-level") => self.set_level(parse_body(body)?)?,
            ("POST", "/drain") => {
                tracing::info!("the control socket asked this sidecar to drain");
                return Ok(last(page(StatusCode::OK, &json!({ "draining": true }))));
            }
            (
                _,
                "/namespaces" | "/forecast" | "/rates" | "/lookup" | SCORE_PATH | HINT_PATH | "/evict"
                | "/log-level" | "/drain",
            ) => {
                return Err(ControlRefusal::new(
                    ControlRefusalCause::Method,
                    format!("no such request: the requests are {PATHS}"),
                ));
            }
            _ => {
                return Err(ControlRefusal::new(
                    ControlRefusalCause::Path,
                    format!("no such request: the requests are {PATHS}"),
                ));
            }
        };
        Ok(page(StatusCode::OK, &answer))
    }

    /// Sends a request to the data thread, and waits for its answer.
    pub(super) async fn ask_data_thread<T>(
        &self,
        limit: Duration,
        ask: impl FnOnce(Reply<T>) -> ControlAsk,
    ) -> Result<T, ControlRefusal> {
        let (reply, answer) = oneshot::channel();
        if !self.parts.inbox.post_ask(ask(reply)) {
            return Err(ControlRefusal::new(
                ControlRefusalCause::Busy,
                "too many control requests are waiting: try again",
            ));
        }
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(ControlRefusal::new(
                ControlRefusalCause::Unanswered,
                "the sidecar is ending: ask again once it has restarted",
            )),
            Err(_) => {
                let text = format!(
                    "the data thread has not answered for {} s: look at /healthz, and at the log. The request itself \
                     goes on",
                    limit.as_secs()
                );
                Err(ControlRefusal::new(ControlRefusalCause::Unanswered, text))
            }
        }
    }

    async fn lookup(&self, Lookup { namespace, keys }: Lookup) -> Result<Value, ControlRefusal> {
        let digest = namespace_of(&namespace)?;
        if keys.len() > LOOKUP_KEYS_MAX {
            let text = format!("the request has {} keys: pass {LOOKUP_KEYS_MAX} at most", keys.len());
            return Err(ControlRefusal::new(ControlRefusalCause::TooLarge, text));
        }
        let hashes: Vec<BlockHash> = keys.iter().map(|key| hash_of(key)).collect::<Result<_, _>>()?;
        let mut located: Vec<FoundBlock> = Vec::with_capacity(hashes.len());
        for part in hashes.chunks(KEYS_MAX) {
            let ask = |reply| ControlAsk::Locate(digest, part.to_vec(), reply);
            located.extend(self.ask_data_thread(ANSWER_TIME_MAX, ask).await?);
        }
        let shown = keys.iter().zip(located).map(|(key, FoundBlock { memory, disk, peers })| {
            json!({ "key": key, "memory": memory, "disk": disk, "peers": peers })
        });
        Ok(json!({ "namespace": namespace, "keys": shown.collect::<Vec<Value>>() }))
    }

    async fn evict(&self, Evict { namespace }: Evict) -> Result<Value, ControlRefusal> {
        let digest = namespace_of(&namespace)?;
        match self.ask_data_thread(EVICTION_TIME_MAX, |reply| ControlAsk::Evict(digest, reply)).await? {
            Evicted::Removed(KeptCounts { memory, below: disk }) => {
                tracing::info!(namespace, memory, disk, "the control socket evicted a namespace");
                Ok(json!({ "namespace": namespace, "memory_blocks": memory, "disk_blocks": disk }))
            }
            Evicted::Unknown => {
                let text = format!(
                    "namespace {namespace} has no block here: pillion ctl namespaces lists those that have"
                );
                Err(ControlRefusal::new(ControlRefusalCause::Namespace, text))
            }
            Evicted::Recovering => {
                let text = "blocks of an earlier sidecar are still being found or verified: try again once /readyz says \
                     only ready and pillion_adoption_unverified_blocks is 0";
                Err(ControlRefusal::new(ControlRefusalCause::Starting, text))
            }
        }
    }

    fn show_level(&self) -> Result<Value, ControlRefusal> {
        self.parts.log.get().map(|level| json!({ "level": level.name() })).ok_or_else(no_log)
    }

    fn set_level(&self, SetLevel { level }: SetLevel) -> Result<Value, ControlRefusal> {
        let level: Severity = level
            .parse()
            .map_err(|text: String| ControlRefusal::new(ControlRefusalCause::Malformed, text))?;
        let before = self.parts.log.set_level(level).ok_or_else(no_log)?;
        tracing::info!(
            level = level.name(),
            before = before.name(),
            "the control socket changed the log level"
        );
        Ok(json!({ "level": level.name(), "before": before.name() }))
    }
}

/// Marks the last answer: the connection closes after it, then the sidecar ends.
fn last(mut answer: Response<String>) -> Response<String> {
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer.extensions_mut().insert(EndMarker);
    answer
}

fn no_log() -> ControlRefusal {
    ControlRefusal::new(
        ControlRefusalCause::Path,
        "the log level of this process cannot be changed: only pillion serve supports it",
    )
}

pub(super) fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ControlRefusal> {
    serde_json::from_slice(body)
        .map_err(|error| ControlRefusal::new(ControlRefusalCause::Malformed, error.to_string()))
}

pub(super) fn namespace_of(text: &str) -> Result<NamespaceDigest, ControlRefusal> {
    let bytes = bytes_of(text).and_then(|bytes| bytes.try_into().ok());
    bytes.map(NamespaceDigest).ok_or_else(|| {
        let text = format!(
            "{:?} is not a namespace: write its 32 hex digits, as pillion ctl namespaces shows them",
            shorten_text(text)
        );
        ControlRefusal::new(ControlRefusalCause::Malformed, text)
    })
}

pub(super) fn hash_of(text: &str) -> Result<BlockHash, ControlRefusal> {
    let hash = bytes_of(text).and_then(|bytes| BlockHash::from_slice(&bytes).ok());
    hash.ok_or_else(|| {
        let text = format!(
            "{:?} is not a key: write the 32 or 64 hex digits of a block's hash, as pillion keys prints them",
            shorten_text(text)
        );
        ControlRefusal::new(ControlRefusalCause::Malformed, text)
    })
}

/// The first 80 characters of a text, for an error.
fn shorten_text(text: &str) -> String {
    text.chars().take(80).collect()
}

/// The bytes of hex digits, two digits a byte; `None` for other characters or an odd number of digits.
fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_digits_are_namespaces_and_keys_of_their_lengths_alone() {
        assert_eq!(bytes_of("00fFa5"), Some(vec![0, 255, 0xa5]));
        for wrong in ["0", "0g", "+1", "é0"] {
            assert_eq!(bytes_of(wrong), None, "{wrong}");
        }
        let digits = |count: usize| "ab".repeat(count / 2);
        assert_eq!(namespace_of(&digits(32)).unwrap(), NamespaceDigest([0xab; 16]));
        assert!(namespace_of(&digits(64)).unwrap_err().text.contains("pillion ctl namespaces"));
        assert_eq!(hash_of(&digits(64)).unwrap(), BlockHash([0xab; 32]));
        assert_eq!(hash_of(&digits(32)).unwrap().0[16..], [0; 16]);
        assert!(hash_of(&digits(34)).unwrap_err().text.contains("pillion keys"));
    }
}
