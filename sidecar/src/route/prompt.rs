//! What a router must know of a request, and what it makes of it for each of the two engines. No I/O.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// A prompt given as text counts one token for so many bytes: the router has no tokenizer.
const BYTES_PER_TOKEN: u64 = 4;
/// Prompts that begin with so many equal tokens, or as many bytes of text, go to the same engine.
const START_TOKENS: usize = 256;
const START_BYTES: usize = START_TOKENS * BYTES_PER_TOKEN as usize;

/// Fields of a message beside its content that become a part of the prompt. vLLM takes two names for one of them.
const OF_MESSAGES: [&str; 3] = ["tool_calls", "reasoning", "reasoning_content"];

/// The JSON object that a client sends, each field as it was written: most of its bytes are a prompt that the router only passes on.
pub(super) type Fields = BTreeMap<String, Box<RawValue>>;

/// A prompt, as far as the choice of engines depends on it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Prompt {
    /// Exact where the request has token ids; of all its prompts.
    pub(super) tokens: u64,
    /// A hash of its beginning.
    pub(super) start: u64,
    /// Why one engine must do both parts, whatever the prompt's length.
    pub(super) whole: Option<Whole>,
    /// Whether it is one text or list of token ids, and not empty.
    pub(super) is_one: bool,
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
    /// vLLM makes other requests of it, to which it tells nothing of another engine.
    BeamSearch,
    /// No engine that computes prompts could be reached lately.
    NoPrefill,
}

/// A part of a prompt.
enum Piece {
    Text(String),
    Tokens(Vec<u32>),
}

// === impl Whole ===

impl Whole {
    pub(super) const ALL: [Self; 5] =
        [Self::Short, Self::Media, Self::PromptLogprobs, Self::BeamSearch, Self::NoPrefill];

    /// The label of metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Media => "media",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::BeamSearch => "beam_search",
            Self::NoPrefill => "no_prefill",
        }
    }
}

// === impl Prompt ===

impl Prompt {
    /// That of a request to `/v1/completions` or `/v1/chat/completions`. What vLLM would refuse may be read as anything.
    pub(super) fn read(request: &Fields) -> Self {
        let mut pieces = request.get("prompt").map(|prompt| completion(prompt)).unwrap_or_default();
        let is_one = matches!(pieces.as_slice(), [piece] if piece.tokens() > 0);
        let mut media = request.get("prompt_embeds").is_some_and(|embeddings| embeddings.get() != "null");
        // What a template writes into the prompt beside texts counts as its JSON. It is no part of the beginning: templates put it in
        // different places.
        let of_json = |json: &str| if json == "null" { 0 } else { text_tokens(json) };
        let mut beside: u64 = ["tools", "documents"]
            .iter()
            .filter_map(|name| request.get(*name))
            .map(|json| of_json(json.get()))
            .sum();
        let messages = request.get("messages").and_then(|messages| value(messages)).unwrap_or_default();
        for message in messages.as_array().into_iter().flatten() {
            let mut add = |text: &str| pieces.push(Piece::Text(text.to_owned()));
            message["role"].as_str().map(&mut add);
            match &message["content"] {
                Value::String(text) => add(text),
                Value::Array(parts) => {
                    let texts = parts.iter().map(|part| part.as_str().or_else(|| part["text"].as_str()));
                    for text in texts {
                        media |= text.is_none();
                        text.map(&mut add);
                    }
                }
                _ => {}
            }
            beside += OF_MESSAGES.map(|name| of_json(&message[name].to_string())).iter().sum::<u64>();
        }
        let asked = |name| request.get(name).is_some_and(|value| !matches!(value.get(), "null" | "false"));
        // An echo has logprobs of its own where the answer has any, and that of a chat always.
        let echo_logprobs = asked("echo") && (asked("logprobs") || asked("messages"));
        let whole = if media {
            Some(Whole::Media)
        } else if asked("prompt_logprobs") || echo_logprobs {
            Some(Whole::PromptLogprobs)
        } else {
            asked("use_beam_search").then_some(Whole::BeamSearch)
        };
        let tokens = pieces.iter().map(Piece::tokens).sum::<u64>() + beside;
        Self { tokens, start: start(&pieces), whole, is_one }
    }
}

fn text_tokens(text: &str) -> u64 {
    (text.len() as u64).div_ceil(BYTES_PER_TOKEN)
}

/// A text, token ids, or a list of either.
fn completion(prompt: &RawValue) -> Vec<Piece> {
    Piece::read(prompt).map(|piece| vec![piece]).unwrap_or_else(|| {
        let items: Vec<&RawValue> = serde_json::from_str(prompt.get()).unwrap_or_default();
        items.into_iter().filter_map(Piece::read).collect()
    })
}

fn start(pieces: &[Piece]) -> u64 {
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
                first.hash(&mut hasher);
                bytes -= first.len() * BYTES_PER_TOKEN as usize;
            }
        }
    }
    hasher.finish()
}

/// A field, parsed; `None`: it nests too deep for that.
pub(super) fn value(field: &RawValue) -> Option<Value> {
    serde_json::from_str(field.get()).ok()
}

/// A field of a request that the router makes.
pub(super) fn field(value: impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(&value).expect("the keys of every object here are texts")
}

// === impl Piece ===

impl Piece {
    /// A text or a list of token ids; `None`: it is something else.
    fn read(field: &RawValue) -> Option<Self> {
        let ids = serde_json::from_str(field.get()).map(Self::Tokens);
        ids.or_else(|_| serde_json::from_str(field.get()).map(Self::Text)).ok()
    }

    fn tokens(&self) -> u64 {
        match self {
            Self::Text(text) => text_tokens(text),
            Self::Tokens(ids) => ids.len() as u64,
        }
    }
}

/// The request for the engine that computes the prompt: one token of one answer, whole, without what only an answer has.
pub(super) fn prefill(request: &Fields) -> Fields {
    let mut made = request.clone();
    let of_answers =
        ["stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "logprob_token_ids"];
    for name in of_answers {
        made.remove(name);
    }
    made.insert("stream".into(), field(false));
    made.insert("n".into(), field(1));
    made.insert("max_tokens".into(), field(1));
    if made.contains_key("max_completion_tokens") {
        made.insert("max_completion_tokens".into(), field(1));
    }
    let params = json!({
        "do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    made.insert(PARAMS.into(), field(params));
    made
}

/// The request for the engine that answers, with what the other one says, or will do.
pub(super) fn decode(request: &Fields, params: Value) -> Fields {
    let mut made = request.clone();
    made.insert(PARAMS.into(), field(params));
    made
}

/// The `kv_transfer_params` for the engine that answers a prompt which another one computes: that one saves so many of its tokens, or,
/// where no number is given, all.
pub(super) fn computed(tokens: Option<usize>) -> Value {
    let mut params = json!({
        "do_remote_decode": false, "do_remote_prefill": true,
        "remote_engine_id": null, "remote_block_ids": [], "remote_host": null, "remote_port": null,
    });
    if let Some(tokens) = tokens {
        params["pillion"] = json!({ "tokens": tokens });
    }
    params
}

/// The field with which vLLM's connectors are spoken to. A client's own is dropped: it could let a request wait.
pub(super) const PARAMS: &str = "kv_transfer_params";
/// The objects of a request in which vLLM looks for that field: itself, and what becomes the extra arguments of its sampling.
const PLACES: [&[&str]; 3] = [&[], &["vllm_xargs"], &["sampling_params", "extra_args"]];

/// Removes what a client says to connectors; whether there was any. An error where an object that may have it cannot be read: engines
/// read more than JSON as JSON.
pub(super) fn without_params(request: &mut Fields) -> serde_json::Result<bool> {
    PLACES.iter().try_fold(false, |found, place| Ok(remove_params(request, place)? || found))
}

fn remove_params(fields: &mut Fields, place: &[&str]) -> serde_json::Result<bool> {
    let Some((name, place)) = place.split_first() else { return Ok(fields.remove(PARAMS).is_some()) };
    let Some(object) = fields.get(*name).filter(|value| value.get().starts_with('{')) else {
        return Ok(false);
    };
    let mut object: Fields = serde_json::from_str(object.get())?;
    let is_removed = remove_params(&mut object, place)?;
    if is_removed {
        fields.insert((*name).into(), field(object));
    }
    Ok(is_removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(request: &Value) -> Fields {
        serde_json::from_str(&request.to_string()).expect("an object")
    }

    fn read(request: Value) -> Prompt {
        Prompt::read(&fields(&request))
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
        let chat = |more: Value, of_message: Value| {
            let mut message = json!({ "role": "user", "content": "" });
            message.as_object_mut().unwrap().extend(of_message.as_object().unwrap().clone());
            let mut request = json!({ "messages": [message] });
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read(request)
        };
        let (nothing, bare) = (json!({}), chat(json!({}), json!({})));
        let list = json!(["12345678901234"]);
        for (name, of_message) in [
            ("tools", false),
            ("documents", false),
            ("tool_calls", true),
            ("reasoning", true),
            ("reasoning_content", true),
        ] {
            let with = |value: &Value| {
                let said = json!({ name: value });
                if of_message { chat(nothing.clone(), said) } else { chat(said, nothing.clone()) }
            };
            assert_eq!(with(&list).tokens, bare.tokens + 5, "{name}");
            assert_eq!(with(&list).start, bare.start, "{name}");
            assert_eq!(with(&Value::Null), bare, "{name}");
        }
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
        let chat =
            |echo: bool| read(json!({ "messages": [{ "role": "user", "content": "a" }], "echo": echo }));
        assert_eq!((chat(true).whole, chat(false).whole), (Some(Whole::PromptLogprobs), None));
        let beams = |use_beam_search: bool| {
            read(json!({ "prompt": "a", "echo": true, "use_beam_search": use_beam_search }))
        };
        assert_eq!((beams(true).whole, beams(false).whole), (Some(Whole::BeamSearch), None));
        assert_eq!(
            read(json!({ "prompt": "a", "echo": false, "logprobs": 1, "prompt_logprobs": null })).whole,
            None
        );
    }

    #[test]
    fn what_a_client_says_to_connectors_is_found_wherever_vllm_looks() {
        let said = |place: Value| {
            let mut request = fields(&place);
            (without_params(&mut request).expect("JSON"), json!(request))
        };
        let params = || json!({ "do_remote_prefill": true });
        assert_eq!(said(json!({ "n": 1, PARAMS: params() })), (true, json!({ "n": 1 })));
        for outer in ["sampling_params", "vllm_xargs"] {
            let inner = |inner: Value| match outer {
                "vllm_xargs" => json!({ outer: inner }),
                _ => json!({ outer: { "n": 1, "extra_args": inner } }),
            };
            assert_eq!(said(inner(json!({ "a": 1, PARAMS: params() }))), (true, inner(json!({ "a": 1 }))));
            assert_eq!(said(inner(json!({ "a": 1 }))), (false, inner(json!({ "a": 1 }))));
            assert_eq!(said(json!({ outer: [1], PARAMS: 1 })), (true, json!({ outer: [1] })));
        }
    }

    #[test]
    fn each_engine_gets_its_part() {
        let asked = json!({
            "prompt": "a", "max_tokens": 9, "max_completion_tokens": 9, "stream": true, "stream_options": {}, "n": 3,
            "logprobs": 2, "logprob_token_ids": [5], "tools": [], PARAMS: { "do_remote_decode": true },
        });
        let asked = fields(&asked);
        let made = json!(prefill(&asked));
        let kept = json!({ "prompt": "a", "max_tokens": 1, "max_completion_tokens": 1, "stream": false, "n": 1, "tools": [] });
        for (name, value) in kept.as_object().expect("an object") {
            assert_eq!(&made[name], value, "{name}");
        }
        assert_eq!(made[PARAMS]["do_remote_decode"], true);
        for name in ["stream_options", "logprobs", "logprob_token_ids"] {
            assert!(made.get(name).is_none(), "{name}");
        }

        let made = json!(decode(&asked, computed(None)));
        assert_eq!((&made["max_tokens"], &made["stream"], &made["n"]), (&json!(9), &json!(true), &json!(3)));
        assert_eq!(made[PARAMS]["do_remote_prefill"], true);
        let said = json!({ "do_remote_prefill": true, "remote_engine_id": "p" });
        assert_eq!(value(&decode(&asked, said.clone())[PARAMS]), Some(said));
    }
}
