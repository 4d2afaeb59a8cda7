//! First tokens of the prefill engine, before the decode engine's rest.

use std::fs::File;
use std::io::BufReader;
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::client::watch;
use super::engine::{self, Asked, Engine, Manner, ONE_TOKEN};
use super::{DONE, ERROR, FIRST, PARAMS, Router, ids, said, stream_of, unchunked};

/// Waits until the router knows the terms of its engines, and returns its count of first tokens.
fn first_tokens_passed(router: &Router) -> u64 {
    let mut request = stream_of(300);
    request["model"] = json!(engine::WARM_UP);
    let first_tokens = || router.counter("pillion_route_first_tokens_total");
    watch("a first token", || {
        router.raw("POST", "/v1/completions", &request.to_string());
        request["prompt"] = json!(ids(300));
        Some(first_tokens()).filter(|count| *count > 0)
    })
}

#[test]
fn the_first_token_comes_before_the_other_engine_is_heard_of() {
    let (prefill, decode) =
        (Engine::start(Manner::Events(vec![ONE_TOKEN.into()])), Engine::start(Manner::Hang));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    first_tokens_passed(&router);
    let mut stream = BufReader::new(router.send("POST", "/v1/completions", &stream_of(300).to_string()));
    let mut text = String::new();
    while !text.contains("\n\n\r\n") {
        assert_ne!(std::io::BufRead::read_line(&mut stream, &mut text).unwrap(), 0, "{text}");
    }
    assert!(text.contains("x-engine: it") && !text.contains("keep-alive"), "the engine's headers: {text}");
    assert!(text.contains("\"text\":\" a\"") && text.contains("\"finish_reason\":null"), "{text}");
    let rest = watch("the rest", || decode.asked().first().map(Asked::json));
    assert_eq!((&rest["prompt"], &rest["max_tokens"]), (&json!([5, 6, 9]), &json!(8)));
    assert_eq!(rest[PARAMS]["pillion"]["tokens"], 2, "the prompt's tokens saved by the other engine");
    assert_eq!(prefill.asked().last().unwrap().json()["return_token_ids"], true);
    drop(stream);
    watch("its end with the client", || (decode.hung_up() == decode.asked().len()).then_some(()));
}

/// A router whose first tokens all come with the rest, and the requests of its prefill engine.
fn with_rest(prefill: Manner, decode: Manner, arguments: &[&str]) -> Vec<Asked> {
    let (prefill, decode) = (Engine::start(prefill), Engine::start(decode));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[FIRST, arguments].concat());
    for _ in 0..2 {
        let engines_asked = || prefill.own_asked() >= 2 && decode.own_asked() >= 2;
        router.raw("POST", "/v1/completions", &stream_of(300).to_string());
        // The second request comes when the router knows all terms.
        watch("the terms", || (engines_asked() || !arguments.is_empty()).then_some(()));
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(router.counter("pillion_route_first_tokens_total"), 0);
    prefill.asked()
}

#[test]
fn a_first_token_waits_for_the_rest_where_engines_count_it_or_differ_or_the_operator_says_so() {
    let computed = || Manner::Json(200, json!({ "choices": [], PARAMS: said() }).to_string());
    let rest = || Manner::Events(vec!["data: 1\n\n".into()]);
    let samples = |defaults, manner| Manner::Samples(defaults, Box::new(manner));
    let penalty = || json!({ "presence_penalty": 0.5 });
    for (prefill, decode, arguments) in [
        (computed(), samples(penalty(), rest()), &[][..]),
        (samples(penalty(), computed()), rest(), &[]),
        (samples(json!({ "top_k": 20 }), computed()), rest(), &[]),
        (computed(), rest(), &["--first-token=false"]),
    ] {
        let asked = with_rest(prefill, decode, arguments);
        assert!(asked.len() == 2 && asked.iter().all(|asked| asked.json()["stream"] == false), "{asked:?}");
    }
}

#[test]
fn an_engine_that_does_not_say_its_length_is_named_once_and_waited_for_while_it_is_up() {
    let log = std::env::temp_dir().join(format!("pillion-route-{}", std::process::id()));
    let prefill = Engine::start(Manner::Events(vec![ONE_TOKEN.into()]));
    let (silent, decode) =
        (Engine::start(Manner::Freeze), Engine::start(Manner::Events(vec!["data: 1\n\n".into()])));
    let urls = [decode.url(), silent.url()];
    let router = Router::logging(&[&prefill.url()], &[&urls[0], &urls[1]], &[], File::create(&log).unwrap());
    let ask = || router.raw("POST", "/v1/completions", &stream_of(300).to_string());
    let first_tokens = || router.counter("pillion_route_first_tokens_total");
    watch("the first token of a stream", || {
        assert!(ask().contains("data: 1"));
        (first_tokens() > 0).then_some(())
    });
    assert!(silent.models_asked() > 0 && decode.models_asked() == 1);
    let first = decode.asked()[0].json()["prompt"].as_array().unwrap().len();
    assert_eq!(first, 300, "a request does not wait for an engine's limit");
    let lines = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let naming = lines.lines().filter(|line| line.contains(&urls[1]) && line.contains("--first-token"));
    assert_eq!(naming.count(), 1, "{lines}");
}

/// The whole stream with its first token ahead, from an engine with this manner.
fn with_first_token(manner: Manner) -> (String, Router, Engine) {
    let (prefill, decode) = (Engine::start(Manner::Events(vec![ONE_TOKEN.into()])), Engine::start(manner));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    let before = first_tokens_passed(&router);
    let answer = router.raw("POST", "/v1/completions", &stream_of(300).to_string());
    assert_eq!(router.counter("pillion_route_first_tokens_total"), before + 1);
    (unchunked(&answer), router, decode)
}

#[test]
fn a_rest_that_was_given_up_is_asked_for_once_more() {
    let gives_up =
        [Manner::Json(500, "{\"error\": \"e\"}".into()), Manner::Events(vec![ERROR.into(), DONE.into()])];
    for gives_up in gives_up.map(Box::new) {
        let right = Box::new(Manner::Events(vec!["data: 1\n\n".into(), DONE.into()]));
        let (answer, router, decode) = with_first_token(Manner::First(gives_up, right));
        assert!(answer.contains(" a") && answer.ends_with("data: 1\n\ndata: [DONE]\n\n"), "{answer}");
        assert!(!answer.contains("error"), "{answer}");
        assert_eq!(router.counter("pillion_route_retries_total"), 1);
        let [given_up, answered] = &decode.asked()[..] else { panic!("it is asked twice") };
        assert_eq!(given_up.body, answered.body);
    }
}

#[test]
fn usage_counts_a_first_token_as_one_of_the_answer() {
    let usage = |prompt, answer| json!({ "choices": [], "usage": { "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": 10 } });
    let rest = vec!["data: 1\n\n".to_owned(), format!("data: {}\n\n", usage(3, 7)), DONE.into()];
    let prefill = Engine::start(Manner::Events(vec![engine::one_token_with_usage()]));
    let decode = Engine::start(Manner::Events(rest));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    let before = first_tokens_passed(&router);
    let mut request = stream_of(300);
    request["stream_options"] = json!({ "include_usage": true });
    let answer = unchunked(&router.raw("POST", "/v1/completions", &request.to_string()));
    assert_eq!(router.counter("pillion_route_first_tokens_total"), before + 1);
    assert!(answer.contains(&usage(2, 8).to_string()) && answer.matches("usage").count() == 1, "{answer}");
}

#[test]
fn what_goes_wrong_behind_the_first_token_is_an_event() {
    let (answer, router, _decode) = with_first_token(Manner::Json(500, "{\"error\": \"e\"}".into()));
    assert!(answer.contains("data: {\"error\": \"e\"}\n\ndata: [DONE]\n\n"), "{answer}");
    let first_tokens = || router.counter("pillion_route_first_tokens_total");
    let before = first_tokens();
    for (name, value) in [("seed", 3), ("max_tokens", 999)] {
        let mut request = stream_of(300);
        request[name] = json!(value);
        let answer = router.raw("POST", "/v1/completions", &request.to_string());
        assert!(answer.starts_with("HTTP/1.1 500"), "the usual way: {answer}");
    }
    assert_eq!(first_tokens(), before);
}
