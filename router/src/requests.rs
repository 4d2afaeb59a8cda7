//! The requests to a prefill engine and a decode engine, made from a client's request. No I/O.

use hyper::body::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::api::Api;
use super::body::Fields;

/// The field for vLLM's connectors. The router drops a client's own, because it could let a request wait, but for [`PASSED`].
pub(super) const PARAMS: &str = "kv_transfer_params";
/// The member of [`PARAMS`] for Pillion, and its fields by which a client hints at the fate of its blocks.
const OWN: &str = "pillion";
const PASSED: [&str; 2] = ["last", "hints"];
/// A longer value is dropped: hints have some 200 bytes.
const PASSED_BYTES_MAX: usize = 4096;
/// The object with sampling parameters in the generate API.
const SAMPLING: &str = "sampling_params";
/// vLLM looks for [`PARAMS`] in these objects of a request: itself, and the two sources of a sampling's extra arguments.
const PLACES: [&[&str]; 3] = [&[], &["vllm_xargs"], &[SAMPLING, "extra_args"]];

/// Returns the request for the prefill engine: one token of one answer, as a whole, without options of answers.
pub(super) fn make_prefill(api: Api, request: &Fields) -> serde_json::Result<Fields> {
    let mut made = request.clone();
    let of_answers =
        ["stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "logprob_token_ids"];
    let one_token = |made: &mut Fields, limit: &str| {
        of_answers.iter().for_each(|name| _ = made.remove(name));
        made.set_field("n", 1);
        made.set_field(limit, 1);
    };
    made.set_field("stream", false);
    match api {
        Api::Completions | Api::Chat => {
            one_token(&mut made, "max_tokens");
            if made.get("max_completion_tokens").is_some() {
                made.set_field("max_completion_tokens", 1);
            }
        }
        Api::Generate => {
            let mut sampling = made.object(SAMPLING)?.unwrap_or_default();
            one_token(&mut sampling, "max_tokens");
            made.set_object(SAMPLING, &sampling);
            made.remove("stream_options");
        }
        Api::Messages => made.set_field("max_tokens", 1),
        Api::Responses => {
            // No client asks this engine for stored responses.
            ["top_logprobs", "include", "request_id"].iter().for_each(|name| _ = made.remove(name));
            made.set_field("max_output_tokens", 1);
            made.set_field("store", false);
            made.set_field("background", false);
        }
    }
    set_params(&mut made, make_prefill_params());
    Ok(made)
}

/// Returns `kv_transfer_params` for a prefill engine.
pub(super) fn make_prefill_params() -> Value {
    json!({
        "do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
    })
}

/// Returns the request for the decode engine, with the prefill engine's parameters, or with expected ones.
pub(super) fn make_decode(request: &Fields, params: impl Serialize) -> Fields {
    let mut made = request.clone();
    set_params(&mut made, params);
    made
}

/// Sets the params for an engine, and keeps the client's hints in them: both engines of a prompt have blocks of its
/// conversation, perhaps at two sidecars.
fn set_params(request: &mut Fields, params: impl Serialize) {
    let object = |fields: &Fields, name| fields.object(name).ok().flatten();
    let hints = object(request, PARAMS).and_then(|params| object(&params, OWN));
    request.set_field(PARAMS, params);
    if let (Some(hints), Some(mut params)) = (hints, object(request, PARAMS)) {
        let mut own = object(&params, OWN).unwrap_or_default();
        PASSED.iter().for_each(|name| own.copy_field(name, &hints));
        params.set_object(OWN, &own);
        request.set_object(PARAMS, &params);
    }
}

/// Returns `kv_transfer_params` for the decode engine of a prompt under way. The prefill engine saves `tokens` of the prompt, or all.
pub(super) fn make_params(tokens: Option<usize>) -> Value {
    let mut params = json!({
        "do_remote_decode": false, "do_remote_prefill": true,
        "remote_engine_id": null, "remote_block_ids": [], "remote_host": null, "remote_port": null,
    });
    if let Some(tokens) = tokens {
        params["pillion"] = json!({ "tokens": tokens });
    }
    params
}

/// Removes a client's own [`PARAMS`] but for its hints, and returns true if there were any. Fails if one of [`PLACES`] is no
/// JSON: engines accept other texts, too.
pub(super) fn reduce_params(request: &mut Fields) -> serde_json::Result<bool> {
    let (mut has_params, mut hints) = (false, None);
    for place in PLACES {
        let Some(params) = take_at(request, place)? else { continue };
        has_params = true;
        hints = hints.or_else(|| read_hints(&params));
    }
    if let Some(hints) = hints {
        let mut params = Fields::default();
        params.set_object(OWN, &hints);
        request.set_object(PARAMS, &params);
    }
    Ok(has_params)
}

fn take_at(fields: &mut Fields, place: &[&str]) -> serde_json::Result<Option<Bytes>> {
    let Some((name, place)) = place.split_first() else { return Ok(fields.take(PARAMS)) };
    let Some(mut object) = fields.object(name)? else { return Ok(None) };
    let taken = take_at(&mut object, place)?;
    if taken.is_some() {
        fields.set_object(name, &object);
    }
    Ok(taken)
}

/// The fields of a client's params that pass on; `None` without any.
fn read_hints(params: &Bytes) -> Option<Fields> {
    let own = Fields::parse_object(params).ok()?.object(OWN).ok()??;
    let mut hints = Fields::default();
    for name in PASSED {
        if own.get(name).is_some_and(|value| value.len() <= PASSED_BYTES_MAX) {
            hints.copy_field(name, &own);
        }
    }
    (!hints.is_empty()).then_some(hints)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(request: &Value) -> Fields {
        Fields::parse_object(&request.to_string().into()).expect("an object")
    }

    fn value(request: &Fields) -> Value {
        serde_json::from_slice(&request.payload().joined()).expect("an object")
    }

    #[test]
    fn what_a_client_says_to_connectors_is_found_wherever_vllm_looks() {
        let said = |place: Value| {
            let mut request = fields(&place);
            (reduce_params(&mut request).expect("JSON"), value(&request))
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
    fn hints_pass_alone_and_go_to_both_engines() {
        let hints = json!([{ "action": "pin", "seconds": 60 }]);
        let own = json!({ "last": true, "hints": hints.clone(), "tokens": 9 });
        let said = json!({ "do_remote_prefill": true, "remote_host": "evil", OWN: own });
        for place in [json!({ PARAMS: said }), json!({ "vllm_xargs": { PARAMS: said } })] {
            let mut request = fields(&place);
            assert!(reduce_params(&mut request).expect("JSON"));
            let passed = json!({ "last": true, "hints": hints.clone() });
            assert_eq!(value(&request)[PARAMS], json!({ OWN: passed.clone() }), "alone");
            let prefill = value(&make_prefill(Api::Completions, &request).expect("JSON"));
            assert_eq!(
                (&prefill[PARAMS]["do_remote_decode"], &prefill[PARAMS][OWN]),
                (&json!(true), &passed)
            );
            let answered = json!({ "do_remote_prefill": true, OWN: { "tokens": 1760 } });
            let decode = value(&make_decode(&request, answered));
            let both = json!({ "tokens": 1760, "last": true, "hints": hints.clone() });
            assert_eq!(decode[PARAMS], json!({ "do_remote_prefill": true, OWN: both }));
            assert_eq!(value(&make_decode(&request, make_params(None)))[PARAMS][OWN], passed);
        }
    }

    #[test]
    fn nothing_but_hints_passes() {
        let long = "x".repeat(PASSED_BYTES_MAX);
        for own in [json!({ "tokens": 7 }), json!({ "hints": long }), json!([1]), json!(null), json!("last")]
        {
            let mut request = fields(&json!({ "n": 1, PARAMS: { OWN: own, "last": true } }));
            assert!(reduce_params(&mut request).expect("JSON"));
            assert_eq!(value(&request), json!({ "n": 1 }), "{own}");
        }
    }

    #[test]
    fn each_engine_gets_its_part() {
        let asked = json!({
            "prompt": "a", "max_tokens": 9, "max_completion_tokens": 9, "stream": true, "stream_options": {}, "n": 3,
            "logprobs": 2, "logprob_token_ids": [5], "tools": [], PARAMS: { "do_remote_decode": true },
        });
        let asked = fields(&asked);
        let made = value(&make_prefill(Api::Chat, &asked).expect("JSON"));
        let kept = json!({ "prompt": "a", "max_tokens": 1, "max_completion_tokens": 1, "stream": false, "n": 1, "tools": [] });
        for (name, value) in kept.as_object().expect("an object") {
            assert_eq!(&made[name], value, "{name}");
        }
        assert_eq!(made[PARAMS]["do_remote_decode"], true);
        for name in ["stream_options", "logprobs", "logprob_token_ids"] {
            assert!(made.get(name).is_none(), "{name}");
        }

        let made = value(&make_decode(&asked, make_params(None)));
        assert_eq!((&made["max_tokens"], &made["stream"], &made["n"]), (&json!(9), &json!(true), &json!(3)));
        assert_eq!(made[PARAMS]["do_remote_prefill"], true);
        let said = json!({ "do_remote_prefill": true, "remote_engine_id": "p" });
        assert_eq!(value(&make_decode(&asked, said.clone()))[PARAMS], said);
    }

    #[test]
    fn the_engine_that_computes_is_asked_for_one_token_by_every_api() {
        let made = |api, request: Value| value(&make_prefill(api, &fields(&request)).expect("JSON"));
        let responses = made(
            Api::Responses,
            json!({ "input": "a", "max_output_tokens": 9, "stream": true, "store": true }),
        );
        assert_eq!(
            (&responses["max_output_tokens"], &responses["store"], &responses["stream"]),
            (&json!(1), &json!(false), &json!(false))
        );
        let messages = made(Api::Messages, json!({ "messages": [], "max_tokens": 9 }));
        assert_eq!((&messages["max_tokens"], messages.get("n")), (&json!(1), None));
        let sampling = json!({ "max_tokens": 9, "min_tokens": 3, "temperature": 0, "n": 2 });
        let generate =
            made(Api::Generate, json!({ "token_ids": [1], "sampling_params": sampling, "stream": true }));
        assert_eq!(generate["sampling_params"], json!({ "max_tokens": 1, "n": 1, "temperature": 0 }));
        assert_eq!(generate[PARAMS]["do_remote_decode"], true);
    }
}
