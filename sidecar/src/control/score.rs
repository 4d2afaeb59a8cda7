//! `POST /score`: how much of a prompt this pod has, for routers. docs/score.md describes it.

use std::time::Duration;

use prometheus::{Counter, IntCounter, Opts, Registry};
use serde::Deserialize;
use serde_json::{Value, json};
use shm_protocol::key::{BlockHash, Chain, KeyError, NamespaceDigest, read_block_tokens};
use shm_protocol::namespace;
use tokio::sync::Mutex;

use super::Handler;
use super::refusals::{ControlRefusal, ControlRefusalCause};
use super::requests::{ANSWER_TIME_MAX, hash_of, namespace_of, parse_body};
use crate::catalog::EngineBlocks;
use crate::control::inbox::{ControlAsk, NamedPlaces, ScoreStep};
use crate::core::{PromptPlaces, PromptScore, ScoredKeys};
use crate::pages::metrics::figures::{register_counter, register_metric};

/// The data thread's time for scores in a second: 5 %.
const SECOND_BUDGET: Duration = Duration::from_millis(50);
/// Seconds until a refused router may ask again: the longest wait for the next second's budget.
pub(super) const RETRY_SECONDS: u32 = 1;
/// Blocks of a prompt: 524,288 tokens in blocks of 16.
const BLOCKS_MAX: usize = 32_768;
/// Namespaces named in a refusal.
const NAMED_MAX: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScoreBody {
    /// 32 hex digits. Without it the connected engines must have one namespace.
    namespace: Option<String>,
    tokens: Option<Vec<u32>>,
    /// Block hashes in hex, as printed by `pillion keys`.
    keys: Option<Vec<String>>,
}

/// The budget of scores, and their figures.
#[derive(Debug)]
pub(super) struct Scoring {
    /// Locked during a step: the data thread's queue never holds more than one.
    budget: Mutex<ScoreBudget>,
    answered: IntCounter,
    seconds: Counter,
}

/// The budget of the present second. Time beyond it counts to the next one.
#[derive(Debug, Default)]
struct ScoreBudget {
    /// Begin of the present second.
    since: Duration,
    /// The part of all time for scores that is paid by earlier seconds.
    paid: Duration,
    /// The part of it in the figures.
    counted: Duration,
}

// === impl ScoreBudget ===

impl ScoreBudget {
    /// Returns the time until scores may go on, if they have taken so much `in_all` that the budget is spent.
    fn wait(&mut self, now: Duration, in_all: Duration) -> Option<Duration> {
        let seconds = now.saturating_sub(self.since).as_secs();
        self.since += Duration::from_secs(seconds);
        let pays = SECOND_BUDGET.saturating_mul(u32::try_from(seconds).unwrap_or(u32::MAX));
        self.paid += pays.min(in_all - self.paid);
        let until = self.since + Duration::from_secs(1);
        (in_all - self.paid >= SECOND_BUDGET).then(|| until.saturating_sub(now))
    }
}

// === impl Scoring ===

impl Scoring {
    /// Registers the counters, each with a zero.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let answered =
            register_counter(registry, "score_requests_total", "Scores of prompts given to routers.")?;
        let help = "Time that the thread which serves engines took for scores; at most 0.05 each second.";
        let seconds = Counter::with_opts(Opts::new("pillion_score_seconds_total", help))?;
        let seconds = register_metric(registry, seconds)?;
        Ok(Self { budget: Mutex::default(), answered, seconds })
    }
}

fn refuse_spent() -> ControlRefusal {
    let text = "scores have taken 5 % of this second of the thread that serves engines: ask again in a second, and \
         route this request by another rule";
    ControlRefusal::new(ControlRefusalCause::Budget, text)
}

fn refuse_facts(error: &KeyError) -> ControlRefusal {
    ControlRefusal::new(ControlRefusalCause::Unscored, error.to_string())
}

// === impl Handler ===

impl Handler {
    pub(super) async fn score(&self, body: &[u8]) -> Result<Value, ControlRefusal> {
        self.check_budget().await?;
        let body: ScoreBody = parse_body(body)?;
        let (digest, blocks) = self.scored_namespace(body.namespace.as_deref())?;
        let prompt = scored_keys(digest, &blocks, body.tokens, body.keys)?;
        let (block_tokens, tokens) = (prompt.block_tokens, prompt.tokens);
        let scored = self.follow_score(Box::new(PromptScore::new(prompt)));
        let (places, peers) = match tokio::time::timeout(ANSWER_TIME_MAX, scored).await {
            Ok(result) => result?,
            Err(_) => return Err(refuse_spent()),
        };
        self.scoring.answered.inc();
        let PromptPlaces { memory, disk, found, promised, expected_ms, .. } = places;
        Ok(json!({
            "namespace": digest.to_string(), "block_tokens": block_tokens, "tokens": tokens,
            // No engine tells its sidecar which blocks its device has.
            "device": null,
            "memory": memory, "disk": disk, "found": found, "peers": peers, "promised": promised,
            "expected_ms": expected_ms.map(|ms| (ms * 10.0).round() / 10.0),
        }))
    }

    /// Refuses a score while the budget is spent.
    async fn check_budget(&self) -> Result<(), ControlRefusal> {
        let wait = self.scoring.budget.lock().await.wait(self.clock.now(), self.parts.inbox.scored());
        wait.map_or(Ok(()), |_| Err(refuse_spent()))
    }

    /// Makes all steps of a score. The first one is refused if the budget is spent; the others wait for the next
    /// second.
    async fn follow_score(&self, mut score: Box<PromptScore>) -> Result<NamedPlaces, ControlRefusal> {
        self.check_budget().await?;
        loop {
            let mut budget = self.scoring.budget.lock().await;
            if let Some(wait) = budget.wait(self.clock.now(), self.parts.inbox.scored()) {
                drop(budget);
                tokio::time::sleep(wait).await;
                continue;
            }
            let step = self.ask_data_thread(ANSWER_TIME_MAX, |reply| ControlAsk::Score(score, reply)).await?;
            let ScoreStep { score: next, places } = step;
            let in_all = self.parts.inbox.scored();
            self.scoring.seconds.inc_by((in_all - budget.counted).as_secs_f64());
            budget.counted = in_all;
            if let Some(places) = places {
                return Ok(places);
            }
            score = next;
        }
    }

    /// Returns the named namespace, or the only one of the connected engines, with its blocks. Fails for a
    /// namespace whose blocks are of use without those before them.
    pub(super) fn scored_namespace(
        &self,
        named: Option<&str>,
    ) -> Result<(NamespaceDigest, EngineBlocks), ControlRefusal> {
        let wanted = named.map(namespace_of).transpose()?;
        let catalog = self.parts.catalog.lock();
        let has_runs = |blocks: &EngineBlocks| !namespace::has_parentless_blocks(&blocks.facts);
        let known: Vec<_> = catalog.blocks().filter(|(_, blocks, _)| has_runs(blocks)).collect();
        let mut meant =
            known.iter().filter(|(digest, _, is_served)| wanted.map_or(*is_served, |it| it == *digest));
        match (meant.next(), meant.next()) {
            (Some((digest, blocks, _)), None) => Ok((*digest, blocks.clone())),
            (first, _) => {
                let why = match (named, first) {
                    (Some(named), _) => {
                        format!(
                            "namespace {named} is unknown here, or has no leading runs, as of windows and states"
                        )
                    }
                    (None, Some(_)) => "engines of several namespaces are connected".to_owned(),
                    (None, None) => "no engine is connected".to_owned(),
                };
                Err(ControlRefusal::new(ControlRefusalCause::Unscored, name_known(&why, &known)))
            }
        }
    }
}

/// Returns a refusal with the namespaces to choose from.
fn name_known(why: &str, known: &[(NamespaceDigest, EngineBlocks, bool)]) -> String {
    if known.is_empty() {
        return format!("{why}: start the engine, and let it answer a first request");
    }
    let name = |(digest, EngineBlocks { facts, .. }, _): &(NamespaceDigest, EngineBlocks, bool)| {
        let model = ["model", "model_class"].iter().find_map(|name| facts.get(*name));
        model.map_or_else(|| digest.to_string(), |model| format!("{digest} ({model})"))
    };
    let names: Vec<String> = known.iter().take(NAMED_MAX).map(name).collect();
    let more = known.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(", or one of {more} more") } else { String::new() };
    format!("{why}: pass one of {}{more}", names.join(", "))
}

/// Returns the keys of a prompt. Tokens are hashed as the engines of the namespace do it.
pub(super) fn scored_keys(
    namespace: NamespaceDigest,
    blocks: &EngineBlocks,
    tokens: Option<Vec<u32>>,
    keys: Option<Vec<String>>,
) -> Result<ScoredKeys, ControlRefusal> {
    let block_tokens = read_block_tokens(&blocks.facts).map_err(|error| refuse_facts(&error))?;
    let most = |blocks: usize| match blocks <= BLOCKS_MAX {
        true => Ok(()),
        false => {
            let text =
                format!("the prompt has {blocks} blocks: pass {BLOCKS_MAX} at most, those of its beginning");
            Err(ControlRefusal::new(ControlRefusalCause::TooLarge, text))
        }
    };
    let (tokens, keys) = match (tokens, keys) {
        (Some(tokens), None) => {
            most(tokens.len() / block_tokens as usize)?;
            let (_, mut chain) = Chain::of_facts(&blocks.facts).map_err(|error| refuse_facts(&error))?;
            chain.append(&tokens);
            (tokens.len() as u64, chain.hashes().to_vec())
        }
        (None, Some(keys)) => {
            most(keys.len())?;
            let keys: Vec<BlockHash> = keys.iter().map(|key| hash_of(key)).collect::<Result<_, _>>()?;
            (keys.len() as u64 * u64::from(block_tokens), keys)
        }
        _ => {
            let text = "pass either tokens, a list of token ids, or keys, a list of block hashes in hex";
            return Err(ControlRefusal::new(ControlRefusalCause::Malformed, text));
        }
    };
    Ok(ScoredKeys { namespace, block_bytes: blocks.block_bytes, block_tokens, tokens, keys })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_take_their_part_of_each_second_and_pay_back_what_was_beyond_it() {
        let mut budget = ScoreBudget::default();
        let ms = Duration::from_millis;
        assert_eq!(budget.wait(ms(10), ms(0)), None);
        assert_eq!(budget.wait(ms(900), ms(49)), None);
        assert_eq!(budget.wait(ms(900), ms(109)), Some(ms(100)));
        assert_eq!(budget.wait(ms(1_000), ms(109)), Some(ms(1_000)), "59 ms are left to pay");
        assert_eq!(budget.wait(ms(1_999), ms(109)), Some(ms(1)));
        assert_eq!(budget.wait(ms(2_000), ms(109)), None, "9 ms are");
        assert_eq!(budget.wait(ms(60_500), ms(109)), None);
        assert_eq!(budget.wait(ms(60_500), ms(159)), Some(ms(500)), "time without scores is not saved");
    }

    #[test]
    fn a_refusal_names_the_namespaces_that_can_be_asked_for() {
        let blocks = |model: &str| EngineBlocks {
            facts: std::sync::Arc::new([("model".to_owned(), model.to_owned())].into()),
            block_bytes: 1,
            shards: 1,
        };
        let known: Vec<_> =
            (0..18).map(|digest| (NamespaceDigest([digest; 16]), blocks("tiny"), true)).collect();
        let text = name_known("none", &known[..2]);
        assert_eq!(text, format!("none: pass one of {} (tiny), {} (tiny)", "00".repeat(16), "01".repeat(16)));
        assert!(name_known("none", &known).ends_with(", or one of 2 more"));
        assert!(name_known("none", &[]).contains("first request"));
    }
}
