//! The first token of a stream, from the prefill engine: the decode engine goes on behind it. No I/O.
//!
//! The client's stream must equal a single engine's, byte for byte but for ids and times. So this module
//! lists each field of a request known to keep it equal, and the known form of the first event; all other
//! prompts go to both engines without a first token.

use hyper::body::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::api::Api;
use super::body::{Fields, find_entry};
use super::forward::PassedToken;
use super::prompt::Prompt;
use super::requests;
use super::usage::Usage;

/// Fields of a request that let a second engine go on as the first would: each token depends on the tokens
/// before it alone, also those of the prompt. A client's hints change no token.
const FREE: [&str; 11] = [
    "model",
    "prompt",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    requests::PARAMS,
];
/// The keys of the first event, and of its one choice, in the answer of an engine after one token.
const EVENT: [&str; 5] = ["id", "object", "created", "model", "choices"];
const CHOICE: [&str; 7] =
    ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"];
/// The keys of the last event of a stream with its usage.
const USAGE_EVENT: [&str; 6] = ["id", "object", "created", "model", "choices", "usage"];
/// The option of a stream with that event.
const USAGE: &str = "include_usage";
/// vLLM's own version, in the last event of a stream alone.
const LAST_ONLY: &str = ",\"system_fingerprint\":\"";
const DONE: &str = "data: [DONE]\n\n";

/// The first event of a stream, and the facts of the request for the rest.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct First {
    /// The event with the first token, as bytes of the stream.
    pub(super) event: Bytes,
    /// The token ids of the prompt, and of the first token.
    ids: Vec<u64>,
    /// The most tokens after the first one.
    left: u64,
    pub(super) passed: PassedToken,
}

/// The events of an answer of one token.
struct TokenEvents<'a> {
    token: &'a str,
    usage: Option<&'a str>,
}

/// The parts of an engine's event that decide if its token is passed on.
#[derive(Deserialize)]
struct TokenEvent {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
    finish_reason: Option<String>,
    prompt_token_ids: Vec<u64>,
    token_ids: Vec<u64>,
}

/// Returns true if the first token of a request to `/v1/completions` may come from another engine than the
/// rest.
pub(super) fn may_be_split(request: &Fields, prompt: &Prompt) -> bool {
    let is_said = |name: &str, value: &Value| match name {
        "n" => *value != json!(1),
        // The engines' own defaults are neutral, too.
        "presence_penalty" | "frequency_penalty" => !value.is_null() && value.as_f64() != Some(0.0),
        "stream_options" => value.as_object().is_none_or(|options| {
            options.iter().any(|(name, value)| is_set(value) && (name != USAGE || *value != json!(true)))
        }),
        _ => is_set(value),
    };
    prompt.is_one
        && request.get("stream") == Some("true")
        && max_tokens(request).is_some_and(|tokens| tokens > 1)
        && request.iter().all(|(name, field)| {
            FREE.contains(&name) || serde_json::from_str(field).is_ok_and(|value| !is_said(name, &value))
        })
}

fn max_tokens(request: &Fields) -> Option<u64> {
    serde_json::from_str(request.get("max_tokens")?).ok()
}

/// Returns true if a field of a request means more than its absence.
fn is_set(value: &Value) -> bool {
    !matches!(value, Value::Null | Value::Bool(false))
        && value.as_array().is_none_or(|items| !items.is_empty())
}

/// Returns the request for the prefill engine: a stream of one token, with the ids of the prompt and of the
/// token.
pub(super) fn make_token_request(request: &Fields) -> serde_json::Result<Fields> {
    let mut made = requests::make_prefill(Api::Completions, request)?;
    made.set_field("stream", true);
    made.set_field("return_token_ids", true);
    if includes_usage(request) {
        made.set_field("stream_options", json!({ USAGE: true }));
    }
    Ok(made)
}

/// Reads the prefill engine's `answer` to a request. Returns `None` if the decode engine must send the first
/// token, also if prompt and answer may be longer than `length_max` tokens.
pub(super) fn read_first_token(answer: &[u8], request: &Fields, length_max: u64) -> Option<First> {
    let events = split_events(std::str::from_utf8(answer).ok()?, includes_usage(request))?;
    let line = events.token;
    let [choice] = <[Choice; 1]>::try_from(serde_json::from_str::<TokenEvent>(line).ok()?.choices).ok()?;
    // A stream that stops here has no rest. After an empty text or a part of a letter, an engine writes the
    // rest in another way.
    let is_whole = !choice.text.is_empty() && !choice.text.contains('\u{fffd}');
    if !is_whole || choice.finish_reason? != "length" || choice.token_ids.len() != 1 {
        return None;
    }
    let event = as_first(line)?;
    let left = max_tokens(request)?.checked_sub(1)?;
    let ids = [choice.prompt_token_ids, choice.token_ids].concat();
    let is_taken = left.saturating_add(ids.len() as u64) <= length_max;
    let passed =
        PassedToken { cached: events.usage.and_then(|usage| Usage::of_answer(usage, None).cached_tokens) };
    is_taken.then(|| First { event: format!("data: {event}\n\n").into(), ids, left, passed })
}

/// Returns true if the last event of a stream has its usage.
fn includes_usage(request: &Fields) -> bool {
    request.get("stream_options").is_some_and(|options| find_entry(options, USAGE) == Some("true"))
}

/// Returns the events of an answer of one token, `None` if it has others.
fn split_events(answer: &str, has_usage: bool) -> Option<TokenEvents<'_>> {
    let events = answer.strip_suffix(DONE)?;
    let mut lines = events.strip_suffix("\n\n")?.split("\n\n").map(|event| {
        let line = event.strip_prefix("data: ")?;
        (!line.contains('\n')).then_some(line)
    });
    let (token, usage) = (lines.next()??, if has_usage { Some(lines.next()??) } else { None });
    let is_usage = |usage: &str| {
        let usage: Value = serde_json::from_str(usage).unwrap_or_default();
        let others = usage.as_object().map(|it| it.keys().filter(|key| *key != "system_fingerprint").count());
        others == Some(USAGE_EVENT.len())
            && USAGE_EVENT.iter().all(|key| usage.get(key).is_some())
            && usage["choices"] == json!([])
    };
    (lines.next().is_none() && usage.is_none_or(is_usage)).then_some(TokenEvents { token, usage })
}

/// Returns the form of a stream's events, by an engine's answer of one token with usage: without values, and the first event as that of a
/// longer stream.
pub(super) fn read_form(answer: &str) -> Option<String> {
    let events = split_events(answer, true)?;
    let (line, mut form) = (format!("{} {}", as_first(events.token)?, events.usage?), String::new());
    let mut rest = line.as_str();
    while let Some(begin) = rest.find(|sign: char| sign == '"' || sign.is_ascii_digit()) {
        form.push_str(&rest[..begin]);
        rest = &rest[begin..];
        let Some(text) = rest.strip_prefix('"') else {
            form.push('0');
            rest = rest.trim_start_matches(|sign: char| sign.is_ascii_digit());
            continue;
        };
        let mut is_escaped = false;
        let ends = |sign: char| {
            let was_escaped = is_escaped;
            is_escaped = sign == '\\' && !was_escaped;
            sign == '"' && !was_escaped
        };
        let end = text.find(ends)?;
        let is_key = text[end + 1..].starts_with(':');
        form.push_str(if is_key { &text[..end] } else { "\"" });
        rest = &text[end + 1..];
    }
    Some(form + rest)
}

/// Returns the count of a prompt's tokens, as an engine's event lists them.
pub(super) fn count_prompt(answer: &str) -> Option<u64> {
    let (_, ids) = answer.split_once("\"prompt_token_ids\":[")?;
    let (ids, _) = ids.split_once(']')?;
    Some(ids.split(',').filter(|id| !id.is_empty()).count() as u64)
}

/// The only event of a stream as the first of a longer one. A quotation mark within a text has a backslash
/// before it, so each name is found among the keys alone.
fn as_first(line: &str) -> Option<String> {
    let mut line = line.replacen("\"finish_reason\":\"length\"", "\"finish_reason\":null", 1);
    for name in ["\"prompt_token_ids\":", "\"token_ids\":"] {
        // `prompt_token_ids` ends like `token_ids`, but without its first quotation mark.
        let begin = line.find(name)? + name.len();
        let end = begin + line[begin..].find(']')? + 1;
        line.replace_range(begin..end, "null");
    }
    if let Some(begin) = line.find(LAST_ONLY) {
        let end = begin + LAST_ONLY.len() + line[begin + LAST_ONLY.len()..].find('"')? + 1;
        line.replace_range(begin..end, "");
    }
    let made: Value = serde_json::from_str(&line).ok()?;
    let has = |value: &Value, keys: &[&str]| {
        value
            .as_object()
            .is_some_and(|it| it.len() == keys.len() && keys.iter().all(|key| it.contains_key(*key)))
    };
    let rest = ["logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"];
    let choice = &made["choices"][0];
    let is_known =
        has(&made, &EVENT) && has(choice, &CHOICE) && rest.iter().all(|key| choice[*key].is_null());
    is_known.then_some(line)
}

// === impl First ===

impl First {
    /// Returns the request for the decode engine: its prompt has one token more than the prefill engine
    /// saves.
    pub(super) fn remaining_request(self, request: &Fields) -> Fields {
        let mut rest = requests::make_decode(request, requests::make_params(Some(self.ids.len() - 1)));
        rest.set_field("prompt", self.ids);
        rest.set_field("max_tokens", self.left);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of vLLM 0.32.
    const ANSWER: &str = concat!(
        r#"data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":" \"token_ids\":[é","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":[5,6],"token_ids":[9]}],"system_fingerprint":"vllm-0.32"}"#,
        "\n\ndata: [DONE]\n\n"
    );

    fn asked() -> Fields {
        let request =
            json!({ "model": "m", "prompt": "a b", "max_tokens": 4, "stream": true, "temperature": 0 });
        Fields::parse_object(&request.to_string().into()).expect("an object")
    }

    fn is_split(request: &Fields) -> bool {
        may_be_split(request, &Prompt::read_request(Api::Completions, request))
    }

    #[test]
    fn the_event_is_that_of_a_longer_stream_and_the_rest_goes_on_behind_it() {
        let first = read_first_token(ANSWER.as_bytes(), &asked(), 6).expect("exact");
        let event = r#"data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":" \"token_ids\":[é","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#;
        assert_eq!(first.event, format!("{event}\n\n"));
        let rest: Value =
            serde_json::from_slice(&first.remaining_request(&asked()).payload().joined()).expect("JSON");
        assert_eq!((&rest["prompt"], &rest["max_tokens"]), (&json!([5, 6, 9]), &json!(3)));
        let params = &rest[requests::PARAMS];
        assert_eq!((&params["do_remote_prefill"], &params["pillion"]["tokens"]), (&json!(true), &json!(2)));
        assert_eq!(rest["stream"], true);
        assert_eq!(read_first_token(ANSWER.as_bytes(), &asked(), 5), None, "which an engine would refuse");
    }

    #[test]
    fn an_answer_of_another_form_is_not_passed_on() {
        let changes = [
            (r#""finish_reason":"length""#, r#""finish_reason":"stop""#),
            (r#"" \"token_ids\":[é""#, r#""""#),
            ("é", "\u{fffd}"),
            (r#""token_ids":[9]"#, r#""token_ids":[9,9]"#),
            (r#""token_ids":[9]"#, r#""token_ids":[9],"more":null"#),
            (r#""logprobs":null"#, r#""logprobs":{}"#),
            (r#","prompt_token_ids":[5,6]"#, ""),
            (r#""model":"m""#, r#""model":"m","usage":null"#),
            ("data: [DONE]", "data: {}\n\ndata: [DONE]"),
            ("data: [DONE]\n\n", ""),
        ];
        for (from, to) in changes {
            let answer = ANSWER.replacen(from, to, 1);
            assert_ne!(answer, ANSWER, "{from}");
            assert_eq!(read_first_token(answer.as_bytes(), &asked(), 6), None, "{to}");
        }
    }

    #[test]
    fn a_stream_with_usage_has_its_event_and_states_the_cached_tokens() {
        let mut request = asked();
        request.set_field("stream_options", json!({ "include_usage": true }));
        let made = make_token_request(&request).expect("JSON");
        assert_eq!(made.get("stream_options"), Some(r#"{"include_usage":true}"#));
        let usage = r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}"#;
        let with = |usage: &str| ANSWER.replace("data: [DONE]", &format!("data: {usage}\n\ndata: [DONE]"));
        let read = |answer: &str, request: &Fields| read_first_token(answer.as_bytes(), request, 6);
        let first = read(&with(usage), &request).expect("exact");
        assert_eq!((first.passed.cached, first.ids.len()), (Some(1), 3));
        assert_eq!(first.event, read(ANSWER, &asked()).expect("exact").event);
        assert_eq!(read(ANSWER, &request), None, "the event is missing");
        assert_eq!(read(&with(usage), &asked()), None, "nothing asked for it");
        assert_eq!(read(&with(&usage.replacen("\"usage\":", "\"metrics\":1,\"usage\":", 1)), &request), None);
    }

    #[test]
    fn requests_that_a_second_engine_goes_on_with() {
        assert!(is_split(&asked()));
        let with = |name: &str, value: &Value| {
            let mut request = asked();
            request.set_field(name, value);
            is_split(&request)
        };
        let same = json!({
            "n": 1, "seed": null, "stop": [], "echo": false, "logprobs": null, "stream_options": { "include_usage": false },
            "top_k": 3, "ignore_eos": true, "prompt": [1, 2], "repetition_penalty": 1.1, "presence_penalty": 0, "frequency_penalty": 0.0,
        });
        for (name, value) in same.as_object().expect("an object") {
            assert!(with(name, value), "{name}");
        }
        let others = json!({
            "n": 2, "seed": 0, "stop": ["a"], "echo": true, "logprobs": 0, "stream_options": { "include_usage": true, "continuous_usage_stats": true },
            "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 3, "max_tokens": 1,
            "return_token_ids": true, "response_format": { "type": "json_object" }, "structured_outputs": {}, "stream": false,
            "suffix": "a", "prompt": ["a", "b"], "logit_bias": { "5": 1 }, "skip_special_tokens": true, "bad_words": ["a"],
            "truncate_prompt_tokens": 3, "what_comes_next": 0,
        });
        for (name, value) in others.as_object().expect("an object") {
            assert!(!with(name, value), "{name}");
        }
        assert!(with("prompt", &json!(["a"])), "one prompt, in a list");
        assert!(with("stream_options", &json!({ "include_usage": true, "continuous_usage_stats": false })));
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let tools = asked().payload().joined();
        let tools = [b"{\"tools\":", deep.as_bytes(), b",", &tools[1..]].concat();
        let request = Fields::parse_object(&tools.into()).expect("JSON");
        assert!(!is_split(&request), "a field that is not read");
        let mut request = asked();
        request.remove("max_tokens");
        assert!(!is_split(&request));
    }
}
