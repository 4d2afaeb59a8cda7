//! The connector's options: the `pillion.*` keys of vLLM's `kv_connector_extra_config`, checked at an engine's start. docs/options.md is
//! made of [`OPTIONS`].

mod settings;
mod table;

use std::fmt;

use thiserror::Error;

pub use self::settings::EngineSettings;
pub use self::table::OPTIONS;

/// The beginning of each option's key.
pub const PREFIX: &str = "pillion.";
/// A key without the prefix counts as misspelt if at most one of so many of its letters differs from an option's key: `pilion.mode`.
const LETTERS_OF_A_SLIP: usize = 5;

/// An option of an engine.
#[derive(Debug)]
pub struct EngineOption {
    /// The key behind [`PREFIX`].
    pub name: &'static str,
    /// The value of an option left out.
    pub default: DefaultValue,
    /// The values it may have.
    pub values: Values,
    /// Its effect.
    pub meaning: &'static str,
}

/// The value of an option left out.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum DefaultValue {
    /// The same value as `pillion serve`.
    AsServe,
    /// No value.
    Absent,
    /// A number.
    Count(u32),
    /// A text.
    Text(&'static str),
    /// A number with decimals, as it is written.
    Number(&'static str),
}

/// The values an option may have.
#[derive(Debug)]
pub enum Values {
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// A whole number of `unit`, up to `most`. `zero`: the meaning of 0, if it is not just none of them.
    Count {
        /// The largest number.
        most: u32,
        /// The unit of the number.
        unit: &'static str,
        /// The meaning of `0`.
        zero: &'static str,
    },
    /// A number with or without decimals, from 0 up to `most`.
    Number {
        /// The largest number.
        most: u32,
    },
    /// Any text.
    Text,
    /// The address of an HTTP service.
    Url,
    /// A namespace as logs show it.
    Namespace,
}

/// A value given by a user.
#[derive(Clone, Debug, PartialEq)]
pub enum GivenValue {
    /// A whole number.
    Count(u32),
    /// A number with decimals.
    Number(f64),
    /// A text.
    Text(String),
    /// A value of no option.
    Other,
}

/// A wrong option; the text names the valid ones.
#[derive(Debug, Eq, Error, PartialEq)]
pub enum OptionError {
    /// A key of no option.
    #[error("unknown option {0} in kv_connector_extra_config: use one of {names}", names = names())]
    Unknown(String),
    /// An option against the engine's other settings.
    #[error("{0}")]
    Unfit(&'static str),
    /// A value an option may not have.
    #[error("{PREFIX}{name} is {shown}; it must be {rule}")]
    Value {
        /// The option.
        name: &'static str,
        /// The value, as the user's language writes it.
        shown: String,
        /// The rule of valid values.
        rule: String,
    },
}

/// Every option's key.
fn names() -> String {
    OPTIONS.map(|option| format!("{PREFIX}{}", option.name)).join(", ")
}

/// Returns the option of a key, or `None` for a key of another connector. Fails for a key that begins like an
/// option, or nearly is one.
pub fn check_key(key: &str) -> Result<Option<&'static EngineOption>, OptionError> {
    let Some(name) = key.strip_prefix(PREFIX) else {
        return if is_nearly_ours(key) { Err(OptionError::Unknown(key.to_owned())) } else { Ok(None) };
    };
    let known = OPTIONS.iter().find(|option| option.name == name);
    known.map_or_else(|| Err(OptionError::Unknown(key.to_owned())), |option| Ok(Some(option)))
}

/// True if a key without the prefix must be a misspelt one: `pilion.mode`, `Pillion.mode`, `pillion_mode`.
fn is_nearly_ours(key: &str) -> bool {
    let key = key.to_lowercase();
    OPTIONS.iter().any(|option| {
        let ours = format!("{PREFIX}{}", option.name);
        differing_letters(&key, &ours) * LETTERS_OF_A_SLIP <= ours.len()
    })
}

/// The fewest letters to add, drop or replace that make one text the other.
fn differing_letters(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (place, theirs) in other.chars().enumerate() {
            let replaced = diagonal + usize::from(letter != theirs);
            diagonal = row[place + 1];
            row[place + 1] = replaced.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row.pop().expect("a row has a first place")
}

// === impl EngineOption ===

impl EngineOption {
    /// Fails for a value that the option may not have. `shown`: the value as the user's language writes it.
    pub fn check_value(&self, value: &GivenValue, shown: impl FnOnce() -> String) -> Result<(), OptionError> {
        if self.values.admits_value(value) {
            return Ok(());
        }
        Err(OptionError::Value { name: self.name, shown: shown(), rule: self.values.rule() })
    }
}

impl fmt::Display for DefaultValue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AsServe => formatter.write_str("as `pillion serve`"),
            Self::Absent => formatter.write_str("none"),
            Self::Count(count) => write!(formatter, "`{count}`"),
            Self::Text(text) | Self::Number(text) => write!(formatter, "`{text}`"),
        }
    }
}

// === impl Values ===

impl Values {
    /// Returns the rule of valid values in words.
    pub fn rule(&self) -> String {
        match self {
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::Count { most, unit, zero } => format!("a whole number of {unit}, {zero} to {most}"),
            Self::Number { most } => format!("a number, 0 to {most}"),
            Self::Text => "a text that is not empty".to_owned(),
            Self::Url => "an http or https URL with its path".to_owned(),
            Self::Namespace => "32 lower-case hex digits, as the log shows them".to_owned(),
        }
    }

    fn admits_value(&self, value: &GivenValue) -> bool {
        match (self, value) {
            (Self::Count { most, .. } | Self::Number { most }, GivenValue::Count(count)) => count <= most,
            (Self::Number { most }, GivenValue::Number(number)) => (0.0..=f64::from(*most)).contains(number),
            (Self::OneOf(words), GivenValue::Text(text)) => words.contains(&text.as_str()),
            (Self::Text, GivenValue::Text(text)) => !text.is_empty(),
            (Self::Url, GivenValue::Text(text)) => is_url(text),
            (Self::Namespace, GivenValue::Text(text)) => {
                text.len() == 32 && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
            }
            _ => false,
        }
    }
}

/// True for an address with a host and a path.
fn is_url(text: &str) -> bool {
    let behind = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let parts = behind.and_then(|behind| behind.split_once('/'));
    parts.is_some_and(|(host, _)| !host.is_empty() && !text.contains(char::is_whitespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(key: &str, value: GivenValue) -> Result<Option<&'static str>, String> {
        let read = |option: &'static EngineOption| {
            option.check_value(&value, || format!("{value:?}")).map(|()| option.name)
        };
        check_key(key).and_then(|option| option.map(read).transpose()).map_err(|error| error.to_string())
    }

    fn text(text: &str) -> GivenValue {
        GivenValue::Text(text.to_owned())
    }

    fn default(name: &str) -> DefaultValue {
        OPTIONS.iter().find(|option| option.name == name).expect("an option").default
    }

    /// An option left out has a valid value.
    #[test]
    fn defaults() {
        for option in &OPTIONS {
            let value = match option.default {
                DefaultValue::AsServe | DefaultValue::Absent => continue,
                DefaultValue::Count(count) => GivenValue::Count(count),
                DefaultValue::Text(word) => text(word),
                DefaultValue::Number(number) => GivenValue::Number(number.parse().expect("a number")),
            };
            assert_eq!(option.check_value(&value, String::new), Ok(()), "{}", option.name);
        }
    }

    #[test]
    fn a_namespace_is_taken_as_it_is_shown() {
        assert_eq!(read("pillion.namespace", text(&"0a".repeat(16))), Ok(Some("namespace")));
        assert_eq!(default("namespace"), DefaultValue::Absent);
    }

    #[test]
    fn requests_wait_for_a_producer_only_where_told_to() {
        assert_eq!(default("miss_wait_ms"), DefaultValue::Count(0));
        assert_eq!(read("pillion.miss_wait_ms", GivenValue::Count(2000)), Ok(Some("miss_wait_ms")));
    }

    #[test]
    fn loading_is_preferred_by_any_number() {
        assert_eq!(read("pillion.load_preference", GivenValue::Count(2)), Ok(Some("load_preference")));
        assert_eq!(read("pillion.load_preference", GivenValue::Number(0.5)), Ok(Some("load_preference")));
    }

    #[test]
    fn records_go_where_they_are_told_to() {
        assert_eq!(read("pillion.record_otlp", text("http://[::1]:4318/v1/traces")), Ok(Some("record_otlp")));
        assert_eq!(default("record_otlp"), DefaultValue::Absent);
    }

    #[test]
    fn other_connectors_keys_are_left_alone() {
        for key in ["lmcache.host", "lmcache.mode", "mode", "load", "connectors", "bench.namespace"] {
            assert_eq!(read(key, text("x")), Ok(None), "{key}");
        }
    }

    #[test]
    fn errors_name_the_valid_values() {
        let cases = [
            ("pillion.sockett", text("/s"), "pillion.query_timeout_us"),
            ("pilion.mode", text("save_only"), "unknown option pilion.mode"),
            ("Pillion.load", text("sync"), "unknown option Pillion.load"),
            ("pillion_mode", text("save_only"), "unknown option pillion_mode"),
            ("pillon.check_every", GivenValue::Count(0), "unknown option pillon.check_every"),
            ("pillion.mode", text("write"), "save_only"),
            ("pillion.load", text("lazy"), "async"),
            ("pillion.layout", text("NHD"), "BLNHC"),
            ("pillion.copy", text("gpu"), "sidecar"),
            ("pillion.socket", text(""), "not empty"),
            ("pillion.salt", text(""), "not empty"),
            ("pillion.salt", GivenValue::Count(7), "a text"),
            ("pillion.query_timeout_us", GivenValue::Count(10_000_001), "10000000"),
            ("pillion.query_timeout_us", text("2ms"), "10000000"),
            ("pillion.query_timeout_us", GivenValue::Other, "10000000"),
            ("pillion.miss_wait_ms", GivenValue::Count(2001), "0 (off) to 2000"),
            ("pillion.wait_max_ms", GivenValue::Count(600_001), "0 to 600000"),
            ("pillion.load_preference", GivenValue::Number(100.5), "a number, 0 to 100"),
            ("pillion.load_preference", GivenValue::Number(f64::NAN), "a number, 0 to 100"),
            ("pillion.load_preference", text("2"), "a number, 0 to 100"),
            ("pillion.namespace", text(&"0".repeat(31)), "32 lower-case hex digits"),
            ("pillion.namespace", text(&"A".repeat(32)), "32 lower-case hex digits"),
            ("pillion.namespace", GivenValue::Count(7), "32 lower-case hex digits"),
            ("pillion.record_every", GivenValue::Other, "0 (none) to 1000000"),
            ("pillion.record_slow_ms", GivenValue::Count(3_600_001), "0 (every request) to 3600000"),
            ("pillion.record_otlp", text("collector:4318"), "an http or https URL with its path"),
            ("pillion.record_otlp", text("http://collector:4318"), "an http or https URL with its path"),
        ];
        for (key, value, named) in cases {
            let said = read(key, value).expect_err(key);
            assert!(said.contains(named) && said.contains(key), "{said}");
        }
    }
}
