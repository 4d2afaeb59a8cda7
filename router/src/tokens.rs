//! The count of a text's tokens: the router has no tokenizer, and learns from the counts in answers of
//! prefill engines.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Bytes of a token before any answer: a prompt too short for two engines then goes to two, and their answers
/// tell its tokens.
const FIRST_BYTES: f64 = 1.0;
/// Bounds of the bytes per token that an engine may state.
const BYTES_MIN: f64 = 0.25;
const BYTES_MAX: f64 = 16.0;
/// The weight of a new prompt in the mean.
const SHARE: f64 = 0.2;
/// The most models: adapters are models to clients.
const MODELS_MAX: usize = 1024;

/// Mean bytes of text per token, by model.
#[derive(Debug, Default)]
pub(super) struct TokenBytes(Mutex<HashMap<u64, f64>>);

/// The sizes of a prompt, for a count of its tokens.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct PromptSizes {
    /// A hash of the model's name.
    pub(super) model: u64,
    /// Token ids in the prompt.
    pub(super) ids: u64,
    pub(super) text_bytes: u64,
}

// === impl TokenBytes ===

impl TokenBytes {
    /// Returns the expected tokens of a prompt.
    pub(super) fn tokens(&self, sizes: &PromptSizes) -> u64 {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = known.get(&sizes.model).copied().unwrap_or(FIRST_BYTES);
        sizes.ids + (sizes.text_bytes as f64 / bytes).ceil() as u64
    }

    /// Learns from a prompt with the tokens that an engine states.
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
        assert_eq!(known.tokens(&read("m", &text)), 118, "one prompt changes the mean by a fifth");
        known.learn(&read("m", &text), u64::MAX);
        assert!(known.tokens(&read("m", &text)) < 1000);
    }
}
