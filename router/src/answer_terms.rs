//! The facts of an engine that decide if another engine goes on with its answers as it would itself. No I/O.

use serde::Deserialize;
use serde_json::{Value, json};

use super::first_token;
use super::requests::{self, PARAMS};

/// Default penalties that count an answer's tokens, and not those of its prompt.
const PENALTIES: [&str; 2] = ["presence_penalty", "frequency_penalty"];

/// The answers of one engine.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct AnswerTerms {
    /// The most tokens of a prompt and its answer.
    pub(super) length: u64,
    /// The default sampling, as JSON.
    sampling: String,
    /// The form of a stream's events.
    form: String,
}

/// The text within an engine's parameters about sampling, as Pillion's connector states it.
#[derive(Deserialize)]
struct StatedSampling {
    defaults: serde_json::Map<String, Value>,
    /// True if plugins or a watermark may read an answer's tokens.
    counts: bool,
}

/// Returns the name of an engine's first model, and the limit of its models.
pub(super) fn read_models(models: &[u8]) -> Option<(String, u64)> {
    let models: Value = serde_json::from_slice(models).ok()?;
    let models = models["data"].as_array()?;
    let lengths = models.iter().map(|model| model["max_model_len"].as_u64());
    let length = lengths.collect::<Option<Vec<_>>>()?.into_iter().min()?;
    Some((models[0]["id"].as_str()?.to_owned(), length))
}

/// Returns the router's own requests of one token: for the statement about sampling, and for the form of a stream.
pub(super) fn make_questions(model: &str) -> [Value; 2] {
    let asked = json!({ "model": model, "prompt": [0], "max_tokens": 1, "temperature": 0 });
    let with = |more: Value| {
        let mut made = asked.clone();
        made.as_object_mut()
            .into_iter()
            .for_each(|made| made.extend(more.as_object().cloned().unwrap_or_default()));
        made
    };
    let mut params = requests::make_prefill_params();
    params["pillion"] = json!({ "sampling": true });
    [
        with(json!({ PARAMS: params })),
        with(
            json!({ "stream": true, "return_token_ids": true, "stream_options": { "include_usage": true } }),
        ),
    ]
}

// === impl AnswerTerms ===

impl AnswerTerms {
    /// Reads the answers to [`make_questions`]. Fails with the reason why no other engine may go on with answers.
    pub(super) fn read(length: u64, whole: &[u8], stream: &[u8]) -> Result<Self, String> {
        let whole: Value = serde_json::from_slice(whole).unwrap_or_default();
        let stated = whole[PARAMS]["pillion"]["sampling"].as_str().unwrap_or_default();
        let stated: StatedSampling = serde_json::from_str(stated).map_err(
            |_| "its connector does not state the sampling: it is older, or vLLM has others beside it",
        )?;
        let penalty = PENALTIES.iter().find(|name| !is_neutral(stated.defaults.get(**name), 0.0));
        if let Some(penalty) = penalty {
            return Err(format!("its default {penalty} counts tokens of an answer"));
        }
        if stated.defaults.contains_key("max_tokens") {
            return Err("its generation config has max_new_tokens".into());
        }
        if stated.counts {
            return Err("its logits processors or its watermark may read tokens of an answer".into());
        }
        let form = str::from_utf8(stream).ok().and_then(first_token::read_form);
        let form = form.ok_or("its streams have another form than those of vLLM 0.32")?;
        Ok(Self { length, sampling: Value::from(stated.defaults).to_string(), form })
    }

    /// Returns true if either engine goes on with an answer of the other one as with its own.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (&self.sampling, &self.form) == (&other.sampling, &other.form)
    }
}

/// Returns true for a value that changes nothing, or none.
fn is_neutral(value: Option<&Value>, neutral: f64) -> bool {
    value.is_none_or(|value| value.is_null() || value.as_f64() == Some(neutral))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        r#"data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":[0],"token_ids":[9]}]}"#,
        "\n\n",
        r#"data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1},"system_fingerprint":"vllm-0.32"}"#,
        "\n\ndata: [DONE]\n\n"
    );

    fn read(sampling: &Value, stream: &str) -> Result<AnswerTerms, String> {
        let whole = json!({ "choices": [], PARAMS: { "pillion": { "tokens": 0, "sampling": sampling.to_string() } } });
        AnswerTerms::read(1000, whole.to_string().as_bytes(), stream.as_bytes())
    }

    #[test]
    fn an_engine_whose_answers_depend_on_the_count_of_their_tokens_has_no_terms() {
        let stated = |defaults: Value, counts: bool| json!({ "defaults": defaults, "counts": counts });
        for same in
            [json!({}), json!({ "temperature": 0.6, "repetition_penalty": 1.05, "presence_penalty": 0.0 })]
        {
            assert!(read(&stated(same, false), STREAM).is_ok());
        }
        for (sampling, why) in [
            (stated(json!({ "presence_penalty": 0.5 }), false), "presence_penalty"),
            (stated(json!({ "frequency_penalty": -1 }), false), "frequency_penalty"),
            (stated(json!({ "max_tokens": 512 }), false), "max_new_tokens"),
            (stated(json!({}), true), "watermark"),
            (json!({ "defaults": {} }), "older"),
            (Value::Null, "older"),
        ] {
            let failed = read(&sampling, STREAM).unwrap_err();
            assert!(failed.contains(why), "{failed}");
        }
        let failed = read(&stated(json!({}), false), "data: {}\n\ndata: [DONE]\n\n").unwrap_err();
        assert!(failed.contains("another form"), "{failed}");
    }

    #[test]
    fn engines_with_other_defaults_or_another_form_are_not_alike() {
        let of = |defaults: Value, stream: &str| {
            read(&json!({ "defaults": defaults, "counts": false }), stream).unwrap()
        };
        let one = of(json!({ "top_k": 20 }), STREAM);
        let same = STREAM
            .replace("cmpl-1", "cmpl-2")
            .replace("7", "12345")
            .replace("\"m\"", "\"n\"")
            .replace("\"\"", "\" é\\\"\"");
        assert!(one.is_like(&of(json!({ "top_k": 20 }), &same)));
        assert!(!one.is_like(&of(json!({ "top_k": 40 }), STREAM)));
        let swapped = STREAM.replace(
            r#""id":"cmpl-1","object":"text_completion""#,
            r#""object":"text_completion","id":"cmpl-1""#,
        );
        assert!(!one.is_like(&of(json!({ "top_k": 20 }), &swapped)));
        assert!(!one.is_like(&of(json!({ "top_k": 20 }), &STREAM.replace(":7,", ": 7,"))));
    }

    #[test]
    fn models_have_a_name_and_the_least_limit() {
        let models = br#"{"data": [{"id": "a", "max_model_len": 9}, {"id": "b", "max_model_len": 5}]}"#;
        assert_eq!(read_models(models), Some(("a".into(), 5)));
        assert_eq!(read_models(br#"{"data": [{"id": "a"}]}"#), None);
        assert_eq!(read_models(br#"{"data": []}"#), None);
    }
}
