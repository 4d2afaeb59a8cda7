//! Prompts of every API go to two engines; requests for stored responses, and those that change engines, go
//! to the right ones.

use serde_json::{Value, json};

use super::engine::{ADAPTER, Asked, Engine, Manner};
use super::{FIRST, PARAMS, Router, answers, computes, said};

const PROMPTS: usize = 30;

/// A request of more than 256 tokens, for an API.
fn prompt(path: &str, at: usize) -> Value {
    let text = format!("{at} {}", "a".repeat(2000));
    if path.ends_with("responses") {
        json!({ "input": text, "max_output_tokens": 9 })
    } else if path.ends_with("messages") {
        json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 9 })
    } else {
        json!({ "token_ids": vec![at; 300], "sampling_params": { "max_tokens": 9 } })
    }
}

fn limit(path: &str, asked: &Asked) -> Value {
    let asked = asked.json();
    match path {
        path if path.ends_with("responses") => asked["max_output_tokens"].clone(),
        path if path.ends_with("messages") => asked["max_tokens"].clone(),
        _ => asked["sampling_params"]["max_tokens"].clone(),
    }
}

#[test]
fn prompts_of_every_api_are_for_two_engines_also_behind_a_prefix() {
    for prefix in ["", "/llm"] {
        for path in ["/v1/responses", "/v1/messages", "/inference/v1/generate"] {
            let path = format!("{prefix}{path}");
            let (prefill, decode) = (computes(), [answers(), answers(), answers()]);
            let urls = decode.each_ref().map(Engine::url);
            let router = Router::start(
                &[&prefill.url()],
                &urls.each_ref().map(String::as_str),
                &["--order", "prefill-first"],
            );
            for at in 0..PROMPTS {
                let answer = router.raw("POST", &path, &prompt(&path, at).to_string());
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            }
            assert_eq!(router.counter("pillion_route_prompts_total{way=\"pair\"}"), PROMPTS as u64);
            assert_eq!(prefill.asked().len(), PROMPTS);
            assert!(prefill.asked().iter().all(|asked| limit(&path, asked) == 1));
            assert!(prefill.asked().iter().all(|asked| asked.json()[PARAMS]["do_remote_decode"] == true));
            let counts = decode.each_ref().map(|engine| engine.asked().len());
            assert!(counts.iter().all(|count| count.abs_diff(PROMPTS / 3) <= 2), "{path} {counts:?}");
            let asked = decode.iter().flat_map(Engine::asked);
            assert!(asked.into_iter().all(|asked| {
                limit(&path, &asked) == 9 && asked.json()[PARAMS]["do_remote_prefill"] == true
            }));
        }
    }
}

#[test]
fn what_has_no_prompt_for_two_is_spread_and_counted() {
    let (prefill, decode) = (computes(), [answers(), answers(), answers()]);
    let urls = decode.each_ref().map(Engine::url);
    let router = Router::start(&[&prefill.url()], &urls.each_ref().map(String::as_str), &[]);
    for path in ["/v1/embeddings", "/v1/chat/completions/batch"] {
        (0..PROMPTS).for_each(|_| _ = router.raw("POST", path, "{\"input\": \"a\"}"));
    }
    let counts = decode.each_ref().map(|engine| engine.asked().len());
    assert!(counts.iter().all(|count| count.abs_diff(2 * PROMPTS / 3) <= 2), "{counts:?}");
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"other\"}"), 2 * PROMPTS as u64);
    assert!(prefill.asked().is_empty());
}

/// An engine that stores one response, and knows no other.
fn stores(id: &str) -> Engine {
    let first = Manner::Json(200, json!({ "id": id, "object": "response" }).to_string());
    Engine::start(Manner::Stores(id.to_owned(), Box::new(first)))
}

#[test]
fn a_stored_response_is_asked_for_where_it_is() {
    let ids = ["resp_a", "resp_b", "resp_c"];
    let decode = ids.map(stores);
    let urls = decode.each_ref().map(Engine::url);
    let urls = urls.each_ref().map(String::as_str);
    let prefill = computes();
    let router = Router::start(&[&prefill.url()], &urls, &[]);
    for at in 0..3 {
        router.raw("POST", "/v1/responses", &prompt("/v1/responses", at).to_string());
    }
    // A router started later knows no response.
    for router in [router, Router::start(&[&prefill.url()], &urls, &[])] {
        for id in ids.repeat(4) {
            let answer = router.raw("GET", &format!("/v1/responses/{id}"), "");
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(id), "{id} {answer}");
        }
        assert!(router.raw("GET", "/v1/responses/resp_none", "").starts_with("HTTP/1.1 404"));
        assert_eq!(router.counter("pillion_route_prompts_total{way=\"stored\"}"), 13);
    }
    let router = Router::start(&[&prefill.url()], &urls, &[]);
    for at in 0..3 {
        router.raw("POST", "/v1/responses", &prompt("/v1/responses", at).to_string());
    }
    let before = prefill.asked().len();
    for (id, engine) in ids.iter().zip(&decode) {
        let mut next = prompt("/v1/responses", 9);
        next["previous_response_id"] = json!(id);
        router.raw("POST", "/v1/responses", &next.to_string());
        assert_eq!(engine.asked().last().unwrap().json()["previous_response_id"], json!(id));
    }
    assert_eq!(prefill.asked().len(), before, "another engine has nothing of it");
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"stored\"}"), 3);
}

#[test]
fn what_changes_engines_is_told_to_all_or_refused() {
    let (prefill, decode) = ([answers(), answers()], [answers(), answers()]);
    let urls = [&prefill, &decode].map(|engines| engines.each_ref().map(Engine::url));
    let [prefill_urls, decode_urls] = urls.each_ref().map(|urls| urls.each_ref().map(String::as_str));
    let router = Router::start(&prefill_urls, &decode_urls, &[]);
    let adapter = json!({ "lora_name": "a", "lora_path": "b" }).to_string();
    for (path, body) in
        [("/v1/load_lora_adapter", adapter.as_str()), ("/reset_prefix_cache", ""), ("/sleep?level=1", "")]
    {
        let answer = router.raw("POST", path, body);
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"answer\""), "{answer}");
        for engine in prefill.iter().chain(&decode) {
            let asked = engine.asked().pop().unwrap();
            assert!(asked.line.contains(path) && asked.body == body, "{asked:?}");
        }
    }
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"everywhere\"}"), 3);
    let refused = router.raw("POST", "/update_weights", "{}");
    assert!(refused.starts_with("HTTP/1.1 501") && refused.contains("each engine"), "{refused}");
    assert!(decode.iter().all(|engine| engine.asked().len() == 3));
    let lacks = Engine::start(Manner::Json(404, "{\"error\": \"no such adapter\"}".into()));
    let router = Router::start(&[&lacks.url()], &decode_urls, &[]);
    let told = router.raw("POST", "/v1/unload_lora_adapter", &adapter);
    assert!(told.starts_with("HTTP/1.1 404") && told.contains("1 of 3 engines"), "{told}");
    assert!(told.contains(&lacks.url()) && told.contains("no such adapter"), "{told}");
}

#[test]
fn no_chat_misses_an_adapter_that_was_loaded() {
    let engine = |answer: Value| Engine::start(Manner::Adapts(Manner::Json(200, answer.to_string()).into()));
    let prefill = [(); 2].map(|()| engine(json!({ PARAMS: said() })));
    let decode = [(); 3].map(|()| engine(json!({})));
    let urls = [prefill.each_ref().map(Engine::url).to_vec(), decode.each_ref().map(Engine::url).to_vec()];
    let [prefill_urls, decode_urls] =
        urls.each_ref().map(|urls| urls.iter().map(String::as_str).collect::<Vec<_>>());
    let router = Router::start(&prefill_urls, &decode_urls, &[]);
    let found = |text: &str, asked: Value| router.raw("POST", text, &asked.to_string()).contains(" 200 ");
    let chat = |at: usize| {
        let text = format!("{at} {}", "a".repeat(2000));
        found(
            "/v1/chat/completions",
            json!({ "model": ADAPTER, "messages": [{ "role": "user", "content": text }] }),
        )
    };
    assert!(!chat(PROMPTS));
    assert!(found("/v1/load_lora_adapter", json!({ "lora_name": ADAPTER, "lora_path": "b" })));
    assert_eq!((0..PROMPTS).filter(|at| chat(*at)).count(), PROMPTS);
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"pair\"}"), PROMPTS as u64 + 1);
}

#[test]
fn a_slash_at_the_end_leads_to_no_engine_s_own_address() {
    let decode = answers();
    let router = Router::start(&[&computes().url()], &[&decode.url()], &[]);
    router.raw("POST", "/v1/completions/", &json!({ "prompt": [1] }).to_string());
    assert!(decode.asked()[0].line.starts_with("POST /v1/completions HTTP"));
    let redirects = Engine::start(Manner::Redirects("/docs/here?a=b".into()));
    let router = Router::start(&[&computes().url()], &[&redirects.url()], &[]);
    let answer = router.raw("GET", "/docs", "");
    assert!(answer.contains("location: /docs/here?a=b\r\n"), "{answer}");
}

#[test]
fn a_client_s_hints_alone_pass_to_both_engines_and_to_one() {
    let (prefill, decode) = (computes(), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    let hints = json!({ "last": true, "hints": [{ "action": "prefetch" }] });
    for tokens in [256, 255] {
        let mut asked = super::prompt(tokens);
        asked[PARAMS]["pillion"] = json!({ "last": true, "hints": [{ "action": "prefetch" }], "tokens": 7 });
        router.ask(&asked);
    }
    assert_eq!(prefill.asked()[0].json()[PARAMS]["pillion"], hints);
    let mut told = said();
    told["pillion"] = json!({ "last": true, "hints": [{ "action": "prefetch" }], "tokens": 256 });
    assert_eq!(decode.asked()[0].json()[PARAMS], told);
    assert_eq!(decode.asked()[1].json()[PARAMS], json!({ "pillion": hints }), "a short prompt");
}
