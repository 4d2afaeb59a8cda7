//! A prefill engine is judged by its work, and the client gets its statements about the prompt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{now, watch};
use super::engine::{Engine, Manner};
use super::{PARAMS, Router, answers, prompt, said, unchunked};

const FAILURES: &str = "pillion_route_prefill_failures_total";
const ORDERS: [&str; 3] = ["by-load", "prefill-first", "at-once"];

fn failed(router: &Router, reason: &str) -> u64 {
    router.counter(&format!("{FAILURES}{{reason=\"{reason}\"}}"))
}

#[test]
fn an_engine_that_accepts_and_never_answers_is_noticed_and_waited_for_once() {
    for order in ORDERS {
        let prefill = Engine::start(Manner::Hang);
        // Its sidecar has no promise: it waits a second, and computes.
        let right = Manner::Json(200, "{\"answer\":  1}".into());
        let decode = Engine::start(Manner::Awaits(Duration::from_secs(1), Box::new(right)));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        let begun = now();
        let waits: Vec<_> = (0..50)
            .map(|_| {
                let asked = now();
                assert_eq!(router.ask(&prompt(300)).body, "{\"answer\":  1}");
                asked.elapsed()
            })
            .take_while(|_| failed(&router, "silent") == 0)
            .collect();
        watch("the failure", || (failed(&router, "silent") > 0).then_some(()));
        let noticed = begun.elapsed();
        assert!(noticed < Duration::from_secs(10), "{order}: {noticed:?}");
        let longest = waits.iter().max().unwrap();
        assert!(*longest <= Duration::from_secs(5), "{order}: {waits:?}");
        // Also during its trial no request waits for it.
        let before = decode.asked().len();
        for _ in 0..50 {
            assert_eq!(router.ask(&prompt(300)).body, "{\"answer\":  1}");
            thread::sleep(Duration::from_millis(120));
        }
        let waiting = decode.asked().into_iter().skip(before).filter(|asked| !asked.json()[PARAMS].is_null());
        assert_eq!(waiting.count(), 0, "{order}");
        assert!(prefill.asked().len() > waits.len(), "{order}: it is tried again");
        assert!(failed(&router, "silent") >= 1, "{order}");
    }
}

#[test]
fn an_engine_in_a_long_step_whose_first_prompt_is_promised_is_waited_for() {
    let released = Arc::new(AtomicBool::new(false));
    let computed = Manner::Json(200, json!({ PARAMS: said() }).to_string());
    let prefill = Engine::start(Manner::Once(Arc::clone(&released), Box::new(computed)));
    // The first decode engine waits for the promise; there is no promise for others.
    let right = || Box::new(Manner::Json(200, "{}".into()));
    let others = Manner::Awaits(Duration::from_secs(1), right());
    let first = Manner::Once(Arc::clone(&released), right());
    let decode = Engine::start(Manner::First(Box::new(first), Box::new(others)));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(router.ask(&prompt(300)).line.contains("200")));
        }
        thread::sleep(Duration::from_secs(8));
        assert_eq!(decode.asked().len(), 1, "one shows whether prompts are promised");
        released.store(true, Ordering::Relaxed);
    });
    assert_eq!((failed(&router, "silent"), prefill.asked().len(), decode.asked().len()), (0, 4, 4));
}

#[test]
fn what_a_client_mistypes_is_no_failure_and_is_asked_for_once() {
    for order in ORDERS {
        let wrong = || Engine::start(Manner::Json(404, "{\"error\": \"no such model\"}".into()));
        let (prefill, decode) = (wrong(), wrong());
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        for count in 1..4 {
            assert!(router.ask(&prompt(300)).line.contains("404"));
            assert_eq!(decode.asked().len(), count, "{order}");
        }
        let failures: u64 =
            ["status", "refused", "silent"].iter().map(|reason| failed(&router, reason)).sum();
        assert_eq!(failures, 0, "{order}");
        // An adapter unknown to this engine.
        let decode = answers();
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        assert_eq!(router.ask(&prompt(300)).body, "{\"answer\":  1}");
        let refused = failed(&router, "refused");
        assert!(refused == 1 || order == "at-once" && decode.asked().len() == 1, "{order} {refused}");
    }
}

fn states(cached: u64) -> Value {
    json!({ "prompt_tokens": 900, "completion_tokens": 1, "prompt_tokens_details": { "cached_tokens": cached } })
}

#[test]
fn cached_tokens_are_those_of_the_engine_that_computed_in_every_order() {
    for (order, computed) in ORDERS.iter().flat_map(|order| [(order, 0), (order, 896)]) {
        let answer = json!({ "choices": [], "usage": states(computed), PARAMS: said() }).to_string();
        let prefill = Engine::start(Manner::Json(200, answer));
        let whole = |cached: u64| json!({ "id": "a", "usage": states(cached) }).to_string();
        let stream = |cached: u64| {
            vec![
                "data: {\"choices\":[{\"text\":\" a\"}]}\n\n".to_owned(),
                format!("data: {}\n\n", json!({ "choices": [], "usage": states(cached) })),
                "data: [DONE]\n\n".to_owned(),
            ]
        };
        let decode = Engine::start(Manner::Json(200, whole(899)));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        for _ in 0..3 {
            assert_eq!(router.ask(&prompt(900)).body, whole(computed), "{order}");
        }
        let decode = Engine::start(Manner::Events(stream(899)));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        for _ in 0..3 {
            let answer = router.raw("POST", "/v1/completions", &prompt(900).to_string());
            assert_eq!(unchunked(&answer), stream(computed).concat(), "{order}");
        }
    }
}

#[test]
fn long_prompts_of_a_tokenizer_of_bytes_are_for_two() {
    for bytes_per_token in [1, 4] {
        let usage = json!({ "prompt_tokens": 1200 / bytes_per_token });
        let computed = json!({ "choices": [], "usage": usage, PARAMS: said() }).to_string();
        let (prefill, decode) = (Engine::start(Manner::Json(200, computed)), answers());
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", "prefill-first"]);
        for bytes in [1200, 300, 400, 600, 900, 1020] {
            router.ask(&json!({ "prompt": "a".repeat(bytes) }));
        }
        let pairs = router.counter("pillion_route_prompts_total{way=\"pair\"}");
        assert_eq!(pairs, if bytes_per_token == 1 { 6 } else { 1 });
    }
}

#[test]
fn the_first_prompt_of_an_engine_is_computed_before_another_one_is_asked() {
    let computed = Manner::Json(200, json!({ PARAMS: said() }).to_string());
    let (prefill, decode) = (Engine::start(computed), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    (0..2).for_each(|_| _ = router.ask(&prompt(300)));
    let engines = decode.asked().into_iter().map(|asked| asked.json()[PARAMS]["remote_engine_id"].clone());
    assert_eq!(engines.collect::<Vec<_>>(), [json!("p"), Value::Null]);
}
