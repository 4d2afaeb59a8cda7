//! The count of a prompt's cached tokens in answers. The decode engine has a whole prompt from the prefill
//! engine, so the router writes the prefill engine's count into its answer. No I/O.

use super::body::find_entry;

/// The places of the usage in an answer, or in an event of a stream.
const PLACES: [&[&str]; 3] = [&["usage"], &["response", "usage"], &["message", "usage"]];
const DETAILS: [&str; 2] = ["prompt_tokens_details", "input_tokens_details"];
const CACHED: &str = "cached_tokens";
const USAGE: &str = "\"usage\"";
const PROMPT: &str = "prompt_tokens";
const COMPLETION: &str = "completion_tokens";
/// The names of Anthropic's form: its input is without tokens from the cache and tokens put there.
const INPUT: &str = "input_tokens";
const CACHE_READ: &str = "cache_read_input_tokens";
const CACHE_CREATION: &str = "cache_creation_input_tokens";

/// The counts stated by an engine.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Usage {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) cached_tokens: Option<u64>,
}

// === impl Usage ===

impl Usage {
    /// The usage of the last event with cached tokens.
    pub(super) fn of_events(events: &str) -> Self {
        let stated = events.lines().rev().filter_map(|line| line.strip_prefix("data:"));
        let stated = stated.map(str::trim).find(|json| states_cached(json.as_bytes()));
        stated.map_or_else(Self::default, |json| Self::of_answer(json, None))
    }

    /// The usage of an answer; `params` are its `kv_transfer_params`, with the count even if the usage has no
    /// details.
    pub(super) fn of_answer(answer: &str, params: Option<&str>) -> Self {
        let usage = find_usage(answer).unwrap_or("null");
        let read = number(usage, CACHE_READ);
        let created = number(usage, CACHE_CREATION).unwrap_or(0);
        let all = || Some(number(usage, INPUT)?.saturating_add(read.unwrap_or(0)).saturating_add(created));
        let prompt_tokens = number(usage, PROMPT).or_else(all);
        let details = DETAILS.iter().find_map(|name| number(find_entry(usage, name)?, CACHED));
        let said = params.and_then(|params| number(params, "remote_prefill_cached_tokens"));
        Self { prompt_tokens, cached_tokens: said.or(details).or(read) }
    }
}

/// An answer, or the JSON of an event, with this count of cached tokens; `None` if it states no count.
pub(super) fn with_cached(json: &str, cached: u64) -> Option<String> {
    with_counts(json, Some(cached), 0)
}

/// The same, with the last `passed` tokens of the prompt as tokens of the answer, and any count of cached tokens if `cached` is `None`.
fn with_counts(json: &str, cached: Option<u64>, passed: u64) -> Option<String> {
    let usage = find_usage(json)?;
    let mut edits = Vec::new();
    if let (Some(prompt), Some(completion)) = (number_text(usage, PROMPT), number_text(usage, COMPLETION))
        && passed > 0
    {
        let moved = (prompt.parse::<u64>().ok()?, completion.parse::<u64>().ok()?);
        edits
            .extend([(prompt, moved.0.saturating_sub(passed)), (completion, moved.1.saturating_add(passed))]);
    }
    for details in DETAILS.iter().filter_map(|name| find_entry(usage, name)) {
        edits.extend(number_text(details, CACHED).zip(cached));
    }
    if let (Some(input), Some(read), Some(cached)) =
        (number_text(usage, INPUT), number_text(usage, CACHE_READ), cached)
    {
        let all = input.parse::<u64>().ok()?.saturating_add(read.parse().ok()?);
        edits.extend([(input, all.saturating_sub(cached)), (read, cached.min(all))]);
    }
    let begin = json.as_ptr() as usize;
    let mut edits: Vec<_> = edits
        .into_iter()
        .map(|(text, number)| (text.as_ptr() as usize - begin, text.len(), number))
        .collect();
    // From the last edit to the first: the places of earlier ones stay true.
    edits.sort_unstable_by(|one, other| other.cmp(one));
    let mut made = json.to_owned();
    edits.iter().for_each(|(at, len, number)| made.replace_range(*at..at + len, &number.to_string()));
    (!edits.is_empty()).then_some(made)
}

/// An event of a stream with other counts, as in [`with_counts`]; `None` if it states none of them.
pub(super) fn event_with_counts(event: &str, cached: Option<u64>, passed: u64) -> Option<String> {
    let mut is_changed = false;
    let lines = event.split_inclusive('\n').map(|line| {
        let json = line.strip_prefix("data:").map(str::trim).filter(|json| json.contains(USAGE));
        let Some(made) = json.and_then(|json| with_counts(json, cached, passed)) else {
            return line.to_owned();
        };
        is_changed = true;
        line.replacen(json.unwrap_or_default(), &made, 1)
    });
    let made = lines.collect();
    is_changed.then_some(made)
}

/// Returns true if bytes may state a count of cached tokens.
pub(super) fn states_cached(bytes: &[u8]) -> bool {
    states_usage(bytes) && (has(bytes, CACHED) || has(bytes, CACHE_READ))
}

/// Returns true if bytes may state any count.
pub(super) fn states_usage(bytes: &[u8]) -> bool {
    has(bytes, USAGE)
}

fn has(bytes: &[u8], name: &str) -> bool {
    bytes.windows(name.len()).any(|part| part == name.as_bytes())
}

fn find_usage(json: &str) -> Option<&str> {
    let walk = |place: &&[&str]| place.iter().try_fold(json, |json, name| find_entry(json, name));
    PLACES.iter().find_map(walk).filter(|usage| usage.starts_with('{'))
}

fn number_text<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    find_entry(json, name).filter(|text| text.parse::<u64>().is_ok())
}

fn number(json: &str, name: &str) -> Option<u64> {
    find_entry(json, name)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_written_where_each_api_has_it() {
        let chat = r#"{"id":"a","text":"\"cached_tokens\": 7","usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":899}}}"#;
        assert_eq!(with_cached(chat, 0).unwrap(), chat.replace("899", "0"));
        let responses =
            r#"{"response":{"usage":{"input_tokens":900,"input_tokens_details": {"cached_tokens": 0}}}}"#;
        assert_eq!(with_cached(responses, 896).unwrap(), responses.replace(" 0}", " 896}"));
        let messages = r#"{"type":"message_delta","usage":{"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":899}}"#;
        let made = messages.replace("input_tokens\":1,", "input_tokens\":900,").replace("899", "0");
        assert_eq!(with_cached(messages, 0).unwrap(), made);
        for none in [
            "{}",
            "[1]",
            r#"{"usage":null}"#,
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}"#,
        ] {
            assert_eq!(with_cached(none, 3), None, "{none}");
        }
        let event = format!("event: a\r\ndata: {chat}\r\n\r\n");
        assert_eq!(event_with_counts(&event, Some(5), 0).unwrap(), event.replace("899", "5"));
        assert_eq!(event_with_counts("data: [DONE]\n\n", Some(5), 1), None);
        let event =
            "data: {\"usage\":{\"prompt_tokens\":901,\"completion_tokens\":7,\"total_tokens\":908}}\n\n";
        let moved = event.replace("901", "900").replace(":7,", ":8,");
        assert_eq!(event_with_counts(event, None, 1).unwrap(), moved);
        assert_eq!(event_with_counts(event, Some(5), 0), None);
    }

    #[test]
    fn the_number_is_that_of_the_parameters_or_of_usage() {
        let answer = r#"{"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":3}}}"#;
        let usage = |cached| Usage { prompt_tokens: Some(900), cached_tokens: cached };
        assert_eq!(Usage::of_answer(answer, None), usage(Some(3)));
        assert_eq!(
            Usage::of_answer(answer, Some(r#"{"remote_prefill_cached_tokens":896}"#)),
            usage(Some(896))
        );
        let messages = r#"{"usage":{"input_tokens":4,"cache_read_input_tokens":896}}"#;
        assert_eq!(Usage::of_answer(messages, None), usage(Some(896)));
        let created =
            r#"{"usage":{"input_tokens":100,"cache_read_input_tokens":0,"cache_creation_input_tokens":800}}"#;
        assert_eq!(Usage::of_answer(created, None), usage(Some(0)));
        assert_eq!(Usage::of_answer("{}", None), Usage::default());
        let events = format!("data: {{}}\n\nevent: a\ndata: {answer}\n\ndata: [DONE]\n\n");
        assert_eq!(Usage::of_events(&events), usage(Some(3)));
        assert_eq!(Usage::of_events("data: [DONE]\n\n"), Usage::default());
    }
}
