//! What a router must know of a request, and what it makes of it for each of the two engines. No I/O.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};

/// A prompt given as text counts one token for so many bytes: the router has no tokenizer.
const BYTES_PER_TOKEN: u64 = 4;
/// Prompts that begin with so many equal tokens, or as many bytes of text, go to the same engine.
const START_TOKENS: usize = 256;
const START_BYTES: usize = START_TOKENS * BYTES_PER_TOKEN as usize;

/// The JSON object that a client sends.
pub(super) type Fields = Map<String, Value>;

/// A prompt, as far as the choice of engines depends on it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Prompt {
    /// Exact where the request has token ids; of all its prompts.
    pub(super) tokens: u64,
    /// A hash of its beginning.
    pub(super) start: u64,
    /// Why one engine must do both parts, whatever the prompt's length.
    pub(super) whole: Option<Whole>,
}

/// Why the engine that answers a prompt also computes it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Whole {
    /// It has fewer tokens than `--min-remote-tokens`.
    Short,
    /// It has images, sounds or embeddings, whose keys are not its tokens'.
    Media,
    /// vLLM computes such a prompt anew, whatever is kept of it.
    PromptLogprobs,
    /// No engine that computes prompts could be reached lately.
    NoPrefill,
}

/// A part of a prompt.
enum Piece<'a> {
    Text(&'a str),
    Tokens(&'a [Value]),
}

// === impl Whole ===

impl Whole {
    pub(super) const ALL: [Self; 4] = [Self::Short, Self::Media, Self::PromptLogprobs, Self::NoPrefill];

    /// The label of metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Media => "media",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::NoPrefill => "no_prefill",
        }
    }
}

// === impl Prompt ===

impl Prompt {
    /// That of a request to `/v1/completions` or `/v1/chat/completions`. What vLLM would refuse may be read as anything.
    pub(super) fn read(request: &Fields) -> Self {
        let mut pieces = Vec::new();
        let mut media = request.get("prompt_embeds").is_some_and(|embeddings| !embeddings.is_null());
        if let Some(prompt) = request.get("prompt") {
            completion(prompt, &mut pieces);
        }
        for message in request.get("messages").and_then(Value::as_array).into_iter().flatten() {
            pieces.extend(message["role"].as_str().map(Piece::Text));
            match &message["content"] {
                Value::String(text) => pieces.push(Piece::Text(text)),
                Value::Array(parts) => {
                    let texts = parts.iter().map(|part| part.as_str().or_else(|| part["text"].as_str()));
                    for text in texts {
                        media |= text.is_none();
                        pieces.extend(text.map(Piece::Text));
                    }
                }
                _ => {}
            }
        }
        let whole = if media {
            Some(Whole::Media)
        } else {
            let asked = |name| {
                request.get(name).is_some_and(|value| !matches!(value, Value::Null | Value::Bool(false)))
            };
            (asked("prompt_logprobs") || (asked("echo") && asked("logprobs")))
                .then_some(Whole::PromptLogprobs)
        };
        Self { tokens: pieces.iter().map(Piece::tokens).sum(), start: start(&pieces), whole }
    }
}

/// A text, token ids, or a list of either.
fn completion<'a>(prompt: &'a Value, pieces: &mut Vec<Piece<'a>>) {
    match prompt {
        Value::String(text) => pieces.push(Piece::Text(text)),
        Value::Array(items) if items.iter().all(Value::is_number) => pieces.push(Piece::Tokens(items)),
        Value::Array(items) => items.iter().for_each(|item| completion(item, pieces)),
        _ => {}
    }
}

fn start(pieces: &[Piece<'_>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut bytes = START_BYTES;
    for piece in pieces {
        match piece {
            Piece::Text(text) => {
                let first = &text.as_bytes()[..text.len().min(bytes)];
                first.hash(&mut hasher);
                bytes -= first.len();
            }
            Piece::Tokens(ids) => {
                let first = &ids[..ids.len().min(bytes / BYTES_PER_TOKEN as usize)];
                first.iter().for_each(|id| id.as_u64().hash(&mut hasher));
                bytes -= first.len() * BYTES_PER_TOKEN as usize;
            }
        }
    }
    hasher.finish()
}

// === impl Piece ===

impl Piece<'_> {
    fn tokens(&self) -> u64 {
        match self {
            Self::Text(text) => (text.len() as u64).div_ceil(BYTES_PER_TOKEN),
            Self::Tokens(ids) => ids.len() as u64,
        }
    }
}

/// The request for the engine that computes the prompt: one token of one answer, whole, without what only an answer has.
pub(super) fn prefill(request: &Fields) -> Fields {
    let mut made = request.clone();
    for name in ["stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs"] {
        made.remove(name);
    }
    made.insert("stream".into(), json!(false));
    made.insert("n".into(), json!(1));
    made.insert("max_tokens".into(), json!(1));
    if made.contains_key("max_completion_tokens") {
        made.insert("max_completion_tokens".into(), json!(1));
    }
    let params = json!({
        "do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    made.insert(PARAMS.into(), params);
    made
}

/// The request for the engine that answers, with what the other one said, or else with what the other one will do.
pub(super) fn decode(request: &Fields, said: Option<Value>) -> Fields {
    let mut made = request.clone();
    let params = said.unwrap_or_else(|| {
        json!({
            "do_remote_decode": false, "do_remote_prefill": true,
            "remote_engine_id": null, "remote_block_ids": [], "remote_host": null, "remote_port": null,
        })
    });
    made.insert(PARAMS.into(), params);
    made
}

/// The field with which vLLM's connectors are spoken to. A client's own is dropped: it could let a request wait.
pub(super) const PARAMS: &str = "kv_transfer_params";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(request: Value) -> Prompt {
        Prompt::read(request.as_object().expect("an object"))
    }

    #[test]
    fn tokens_are_counted_exactly_and_texts_by_their_bytes() {
        assert_eq!(read(json!({ "prompt": [1, 2, 3] })).tokens, 3);
        assert_eq!(read(json!({ "prompt": [[1, 2, 3], [4]] })).tokens, 4);
        assert_eq!(read(json!({ "prompt": "12345678" })).tokens, 2);
        assert_eq!(read(json!({ "prompt": ["1234", "12345"] })).tokens, 3);
        let chat =
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "12345678" }] }] });
        assert_eq!(read(chat).tokens, 3);
        assert_eq!(read(json!({ "prompt": 7, "messages": "none" })).tokens, 0);
    }

    #[test]
    fn a_prompt_goes_by_its_beginning() {
        let text = |end: &str| read(json!({ "prompt": "a".repeat(START_BYTES) + end })).start;
        assert_eq!(text("one"), text("other"));
        let ids = |first: u64, last: u64| {
            let mut ids: Vec<u64> = (0..START_TOKENS as u64).collect();
            ids[0] = first;
            ids.push(last);
            read(json!({ "prompt": ids })).start
        };
        assert_eq!(ids(1, 2), ids(1, 3));
        assert_ne!(ids(1, 2), ids(2, 2));
    }

    #[test]
    fn what_one_engine_must_do_alone() {
        let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] });
        assert_eq!(read(image).whole, Some(Whole::Media));
        assert_eq!(read(json!({ "prompt": "a", "prompt_embeds": "AA" })).whole, Some(Whole::Media));
        assert_eq!(read(json!({ "prompt": "a", "prompt_logprobs": 0 })).whole, Some(Whole::PromptLogprobs));
        assert_eq!(
            read(json!({ "prompt": "a", "echo": true, "logprobs": 1 })).whole,
            Some(Whole::PromptLogprobs)
        );
        assert_eq!(
            read(json!({ "prompt": "a", "echo": false, "logprobs": 1, "prompt_logprobs": null })).whole,
            None
        );
    }

    #[test]
    fn each_engine_gets_its_part() {
        let asked = json!({
            "prompt": "a", "max_tokens": 9, "max_completion_tokens": 9, "stream": true, "stream_options": {}, "n": 3,
            "logprobs": 2, "tools": [], PARAMS: { "do_remote_decode": true },
        });
        let asked = asked.as_object().expect("an object");
        let made = Value::from(prefill(asked));
        let kept = json!({ "prompt": "a", "max_tokens": 1, "max_completion_tokens": 1, "stream": false, "n": 1, "tools": [] });
        for (name, value) in kept.as_object().expect("an object") {
            assert_eq!(&made[name], value, "{name}");
        }
        assert_eq!(made[PARAMS]["do_remote_decode"], true);
        assert!(made.get("stream_options").is_none() && made.get("logprobs").is_none());

        let made = Value::from(decode(asked, None));
        assert_eq!((&made["max_tokens"], &made["stream"], &made["n"]), (&json!(9), &json!(true), &json!(3)));
        assert_eq!(made[PARAMS]["do_remote_prefill"], true);
        let said = json!({ "do_remote_prefill": true, "remote_engine_id": "p" });
        assert_eq!(decode(asked, Some(said.clone()))[PARAMS], said);
    }
}
