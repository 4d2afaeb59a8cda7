//! Prompts placed by their expected times, and prompts of which a decode engine has nearly all.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::sidecar::free_port;
use super::client::watch;
use super::engine::{Engine, Manner};
use super::observed::figure;
use super::{FIRST, PARAMS, Router, answers, computes, prompt, said, stream_of};

/// The time of the one prompt behind a learned speed.
const LEARNED: Duration = Duration::from_millis(300);
/// More prompts than any router here sends to a prefill engine without answers.
const PROMPTS_MAX: usize = 40;

fn placed(router: &Router, way: &str) -> u64 {
    router.counter(&format!("pillion_route_prompts_total{{way=\"{way}\"}}"))
}

/// A router with a learned speed of its prefill engine, and the prefill engine, without further answers.
fn learned(arguments: &[&str]) -> (Router, Engine, Engine) {
    let released = Arc::new(AtomicBool::new(false));
    let computed = Manner::Json(200, json!({ PARAMS: said() }).to_string());
    let held = Manner::Once(Arc::clone(&released), Box::new(computed));
    let (prefill, decode) = (Engine::start(held), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[FIRST, arguments].concat());
    let first = router.send("POST", "/v1/completions", &prompt(300).to_string());
    watch("the prompt", || (prefill.asked().len() == 1).then_some(()));
    thread::sleep(LEARNED);
    released.store(true, Ordering::Relaxed);
    watch("its answer", || (decode.asked().len() == 1).then_some(()));
    drop(first);
    released.store(false, Ordering::Relaxed);
    (router, prefill, decode)
}

/// Sends prompts until one of them goes to the decode engine alone, for this reason; the prefill engine keeps all others.
fn sent_until(router: &Router, way: &str) -> Vec<TcpStream> {
    let mut sent = Vec::new();
    while placed(router, way) == 0 {
        let before = placed(router, "pair");
        sent.push(router.send("POST", "/v1/completions", &prompt(300).to_string()));
        watch("its way", || (placed(router, "pair") > before || placed(router, way) > 0).then_some(()));
        assert!(sent.len() < PROMPTS_MAX, "{}", router.raw("GET", "/metrics", ""));
    }
    sent
}

#[test]
fn a_prompt_that_would_wait_goes_to_the_engine_that_answers() {
    let (router, prefill, decode) = learned(&["--decode-prompt-share", "25"]);
    let speed = figure(&router, "prefill_tokens_per_second", &prefill.url(), &[]).unwrap();
    assert!((1.0..=1000.0).contains(&speed), "{speed}: 300 tokens in {LEARNED:?}");
    let _sent = sent_until(&router, "sooner");
    watch("the request", || (decode.asked().len() == 2).then_some(()));
    assert!(decode.asked()[1].json().get(PARAMS).is_none(), "there is nothing to wait for");
    assert_eq!(figure(&router, "alone_tokens_total", &decode.url(), &[]), Some(300.0));
}

#[test]
fn with_a_share_of_zero_no_prompt_goes_there_because_of_time() {
    let (router, prefill, decode) = learned(&["--decode-prompt-share", "0"]);
    let send = |_| router.send("POST", "/v1/completions", &prompt(300).to_string());
    let _sent: Vec<_> = (0..10).map(send).collect();
    watch("the requests", || (prefill.asked().len() == 11).then_some(()));
    assert_eq!(decode.asked().len(), 1);
}

#[test]
fn a_target_keeps_prompts_at_the_engine_that_computes_while_it_is_met() {
    let arguments = ["--decode-prompt-share", "25", "--ttft-target", "2s"];
    let (router, prefill, decode) = learned(&arguments);
    let _sent = sent_until(&router, "target");
    // The prompt before took LEARNED at least, so this many take 2 s; the first one may seem to be computed.
    assert!(prefill.asked().len() >= 4, "{}", prefill.asked().len());
    watch("the request", || (decode.asked().len() == 2).then_some(()));
    assert_eq!(placed(&router, "sooner"), 0);
}

/// A turn of a chat behind an earlier one, with a new message of this length.
fn turn(messages: &mut Vec<Value>, length: usize) -> Value {
    messages.push(json!({ "role": "user", "content": "a".repeat(length) }));
    json!({ "messages": messages, "max_tokens": 9 })
}

#[test]
fn a_turn_whose_beginning_the_engine_has_answered_goes_to_it_alone() {
    let (prefill, decode) = (computes(), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    let mut messages = Vec::new();
    let ask = |request: &Value| router.raw("POST", "/v1/chat/completions", &request.to_string());
    ask(&turn(&mut messages, 3000));
    // The engine has its own answer.
    messages.push(json!({ "role": "assistant", "content": "b".repeat(2000) }));
    ask(&turn(&mut messages, 100));
    assert_eq!((placed(&router, "held"), prefill.asked().len()), (1, 1));
    assert!(decode.asked()[1].json().get(PARAMS).is_none());
    messages.push(json!({ "role": "assistant", "content": "b" }));
    ask(&turn(&mut messages, 1000));
    assert_eq!(
        (placed(&router, "held"), prefill.asked().len()),
        (1, 2),
        "a long message is computed elsewhere"
    );
}

#[test]
fn a_prompt_that_no_engine_has_answered_yet_is_held_by_none() {
    let (prefill, decode) = (computes(), Engine::start(Manner::Hang));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    let request = prompt(300).to_string();
    let _sent = [(); 2].map(|()| {
        let count = prefill.asked().len();
        let sent = router.send("POST", "/v1/completions", &request);
        watch("the request", || {
            (prefill.asked().len() > count && decode.asked().len() > count).then_some(())
        });
        sent
    });
    assert_eq!(placed(&router, "pair"), 2);
}

#[test]
fn the_speed_of_an_engine_that_answers_is_learned_from_prompts_of_its_own() {
    let events = vec!["data: 1\n\n".to_owned()];
    let (away, decode) = (format!("http://127.0.0.1:{}", free_port()), Engine::start(Manner::Events(events)));
    let router = Router::start(&[&away], &[&decode.url()], FIRST);
    let speed = || figure(&router, "prefill_tokens_per_second", &decode.url(), &[]).unwrap();
    router.raw("POST", "/v1/completions", &stream_of(100).to_string());
    assert_eq!(speed(), 0.0, "a short prompt shows no speed");
    router.raw("POST", "/v1/completions", &stream_of(300).to_string());
    assert!(speed() >= 1.0);
}
