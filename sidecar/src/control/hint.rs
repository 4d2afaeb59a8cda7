//! `POST /hint`: an operator's hint for the chain of a prompt. docs/hints.md describes it.

use serde::Deserialize;
use serde_json::{Value, json};
use shm_protocol::hints::WrittenHint;
use tiers::dram::HintedCounts;

use super::Handler;
use super::refusals::{ControlRefusal, ControlRefusalCause};
use super::requests::{ANSWER_TIME_MAX, parse_body};
use super::score::scored_keys;
use crate::control::inbox::ControlAsk;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HintBody {
    action: String,
    seconds: Option<u32>,
    namespace: Option<String>,
    tokens: Option<Vec<u32>>,
    keys: Option<Vec<String>>,
}

// === impl Handler ===

impl Handler {
    pub(super) async fn hint(&self, body: &[u8]) -> Result<Value, ControlRefusal> {
        let HintBody { action, seconds, namespace, tokens, keys } = parse_body(body)?;
        let refuse = |error: shm_protocol::hints::HintError| {
            ControlRefusal::new(ControlRefusalCause::Malformed, error.to_string())
        };
        let hint = WrittenHint { action, seconds, tokens: None }.read_hint().map_err(refuse)?;
        let (digest, blocks) = self.scored_namespace(namespace.as_deref())?;
        let chain = Box::new(scored_keys(digest, &blocks, tokens, keys)?);
        let (count, action) = (chain.keys.len(), hint.advice.action().name());
        let ask = |reply| ControlAsk::Hint(chain, hint.advice, reply);
        let HintedCounts { done, clipped, missing } = self.ask_data_thread(ANSWER_TIME_MAX, ask).await?;
        tracing::info!(action, namespace = %digest, done, clipped, missing, "the control socket gave a hint");
        Ok(json!({
            "namespace": digest.to_string(), "action": action, "seconds": hint.advice.seconds(), "blocks": count,
            "done": done, "clipped": clipped, "missing": missing,
        }))
    }
}
