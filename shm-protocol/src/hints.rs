//! Hints of clients for the blocks of a chain. This is the one home of their schema, published in docs/hints.md: of the
//! member `pillion` of `kv_transfer_params`, of vLLM's `kv_hints`, and of the requests of `pillion ctl`.

use serde::Deserialize;
use serde_json::{Map, Value};
use thiserror::Error;

/// The longest time of a hint.
pub const SECONDS_MAX: u32 = 3600;
/// The time of a hint without one.
pub const SECONDS_DEFAULT: u32 = 300;
/// The most hints of one request: one of each action.
pub const HINTS_MAX: usize = HintAction::ALL.len();
/// The version of the actions in vLLM's `kv_hints`, and the begin of their types.
const ENVELOPE_VERSION: &str = "1";
const ENVELOPE_PREFIX: &str = "pillion.";
/// The word, also in an envelope, for a conversation's last request.
const LAST: &str = "last";

crate::named! {
    /// The action of a hint.
    #[derive(Ord, PartialOrd)]
    pub enum HintAction {
        /// The blocks go after all others of their engine.
        Retain = "retain",
        /// The blocks are not evicted.
        Pin = "pin",
        /// The blocks go next, unless other conversations use them.
        Demote = "demote",
        /// The blocks come from disks and peers into DRAM.
        Prefetch = "prefetch",
    }
}

crate::named! {
    /// The end of a hint.
    pub enum HintEnd {
        /// It was carried out for each of its blocks, or the block is being saved.
        Done = "done",
        /// The engine's limit left some blocks out.
        Clipped = "clipped",
        /// Some blocks are nowhere, or no sidecar knows hints.
        Missing = "missing",
        /// It breaks the schema.
        Refused = "refused",
    }
}

/// An action with its time, 1 to [`SECONDS_MAX`] seconds.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Advice {
    /// See [`HintAction::Retain`].
    Retain {
        /// How long.
        seconds: u32,
    },
    /// See [`HintAction::Pin`].
    Pin {
        /// How long.
        seconds: u32,
    },
    /// See [`HintAction::Demote`].
    Demote,
    /// See [`HintAction::Prefetch`].
    Prefetch,
}

/// One hint.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Hint {
    /// The action and its time.
    pub advice: Advice,
    /// The number of its leading tokens; `None`: all.
    pub tokens: Option<u32>,
}

/// The hints of one request.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RequestHints {
    /// The conversation ends with this request.
    pub last: bool,
    /// At most [`HINTS_MAX`].
    pub hints: Vec<Hint>,
}

/// The breach of the schema, and the remedy.
#[derive(Clone, Debug, Error, Eq, PartialEq)]
#[error("{0}")]
pub struct HintError(String);

/// A hint as it is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenHint {
    /// The name of a [`HintAction`].
    pub action: String,
    /// For retain and pin.
    pub seconds: Option<u32>,
    /// The number of its leading tokens.
    pub tokens: Option<u32>,
}

/// An action of vLLM's `kv_hints`.
#[derive(Deserialize)]
struct EnvelopeAction {
    action_type: String,
    action_version: String,
    payload: Map<String, Value>,
}

#[derive(Deserialize)]
struct Envelope {
    actions: Vec<EnvelopeAction>,
}

fn refuse<T>(text: impl Into<String>) -> Result<T, HintError> {
    Err(HintError(text.into()))
}

// === impl Advice ===

impl Advice {
    /// Makes the advice of an action; its time is [`SECONDS_DEFAULT`] if none is stated. Fails for a time outside of the
    /// action's limits.
    pub fn new(action: HintAction, seconds: Option<u32>) -> Result<Self, HintError> {
        let (is_timed, stated) = (matches!(action, HintAction::Retain | HintAction::Pin), seconds);
        let seconds = seconds.unwrap_or(SECONDS_DEFAULT);
        if is_timed && !(1..=SECONDS_MAX).contains(&seconds) {
            return refuse(format!("{action} for {seconds} seconds: pass 1 to {SECONDS_MAX}"));
        }
        if !is_timed && stated.is_some() {
            return refuse(format!("{action} has no time: leave out seconds"));
        }
        Ok(match action {
            HintAction::Retain => Self::Retain { seconds },
            HintAction::Pin => Self::Pin { seconds },
            HintAction::Demote => Self::Demote,
            HintAction::Prefetch => Self::Prefetch,
        })
    }

    /// The action.
    pub fn action(self) -> HintAction {
        match self {
            Self::Retain { .. } => HintAction::Retain,
            Self::Pin { .. } => HintAction::Pin,
            Self::Demote => HintAction::Demote,
            Self::Prefetch => HintAction::Prefetch,
        }
    }

    /// The time in seconds; 0 without one.
    pub fn seconds(self) -> u32 {
        match self {
            Self::Retain { seconds } | Self::Pin { seconds } => seconds,
            Self::Demote | Self::Prefetch => 0,
        }
    }
}

// === impl Hint ===

impl Hint {
    /// Reads a hint written as a JSON object.
    pub fn read_json(json: &str) -> Result<Self, HintError> {
        let written = serde_json::from_str::<WrittenHint>(json).map_err(|error| HintError(error.to_string()));
        written.and_then(|written| written.read_hint())
    }
}

// === impl WrittenHint ===

impl WrittenHint {
    /// Checks the hint.
    pub fn read_hint(&self) -> Result<Hint, HintError> {
        let Some(action) = HintAction::named(&self.action) else {
            let names = HintAction::ALL.map(HintAction::name).join(", ");
            return refuse(format!("{:?} is no action: pass one of {names}", shorten_text(&self.action)));
        };
        if self.tokens == Some(0) {
            return refuse("tokens is 0: pass the number of leading tokens, or leave it out");
        }
        Ok(Hint { advice: Advice::new(action, self.seconds)?, tokens: self.tokens })
    }
}

/// The first 40 characters of a client's text, for an error.
fn shorten_text(text: &str) -> String {
    text.chars().take(40).collect()
}

// === impl RequestHints ===

impl RequestHints {
    /// Reads the member `pillion` of `kv_transfer_params`, as JSON. Members beside `last` and `hints` are of routers.
    /// The last request counts also if the hints are refused.
    pub fn read_params(json: &str) -> (bool, Result<Self, HintError>) {
        let Ok(Value::Object(mut own)) = serde_json::from_str(json) else {
            return (false, refuse("pillion is no object: write {\"hints\": [{\"action\": \"retain\"}]}"));
        };
        let last = own.get(LAST) == Some(&Value::Bool(true));
        let hints = match own.remove("hints") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(hints)) => hints.into_iter().enumerate().map(read_written).collect(),
            Some(_) => refuse("hints is no list: write [{\"action\": \"retain\"}]"),
        };
        (last, hints.and_then(|hints| Self { last, hints }.check_together()))
    }

    /// Reads vLLM's `kv_hints`, as JSON. Actions without `pillion.` before their types are of others.
    pub fn read_envelope(json: &str) -> Result<Self, HintError> {
        let envelope: Envelope = match serde_json::from_str(json) {
            Ok(envelope) => envelope,
            Err(error) => return refuse(format!("kv_hints is no envelope of vLLM: {error}")),
        };
        let mut read = Self::default();
        let own = envelope.actions.into_iter().enumerate();
        for (at, EnvelopeAction { action_type, action_version, mut payload }) in own {
            let Some(action) = action_type.strip_prefix(ENVELOPE_PREFIX) else { continue };
            if action_version != ENVELOPE_VERSION {
                let version = shorten_text(&action_version);
                return refuse(format!("action {at} has version {version:?}: pass {ENVELOPE_VERSION:?}"));
            }
            if action == LAST {
                read.last = true;
                continue;
            }
            payload.insert("action".to_owned(), action.into());
            read.hints.push(read_written((at, Value::Object(payload)))?);
        }
        read.check_together()
    }

    /// Adds hints of another source. Fails if both contradict each other.
    pub fn join_hints(mut self, other: Self) -> Result<Self, HintError> {
        self.last |= other.last;
        self.hints.extend(other.hints);
        self.check_together()
    }

    fn check_together(self) -> Result<Self, HintError> {
        let has = |action| self.hints.iter().filter(|hint| hint.advice.action() == action).count();
        if let Some(twice) = HintAction::ALL.into_iter().find(|action| has(*action) > 1) {
            return refuse(format!("{twice} is there twice: pass it once"));
        }
        let ends = [HintAction::Retain, HintAction::Pin, HintAction::Demote].map(has);
        if ends.iter().sum::<usize>() + usize::from(self.last) > 1 {
            return refuse("of retain, pin, demote and last a request has one: leave out the others");
        }
        Ok(self)
    }
}

fn read_written((at, hint): (usize, Value)) -> Result<Hint, HintError> {
    let written = WrittenHint::deserialize(hint).map_err(|error| HintError(error.to_string()));
    written
        .and_then(|written| written.read_hint())
        .map_err(|HintError(text)| HintError(format!("hint {at}: {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIN: Hint = Hint { advice: Advice::Pin { seconds: 60 }, tokens: Some(2000) };

    fn read(json: &str) -> Result<Vec<Hint>, String> {
        RequestHints::read_params(json).1.map(|read| read.hints).map_err(|error| error.to_string())
    }

    #[test]
    fn hints_are_read_with_their_defaults_and_members_of_routers_are_left() {
        let json = r#"{"tokens": 9, "hints": [{"action": "pin", "seconds": 60, "tokens": 2000}, {"action": "prefetch"}]}"#;
        let prefetch = Hint { advice: Advice::Prefetch, tokens: None };
        assert_eq!(read(json), Ok(vec![PIN, prefetch]));
        let retain = Hint { advice: Advice::Retain { seconds: SECONDS_DEFAULT }, tokens: None };
        assert_eq!(read(r#"{"hints": [{"action": "retain"}]}"#), Ok(vec![retain]));
        for none in ["{}", r#"{"hints": null}"#, r#"{"hints": []}"#, r#"{"tokens": 7}"#] {
            assert_eq!(read(none), Ok(vec![]), "{none}");
        }
    }

    #[test]
    fn only_true_ends_a_conversation_also_beside_wrong_hints() {
        for (json, last) in
            [("{\"last\": true}", true), ("{\"last\": 1}", false), ("{\"last\": \"true\"}", false)]
        {
            let (said, read) = RequestHints::read_params(json);
            assert_eq!((said, read), (last, Ok(RequestHints { last, hints: vec![] })), "{json}");
        }
        let (last, read) = RequestHints::read_params(r#"{"last": true, "hints": 3}"#);
        assert!(last && read.is_err());
    }

    #[test]
    fn a_wrong_hint_is_refused_with_its_remedy() {
        let hint = |fields: &str| read(&format!(r#"{{"hints": [{{{fields}}}]}}"#));
        let cases = [
            (
                r#""action": "keep""#,
                r#"hint 0: "keep" is no action: pass one of retain, pin, demote, prefetch"#,
            ),
            (r#""action": "pin", "seconds": 0"#, "hint 0: pin for 0 seconds: pass 1 to 3600"),
            (r#""action": "pin", "seconds": 3601"#, "hint 0: pin for 3601 seconds: pass 1 to 3600"),
            (r#""action": "demote", "seconds": 1"#, "hint 0: demote has no time: leave out seconds"),
            (r#""action": "pin", "tokens": 0"#, "hint 0: tokens is 0: pass the number of leading tokens"),
            (r#""action": "pin", "ttl": 9"#, "hint 0: unknown field `ttl`, expected one of"),
            (r#""seconds": 9"#, "hint 0: missing field `action`"),
            (r#""action": "pin", "seconds": -1"#, "hint 0: invalid value"),
            (r#""action": "pin"}, {"action": "pin""#, "pin is there twice"),
            (r#""action": "pin"}, {"action": "demote""#, "of retain, pin, demote and last a request has one"),
        ];
        for (fields, text) in cases {
            let error = hint(fields).expect_err(fields);
            assert!(error.starts_with(text), "{error}");
        }
        assert!(read(r#"{"last": true, "hints": [{"action": "pin"}]}"#).is_err());
        assert!(read("[1]").expect_err("a list").starts_with("pillion is no object"));
        assert!(read(r#"{"hints": {}}"#).expect_err("an object").starts_with("hints is no list"));
    }

    #[test]
    fn an_envelope_of_vllm_has_actions_of_others_too() {
        let action = |kind: &str, version: &str, payload: &str| {
            format!(
                r#"{{"action_id": "a", "action_type": "{kind}", "action_version": "{version}", "payload": {payload}}}"#
            )
        };
        let envelope = |actions: &[String]| {
            let json = actions.join(",");
            let json = format!(r#"{{"protocol_version": "1", "message_id": "m", "actions": [{json}]}}"#);
            RequestHints::read_envelope(&json).map_err(|error| error.to_string())
        };
        let foreign = action("kv.fetch", "9", "{\"x\": [1]}");
        let pin = action("pillion.pin", "1", r#"{"seconds": 60, "tokens": 2000}"#);
        let read = envelope(&[foreign.clone(), pin]).expect("well formed");
        assert_eq!(read, RequestHints { last: false, hints: vec![PIN] });
        let last = envelope(&[action("pillion.last", "1", "{}")]).expect("well formed");
        assert!(last.last);
        assert!(last.clone().join_hints(read).is_err(), "they contradict each other");
        assert_eq!(last.clone().join_hints(RequestHints::default()), Ok(last));
        assert_eq!(envelope(&[foreign]), Ok(RequestHints::default()));
        let version = envelope(&[action("pillion.pin", "2", "{}")]).expect_err("a version");
        assert_eq!(version, "action 0 has version \"2\": pass \"1\"");
        let unknown = envelope(&[action("pillion.keep", "1", "{}")]).expect_err("an action");
        assert!(unknown.starts_with("hint 0: \"keep\" is no action"), "{unknown}");
        assert!(RequestHints::read_envelope("7").is_err());
    }
}
