//! How many tokens a text has: the router has no tokenizer, and learns from what engines say of the prompts that they compute.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Before an engine has said anything, a byte counts as a token: a prompt that is too short for two engines is then computed by two, which
/// tells its tokens.
const FIRST_BYTES: f64 = 1.0;
/// A tokenizer of other figures is not believed.
const BYTES_MIN: f64 = 0.25;
const BYTES_MAX: f64 = 16.0;
/// What a new prompt counts of what is known.
const SHARE: f64 = 0.2;
/// The most models: adapters are models to clients.
const MODELS_MAX: usize = 1024;

/// Bytes of a text for each token, by model.
#[derive(Debug, Default)]
pub(super) struct TokenBytes(Mutex<HashMap<u64, f64>>);

/// What the tokens of a prompt are counted by.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct PromptSizes {
    /// A hash of the model's name.
    pub(super) model: u64,
    /// Tokens that are given as such.
    pub(super) ids: u64,
    pub(super) text_bytes: u64,
}

// === impl TokenBytes ===

impl TokenBytes {
    /// Tokens of a prompt, as far as they are known.
    pub(super) fn tokens(&self, sizes: &PromptSizes) -> u64 {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = known.get(&sizes.model).copied().unwrap_or(FIRST_BYTES);
        sizes.ids + (sizes.text_bytes as f64 / bytes).ceil() as u64
    }

    /// Learns from a prompt that an engine says to have so many tokens.
    pub(super) fn learn(&self, sizes: &PromptSizes, tokens: u64) {
        if sizes.ids > 0 || sizes.text_bytes == 0 || tokens == 0 {
            return;
        }
        let bytes = (sizes.text_bytes as f64 / tokens as f64).clamp(BYTES_MIN, BYTES_MAX);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MODELS_MAX && !known.contains_key(&sizes.model) {
            return;
        }
        let known = known.entry(sizes.model).or_insert(bytes);
        *known += SHARE * (bytes - *known);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::Api;
    use crate::body::Fields;
    use crate::prompt::Prompt;

    #[test]
    fn bytes_of_a_token_are_learned_for_each_model() {
        let read = |model: &str, text: &str| {
            let request = json!({ "model": model, "prompt": text });
            Prompt::read_request(
                Api::Completions,
                &Fields::parse_object(&request.to_string().into()).unwrap(),
            )
            .sizes()
        };
        let (known, text) = (TokenBytes::default(), "a".repeat(400));
        assert_eq!(known.tokens(&read("m", &text)), 400, "nothing is known yet");
        known.learn(&read("m", &text), 100);
        assert_eq!(known.tokens(&read("m", &text)), 100);
        assert_eq!(known.tokens(&read("bytes", &text)), 400);
        known.learn(&read("m", &text), 400);
        assert_eq!(known.tokens(&read("m", &text)), 118, "one prompt is not all");
        known.learn(&read("m", &text), u64::MAX);
        assert!(known.tokens(&read("m", &text)) < 1000);
    }
}
