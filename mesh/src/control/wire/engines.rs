//! Engines in a greeting: the OpenAI servers of a node's engines, for routers.
//!
//! An older server states none. An engine of an unknown role is skipped.

use std::str::FromStr;

use serde::Deserialize;

use super::super::check_peer;

/// Maximum engines of a node; later ones are dropped.
pub const ENGINES_MAX: usize = 16;
/// Maximum bytes of an engine's URL: the longest DNS name, with a scheme and a port.
const URL_BYTES_MAX: usize = "https://".len() + 253 + ":65535".len();

shm_protocol::named! {
    /// The work of an engine on prompts.
    pub enum EngineUse {
        /// It computes prompts for other engines.
        Prefill = "prefill",
        /// It answers prompts of prefill engines.
        Decode = "decode",
        /// It computes and answers.
        Both = "both",
    }
}

/// An engine of a node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub struct AnnouncedEngine {
    /// `http://HOST:PORT` or `https://HOST:PORT` of its OpenAI server.
    pub url: String,
    pub role: EngineUse,
}

/// An engine in a greeting.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EngineMessage {
    #[prost(string, tag = "1")]
    pub url: String,
    /// The name of its role.
    #[prost(string, tag = "2")]
    pub role: String,
}

// === impl AnnouncedEngine ===

impl AnnouncedEngine {
    fn new(url: &str, role: EngineUse) -> Option<Self> {
        let authority = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"))?;
        let is_url = url.len() <= URL_BYTES_MAX && authority.bytes().all(|byte| byte.is_ascii_graphic());
        (is_url && check_peer(authority).is_ok()).then(|| Self { url: url.to_owned(), role })
    }
}

impl FromStr for AnnouncedEngine {
    type Err = String;

    /// Reads `URL=ROLE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (url, role) = text.rsplit_once('=')?;
            Self::new(url, EngineUse::named(role)?)
        };
        read().ok_or_else(|| {
            format!(
                "\"{text}\" is no engine: write http://HOST:PORT=ROLE or https://HOST:PORT=ROLE, with a role of {}",
                EngineUse::ALL.map(EngineUse::name).join(", ")
            )
        })
    }
}

impl TryFrom<String> for AnnouncedEngine {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<&AnnouncedEngine> for EngineMessage {
    fn from(engine: &AnnouncedEngine) -> Self {
        Self { url: engine.url.clone(), role: engine.role.name().to_owned() }
    }
}

impl EngineMessage {
    /// The known engines of a greeting, up to [`ENGINES_MAX`].
    pub(super) fn check_all(all: &[Self]) -> Vec<AnnouncedEngine> {
        let known = |said: &Self| AnnouncedEngine::new(&said.url, EngineUse::named(&said.role)?);
        all.iter().filter_map(known).take(ENGINES_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_has_a_url_and_a_role() {
        let read = |text: &str| text.parse::<AnnouncedEngine>();
        let both = AnnouncedEngine { url: "http://10.0.0.1:8000".into(), role: EngineUse::Both };
        assert_eq!(read("http://10.0.0.1:8000=both"), Ok(both));
        assert_eq!(read("https://[fd00::1]:8000=prefill").unwrap().role, EngineUse::Prefill);
        let long = format!("http://{}:1=both", "a".repeat(300));
        for wrong in
            ["http://a:1", "http://a:1=all", "a:1=both", "http://a=both", "http://a:1/v1=both", &long]
        {
            assert!(read(wrong).unwrap_err().contains("prefill, decode, both"), "{wrong}");
        }
    }

    #[test]
    fn unknown_and_too_many_engines_of_a_greeting_are_dropped() {
        let said = |url: &str, role: &str| EngineMessage { url: url.into(), role: role.into() };
        let mut all =
            vec![said("http://a:1", "of a later release"), said("http://a b:1", "both"), said("", "")];
        assert_eq!(EngineMessage::check_all(&all), []);
        all.extend((0..40).map(|port| said(&format!("http://a:{}", port + 1), "decode")));
        assert_eq!(EngineMessage::check_all(&all).len(), ENGINES_MAX);
    }
}
