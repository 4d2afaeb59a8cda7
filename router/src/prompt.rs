//! The route of a request, by its fields. No I/O.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use super::affinity::{PromptMark, Trail};
use super::api::Api;
use super::body::{Fields, each_element, each_entry, find_entry, text_bytes};
use super::tokens::PromptSizes;

/// Marks of a text or a list of token ids lie at multiples of this length.
const BLOCK_BYTES: usize = 1024;
/// The most marks of a prompt. A conversation keeps the first ones, with its system prompt, and the last
/// ones.
const MARKS_FIRST: usize = 16;
const MARKS_LAST: usize = 48;
/// The most levels of parts within a message's parts: an image in the result of a tool.
const DEPTH_MAX: u32 = 3;

/// Fields of a message, beside its content, written into the prompt. vLLM takes two names for one of them; an
/// item of the Responses API has the last three.
const OF_MESSAGES: [&str; 6] =
    ["tool_calls", "reasoning", "reasoning_content", "arguments", "output", "summary"];
/// Types of a content's parts with text, or with JSON written as text by a template.
const TEXT_PARTS: [&str; 11] = [
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "tool_reference",
    "reasoning_text",
    "summary_text",
];
/// A field moved by clients from message to message, and computed by no engine.
const MARKER: &str = "cache_control";

/// The facts of a prompt that decide its engines.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Prompt {
    sizes: PromptSizes,
    pub(super) trail: Trail,
    /// The reason for one engine alone, with any length of the prompt; `None` without a reason.
    pub(super) whole: Option<Whole>,
    /// True if the prompt is one text or list of token ids, and not empty.
    pub(super) is_one: bool,
}

sidecar::named! {
    /// The reason why the decode engine computes a prompt too.
    pub(super) enum Whole {
        /// It has fewer tokens than `--min-remote-tokens`.
        Short = "short",
        /// It has images, sounds or embeddings: their keys do not follow from its tokens.
        Media = "media",
        /// vLLM computes such a prompt again, with any KV of it in a cache.
        PromptLogprobs = "prompt_logprobs",
        /// vLLM makes other requests of it, and gives them no parameters of another engine.
        BeamSearch = "beam_search",
        /// It continues a response stored by a decode engine, or that engine is to store it before its
        /// computation.
        Stored = "stored",
        /// No prefill engine could be reached lately.
        NoPrefill = "no_prefill",
        /// The decode engine has all of it but fewer tokens than `--min-remote-tokens`.
        Held = "held",
        /// The decode engine is sooner, by at least the time that it computes.
        Sooner = "sooner",
        /// The prefill engine would miss `--ttft-target`.
        Target = "target",
        /// The pool has no prefill engine.
        Plain = "plain",
    }
}

/// The state of the reading of a prompt: sums and hashes alone.
struct PromptReading {
    /// Hash of all parts so far.
    digest: XxHash3_64,
    /// Bytes hashed by `digest`.
    digested: u64,
    ids: u64,
    text_bytes: u64,
    /// Count of texts and lists of token ids.
    pieces: u64,
    has_media: bool,
    marks: Vec<PromptMark>,
}

// === impl Prompt ===

impl Prompt {
    /// Reads the prompt of a request. A request that vLLM refuses gets any result.
    pub(super) fn read_request(api: Api, request: &Fields) -> Self {
        let mut reading = PromptReading::new();
        // Fields before all messages in a template, or with a part in the keys of a prompt's KV.
        for name in ["model", "cache_salt", "tools"] {
            reading.digest_field(name, request.get(name).unwrap_or_default());
        }
        // Fields written into the prompt by a template count as their JSON.
        for name in ["tools", "documents"] {
            reading.count_json(request.get(name).unwrap_or("null"));
        }
        match api {
            Api::Completions => reading.read_prompts(request.get("prompt").unwrap_or("null")),
            Api::Generate => reading.read_prompts(request.get("token_ids").unwrap_or("null")),
            Api::Chat => {
                reading.read_messages(None, request.get("messages").filter(|list| list.starts_with('[')));
            }
            Api::Responses => reading.read_messages(request.get("instructions"), request.get("input")),
            Api::Messages => reading.read_messages(request.get("system"), request.get("messages")),
        }
        reading.has_media |=
            ["prompt_embeds", "features", "content_parts"].iter().any(|name| request.is_set(name));
        let sampling = request.get("sampling_params").unwrap_or("null");
        let prompt_logprobs = find_entry(sampling, "prompt_logprobs").is_some_and(|said| said != "null");
        // An echo has logprobs of the prompt if the answer has any; the echo of a chat always has.
        let echo_logprobs = request.is_set("echo") && (request.is_set("logprobs") || api == Api::Chat);
        let whole = if reading.has_media {
            Some(Whole::Media)
        } else if request.is_set("prompt_logprobs") || prompt_logprobs || echo_logprobs {
            Some(Whole::PromptLogprobs)
        } else {
            request.is_set("use_beam_search").then_some(Whole::BeamSearch)
        };
        let model = XxHash3_64::oneshot(request.get("model").unwrap_or_default().as_bytes());
        let sizes = PromptSizes { model, ids: reading.ids, text_bytes: reading.text_bytes };
        let is_one = reading.pieces == 1 && api == Api::Completions && sizes.ids + sizes.text_bytes > 0;
        let before =
            request.get("previous_response_id").and_then(string_content).filter(|_| api == Api::Responses);
        let is_stored = before.is_some() || api == Api::Responses && request.is_set("background");
        let whole = if is_stored { Some(Whole::Stored) } else { whole };
        let session = before.map_or_else(|| session(api, request), |id| Some(response_hash(id)));
        let is_bound = before.is_some();
        let trail =
            Trail { session, marks: reading.marks, is_bound, bytes: reading.digested, ..Trail::default() };
        Self { sizes, trail, whole, is_one }
    }

    /// Returns the sizes of all the request's prompts, for a count of their tokens.
    pub(super) fn sizes(&self) -> PromptSizes {
        self.sizes
    }
}

/// A hash of the user in a request. Messages of Anthropic's form have the user in their metadata.
fn session(api: Api, request: &Fields) -> Option<u64> {
    let user = match api {
        Api::Messages => find_entry(request.get("metadata")?, "user_id"),
        _ => request.get("user"),
    };
    Some(session_hash(string_content(user?)?))
}

/// The text between the quotation marks of a JSON string; `None` for another value or an empty text.
fn string_content(json: &str) -> Option<&str> {
    json.strip_prefix('"')?.strip_suffix('"').filter(|text| !text.is_empty())
}

/// A hash of a stored response's id.
pub(super) fn response_hash(id: &str) -> u64 {
    /// The seed keeps ids of responses apart from names of sessions.
    const SEED: u64 = 0x5702_ed1d;
    XxHash3_64::oneshot_with_seed(SEED, id.as_bytes())
}

/// A hash of a session's name.
pub(super) fn session_hash(name: &str) -> u64 {
    /// The seed keeps names of sessions apart from beginnings of prompts.
    const SEED: u64 = 0x5e55_1014;
    XxHash3_64::oneshot_with_seed(SEED, name.as_bytes())
}

// === impl PromptReading ===

impl PromptReading {
    fn new() -> Self {
        let (digest, marks) = (XxHash3_64::with_seed(0), Vec::new());
        Self { digest, digested: 0, ids: 0, text_bytes: 0, pieces: 0, has_media: false, marks }
    }

    fn digest_field(&mut self, name: &str, json: &str) {
        self.digest.write(name.as_bytes());
        self.digest.write(b":");
        self.digest.write(json.as_bytes());
        self.digest.write(b",");
        self.digested += json.len() as u64;
    }

    /// Counts a text of the prompt.
    fn count_text(&mut self, json: &str) {
        self.text_bytes += text_bytes(json);
    }

    fn count_json(&mut self, json: &str) {
        self.text_bytes += if json == "null" { 0 } else { json.len() as u64 };
    }

    fn mark(&mut self, is_own: bool, is_answer: bool) {
        if self.marks.len() == MARKS_FIRST + MARKS_LAST {
            self.marks.remove(MARKS_FIRST);
        }
        self.marks.push(PromptMark { hash: self.digest.finish(), bytes: self.digested, is_own, is_answer });
    }

    /// Reads a text, token ids, or a list of either.
    fn read_prompts(&mut self, json: &str) {
        if !self.read_prompt(json) {
            each_element(json, |prompt| {
                self.read_prompt(prompt);
            });
        }
    }

    /// Reads a text or token ids; returns false for another value.
    fn read_prompt(&mut self, json: &str) -> bool {
        let is_text = json.starts_with('"');
        let is_ids = json.starts_with('[') && !json.bytes().skip(1).any(|byte| b"[\"{".contains(&byte));
        if !is_text && !is_ids {
            return false;
        }
        self.pieces += 1;
        if is_text {
            self.count_text(json);
        } else if json[1..].trim_start() != "]" {
            self.ids += json.bytes().filter(|byte| *byte == b',').count() as u64 + 1;
        }
        let bytes = &json.as_bytes()[1..json.len() - 1];
        // Strides are powers of two, so a prompt that has grown has marks of its shorter form.
        let blocks = bytes.len() / BLOCK_BYTES;
        let stride = blocks.div_ceil(MARKS_FIRST + MARKS_LAST).max(1).next_power_of_two();
        for block in bytes.chunks(stride * BLOCK_BYTES) {
            self.digest.write(block);
            self.digested += block.len() as u64;
            if block.len() == stride * BLOCK_BYTES {
                self.mark(false, false);
            }
        }
        true
    }

    /// Reads a conversation behind its instructions: a list of messages, or the one text of a user.
    fn read_messages(&mut self, instructions: Option<&str>, messages: Option<&str>) {
        if let Some(instructions) = instructions.filter(|instructions| *instructions != "null") {
            self.read_content(instructions, DEPTH_MAX);
            self.mark(false, false);
        }
        let messages = messages.unwrap_or("null");
        let mut is_own = false;
        let is_list = each_element(messages, |message| {
            let role = self.read_message(message);
            is_own |= !matches!(role, Some("\"system\"" | "\"developer\""));
            self.mark(is_own, role == Some("\"assistant\""));
        });
        if !is_list && messages.starts_with('"') {
            self.read_content(messages, DEPTH_MAX);
            self.mark(true, false);
        }
    }

    /// Reads a message, and returns its role.
    fn read_message<'a>(&mut self, json: &'a str) -> Option<&'a str> {
        let mut role = None;
        each_entry(json, |name, value| match name {
            MARKER => {}
            "role" => {
                role = Some(value);
                self.count_text(value);
                self.digest_field(name, value);
            }
            "content" => self.read_content(value, DEPTH_MAX),
            name => {
                if OF_MESSAGES.contains(&name) {
                    self.count_json(value);
                }
                self.digest_field(name, value);
            }
        });
        role
    }

    /// Reads a text, or the parts of a content. A client may write a text in either way from turn to turn.
    fn read_content(&mut self, json: &str, depth: u32) {
        if json.starts_with('"') {
            self.count_text(json);
            self.digest_field("text", json);
            return;
        }
        each_element(json, |part| {
            if part.starts_with('"') {
                self.count_text(part);
                self.digest_field("text", part);
            } else {
                self.read_part(part, depth);
            }
        });
    }

    fn read_part(&mut self, json: &str, depth: u32) {
        let mut is_text = false;
        each_entry(json, |name, value| match name {
            MARKER => {}
            "type" => {
                let kind = value.trim_matches('"');
                self.has_media |= !TEXT_PARTS.contains(&kind);
            }
            "text" => {
                is_text = true;
                self.count_text(value);
                self.digest_field(name, value);
            }
            "content" if depth > 0 => self.read_content(value, depth - 1),
            name => {
                if matches!(name, "input" | "thinking") {
                    self.count_json(value);
                }
                self.digest_field(name, value);
            }
        });
        self.has_media |= !is_text && find_entry(json, "type").is_none();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(request: &Value) -> Fields {
        Fields::parse_object(&request.to_string().into()).expect("an object")
    }

    fn read_as(api: Api, request: Value) -> Prompt {
        Prompt::read_request(api, &fields(&request))
    }

    fn read(request: Value) -> Prompt {
        read_as(if request["messages"].is_null() { Api::Completions } else { Api::Chat }, request)
    }

    /// Token ids, and each four bytes of a text as one token.
    fn tokens(request: Value) -> u64 {
        let sizes = read(request).sizes();
        sizes.ids + sizes.text_bytes.div_ceil(4)
    }

    fn hashes(prompt: &Prompt) -> Vec<u64> {
        prompt.trail.marks.iter().map(|mark| mark.hash).collect()
    }

    #[test]
    fn tokens_are_counted_exactly_and_texts_by_their_bytes() {
        assert_eq!(tokens(json!({ "prompt": [1, 2, 3] })), 3);
        assert_eq!(tokens(json!({ "prompt": [[1, 2, 3], [4]] })), 4);
        assert_eq!(tokens(json!({ "prompt": "12345678" })), 2);
        assert_eq!(tokens(json!({ "prompt": ["1234", "12345"] })), 3);
        let chat =
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "12345678" }] }] });
        assert_eq!(tokens(chat), 3);
        assert_eq!(tokens(json!({ "prompt": 7, "messages": "none" })), 0);
        let chat = |more: Value, of_message: Value| {
            let mut message = json!({ "role": "user", "content": "" });
            message.as_object_mut().unwrap().extend(of_message.as_object().unwrap().clone());
            let mut request = json!({ "messages": [message] });
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            tokens(request)
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
            assert_eq!(with(&list), bare + 5, "{name}");
            assert_eq!(with(&Value::Null), bare, "{name}");
        }
    }

    #[test]
    fn a_prompt_has_the_marks_of_what_it_goes_on_from() {
        let text =
            |blocks: usize, end: &str| read(json!({ "prompt": "a".repeat(blocks * BLOCK_BYTES) + end }));
        assert_eq!(hashes(&text(1, "one")), hashes(&text(1, "other")));
        assert_eq!(hashes(&text(2, ""))[0], hashes(&text(1, "b"))[0]);
        assert!(hashes(&text(0, "a")).is_empty());
        let (short, long) = (hashes(&text(100, "")), hashes(&text(1000, "")));
        assert!(short.len() <= 64 && long.len() <= 64 && long.contains(&short[short.len() / 8 * 8 - 1]));
        let ids = |first: u64| {
            read(json!({ "prompt": (0..900).map(|id| if id == 0 { first } else { id }).collect::<Vec<_>>() }))
        };
        assert_ne!(hashes(&ids(1)), hashes(&ids(2)));
    }

    #[test]
    fn a_turn_has_the_marks_of_the_turn_before_it() {
        let message = |role: &str, text: &str| json!({ "role": role, "content": text });
        let first = [message("system", "s"), message("user", "a")];
        let next = [&first[..], &[message("assistant", "b"), message("user", "c")]].concat();
        // Clients write the last text as a part with a marker, and as a plain text in the next turn.
        let mut marked = first.clone();
        marked[1]["content"] = json!([{ "type": "text", "text": "a", MARKER: { "type": "ephemeral" } }]);
        let before = hashes(&read(json!({ "messages": marked })));
        let after = read(json!({ "messages": next, "max_tokens": 3 }));
        assert_eq!(hashes(&after)[..2], before);
        let own: Vec<_> = after.trail.marks.iter().map(|mark| mark.is_own).collect();
        assert_eq!(own, [false, true, true, true]);
        let salted = read(json!({ "messages": next, "cache_salt": "x" }));
        assert!(hashes(&salted).iter().all(|mark| !hashes(&after).contains(mark)));
        let responses =
            |input: Value| read_as(Api::Responses, json!({ "instructions": "s", "input": input }));
        assert_eq!(hashes(&responses(json!("a"))).len(), 2);
        let messages =
            read_as(Api::Messages, json!({ "system": [{ "type": "text", "text": "s" }], "messages": next }));
        assert_eq!((messages.trail.marks.len(), messages.trail.marks[0].is_own), (5, false));
        let many: Vec<_> = (0..1000).map(|at| message("user", &at.to_string())).collect();
        assert_eq!(read(json!({ "messages": many })).trail.marks.len(), 64);
    }

    #[test]
    fn a_session_is_what_the_client_names() {
        let user = |user: Value| read(json!({ "prompt": "a", "user": user })).trail.session;
        assert_eq!(user(json!("u")), Some(session_hash("u")));
        assert_eq!((user(json!("")), user(json!(7)), user(Value::Null)), (None, None, None));
        let next = read_as(Api::Responses, json!({ "input": "a", "previous_response_id": "r" }));
        assert_eq!((next.trail.session, next.trail.is_bound), (Some(response_hash("r")), true));
        assert_eq!(next.whole, Some(Whole::Stored));
        let metadata = json!({ "messages": [], "metadata": { "user_id": "u" } });
        assert_eq!(read_as(Api::Messages, metadata).trail.session, Some(session_hash("u")));
    }

    #[test]
    fn bodies_of_hostile_shape_are_read_without_a_tree() {
        for text in [
            "[".repeat(100_000) + &"]".repeat(100_000),
            "[{\"\":0},[[]],7,\"a\",{\"content\":[[[1]],{}]}]".into(),
        ] {
            for api in [Api::Completions, Api::Chat, Api::Responses, Api::Messages, Api::Generate] {
                let name = |api| match api {
                    Api::Completions => "prompt",
                    Api::Generate => "token_ids",
                    Api::Responses => "input",
                    _ => "messages",
                };
                Prompt::read_request(
                    api,
                    &Fields::parse_object(&format!("{{\"{}\":{text}}}", name(api)).into()).expect("JSON"),
                );
            }
        }
    }

    #[test]
    fn what_one_engine_must_do_alone() {
        let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] });
        assert_eq!(read(image).whole, Some(Whole::Media));
        assert_eq!(read(json!({ "prompt": "a", "prompt_embeds": "AA" })).whole, Some(Whole::Media));
        let image = json!({ "type": "image", "source": {} });
        let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": [image] });
        for parts in [json!([image]), json!([result])] {
            let asked = json!({ "messages": [{ "role": "user", "content": parts }] });
            assert_eq!(read_as(Api::Messages, asked).whole, Some(Whole::Media));
        }
        let text = json!({ "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "text", "text": "a" }] });
        let asked = json!({ "messages": [{ "role": "user", "content": [text] }] });
        assert_eq!(read_as(Api::Messages, asked).whole, None);
        let logprobs = json!({ "token_ids": [1], "sampling_params": { "prompt_logprobs": 1 } });
        assert_eq!(read_as(Api::Generate, logprobs).whole, Some(Whole::PromptLogprobs));
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
}
