//! Figures of each engine, and the access log.

use std::fs::File;
use std::io::{BufReader, Read};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::client::sidecar::free_port;
use super::client::watch;
use super::engine::{self, Engine, Manner};
use super::{FIRST, PARAMS, Router, answers, chat, computes, prompt, said};

/// More lines than the room in the queue and a pipe.
const UNREAD_REQUESTS: usize = 1500;
const STREAMS: usize = 200;

/// A metric of an engine, by its labels.
pub(super) fn figure(router: &Router, name: &str, engine: &str, labels: &[&str]) -> Option<f64> {
    let (page, engine) = (router.raw("GET", "/metrics", ""), format!("engine=\"{engine}\""));
    let named = format!("pillion_route_engine_{name}{{");
    let mut lines = page.lines().filter(|line| line.starts_with(&named) && line.contains(&engine));
    let line = lines.find(|line| labels.iter().all(|label| line.contains(label)))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Usage of a prompt of 300 tokens.
fn usage(cached: u64) -> Value {
    json!({ "prompt_tokens": 300, "prompt_tokens_details": { "cached_tokens": cached } })
}

fn answers_with(usage: &Value) -> Manner {
    Manner::Json(200, json!({ "answer": 1, "usage": usage }).to_string())
}

#[test]
fn a_prompt_that_is_computed_by_both_engines_is_counted_at_both() {
    let prefill = Engine::start(Manner::Json(200, json!({ PARAMS: said(), "usage": usage(0) }).to_string()));
    let event = |usage| format!("data: {}\n\n", json!({ "choices": [], "usage": usage }));
    let ways = [
        (answers_with(&usage(299)), "taken"),
        (answers_with(&usage(0)), "recomputed"),
        (answers_with(&Value::Null), "unstated"),
        (Manner::Events(vec!["data: {}\n\n".into(), event(usage(299))]), "taken"),
        (Manner::Events(vec!["data: {}\n\n".into(), event(usage(0))]), "recomputed"),
        (Manner::Events(vec!["data: {}\n\n".into()]), "unstated"),
    ];
    for order in ["at-once", "prefill-first"] {
        // Asked at once, the decode engine may end first, before the prefill engine's result is known.
        let is_known = |result: &str| order == "prefill-first" || result != "unstated";
        for (manner, result) in ways.iter().filter(|(_, result)| is_known(result)) {
            let decode = Engine::start(manner.clone());
            let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
            router.raw("POST", "/v1/completions", &prompt(300).to_string());
            for (engine, role) in [(&prefill, "role=\"prefill\""), (&decode, "role=\"decode\"")] {
                let of = |result: &str| {
                    let result = format!("result=\"{result}\"");
                    figure(&router, "handovers_total", &engine.url(), &[role, &result]).unwrap()
                };
                watch("the result", || (of(result) == 1.0).then_some(()));
                assert_eq!(["taken", "recomputed", "unstated"].map(of).iter().sum::<f64>(), 1.0);
            }
        }
    }
}

#[test]
fn a_prompt_that_was_not_computed_is_a_failure_and_not_handed_over() {
    let (prefill, decode) = (Engine::start(Manner::Breaks(String::new())), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    router.ask(&prompt(300));
    assert_eq!(figure(&router, "answers_total", &prefill.url(), &["code=\"broken\""]), Some(1.0));
    assert_eq!(figure(&router, "answers_total", &decode.url(), &["code=\"2xx\""]), Some(1.0));
    for result in ["taken", "recomputed", "unstated"] {
        let label = format!("result=\"{result}\"");
        assert_eq!(figure(&router, "handovers_total", &decode.url(), &[&label]), Some(0.0));
    }
    assert_eq!(figure(&router, "up", &prefill.url(), &[]), Some(0.0));
    assert_eq!(figure(&router, "up", &decode.url(), &[]), Some(1.0));
}

#[test]
fn engines_have_their_requests_under_way_their_answers_and_their_times() {
    let released = Arc::new(AtomicBool::new(false));
    let events = vec!["data: 1\n\n".to_owned(), "data: 2\n\n".into()];
    let (prefill, decode) = (computes(), Engine::start(Manner::Held(events, Arc::clone(&released))));
    let away = format!("http://127.0.0.1:{}", free_port());
    let router = Router::start(&[&prefill.url()], &[&away, &decode.url()], &[]);
    let streams: Vec<_> =
        (0..STREAMS).map(|_| router.send("POST", "/v1/completions", &chat().to_string())).collect();
    let of = |name: &str, labels: &[&str]| figure(&router, name, &decode.url(), labels).unwrap();
    let count = STREAMS as f64;
    watch("the streams", || (of("duration_seconds_count", &["part=\"first\""]) == count).then_some(()));
    for name in ["open_requests", "load"] {
        assert_eq!(of(name, &[]), count, "{name}");
    }
    assert_eq!(of("duration_seconds_count", &["part=\"whole\""]), 0.0);
    assert_eq!(figure(&router, "up", &away, &[]), Some(0.0));
    assert!(figure(&router, "answers_total", &away, &["code=\"unreachable\""]).unwrap() >= 1.0);
    released.store(true, Ordering::Relaxed);
    for mut stream in streams {
        stream.read_to_string(&mut String::new()).unwrap();
    }
    watch("the ends", || (of("duration_seconds_count", &["part=\"whole\""]) == count).then_some(()));
    assert_eq!((of("open_requests", &[]), of("answers_total", &["code=\"2xx\""])), (0.0, count));
}

#[test]
fn a_client_that_hangs_up_and_a_prompt_that_is_given_up_are_counted_at_their_engines() {
    let (prefill, decode) = (computes(), Engine::start(Manner::Hang));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    let client = router.send("POST", "/v1/completions", &prompt(300).to_string());
    watch("the request", || (decode.asked().len() == 1).then_some(()));
    drop(client);
    let dropped = || figure(&router, "answers_total", &decode.url(), &["code=\"dropped\""]);
    watch("the end", || (dropped() == Some(1.0)).then_some(()));
    let (prefill, decode) = (computes(), Engine::start(Manner::Json(500, "{}".into())));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    router.ask(&prompt(300));
    for engine in [&prefill, &decode] {
        assert_eq!(figure(&router, "retries_total", &engine.url(), &[]), Some(1.0));
    }
}

/// A router with an access log of JSON, and a function for its lines so far.
fn logging(prefill: &str, decode: &str, arguments: &[&str]) -> (Router, impl Fn() -> Vec<Value> + use<>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access");
    let arguments = [&["--access-log", "--log-format", "json"], arguments].concat();
    let file = File::create(&path).unwrap();
    let router = Router::writing(&[prefill], &[decode], &arguments, Stdio::null(), file);
    let lines = move || {
        let _folder = &folder;
        let text = std::fs::read_to_string(&path).unwrap();
        text.split_inclusive('\n')
            .filter_map(|line| serde_json::from_str(line.strip_suffix('\n')?).ok())
            .collect()
    };
    (router, lines)
}

#[test]
fn each_request_has_a_line_with_its_engines_and_nothing_of_its_body() {
    let (prefill, decode) = (computes(), Engine::start(Manner::Events(vec!["data: 1\n\n".into()])));
    let (router, lines) = logging(&prefill.url(), &decode.url(), FIRST);
    router.raw("GET", "/health", "");
    router.raw("GET", "/metrics", "");
    let body = chat().to_string();
    router.raw("POST", "/v1/chat/completions?key=secret", &body);
    watch("the line", || (lines().len() == 1).then_some(()));
    let line = &lines()[0];
    assert_eq!(Some(line["id"].as_str().unwrap()), decode.asked()[0].header("x-request-id"));
    let expected = json!({
        "client": "127.0.0.1", "method": "POST", "path": "/v1/chat/completions", "status": 200, "way": "pair",
        "prefill": prefill.url(), "decode": decode.url(), "request_bytes": body.len(), "answer_bytes": 9,
        "level": "INFO", "message": "request",
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&line[name], value, "{name}: {line}");
    }
    let (first, whole) = (line["first_ms"].as_f64().unwrap(), line["whole_ms"].as_f64().unwrap());
    assert!(0.0 < first && first <= whole, "{line}");
    assert!(line.get("error").is_none() && !line.to_string().contains("secret"), "{line}");
    router.json("/v1/completions", b"{\"prompt\": \"secret\" NaN}");
    router.raw("POST", "/collective_rpc", "");
    watch("the lines", || (lines().len() == 3).then_some(()));
    let (wrong, nowhere) = (&lines()[1], &lines()[2]);
    assert_eq!((&wrong["status"], &wrong["error"]), (&json!(400), &json!("the body is no JSON")));
    assert_eq!((&nowhere["status"], &nowhere["way"]), (&json!(501), &json!("refused")));
    assert!(lines().iter().all(|line| !line.to_string().contains("secret")));
}

#[test]
fn a_line_says_why_a_request_failed() {
    let away = format!("http://127.0.0.1:{}", free_port());
    let (router, lines) = logging(&away, &away, FIRST);
    router.ask(&prompt(300));
    let breaks = "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\na part";
    let decode = Engine::start(Manner::Breaks(breaks.into()));
    let (broken, broken_lines) = logging(&away, &decode.url(), FIRST);
    let _ = broken.raw("POST", "/v1/embeddings", "{}");
    let hangs = Engine::start(Manner::Hang);
    let (left, left_lines) = logging(&away, &hangs.url(), FIRST);
    let client = left.send("POST", "/v1/embeddings", "{}");
    watch("the request", || (hangs.asked().len() == 1).then_some(()));
    drop(client);
    let why = |lines: &dyn Fn() -> Vec<Value>| {
        watch("the line", || lines().pop().map(|line| (line["error"].as_str().unwrap().to_owned(), line)))
    };
    let (error, line) = why(&lines);
    assert!(error.contains(&away) && error.contains("cannot be reached"), "{line}");
    assert_eq!((&line["status"], &line["prefill_failure"]), (&json!(502), &json!("unreachable")));
    let (error, line) = why(&broken_lines);
    assert!(error.contains("broke off") && line["answer_bytes"] == 6, "{line}");
    let (error, line) = why(&left_lines);
    assert!(error.contains("hung up") && line.get("status").is_none(), "{line}");
}

#[test]
fn an_access_log_that_nobody_reads_holds_up_no_request() {
    let decode = answers();
    let arguments = ["--access-log"];
    let mut router =
        Router::writing(&[&computes().url()], &[&decode.url()], &arguments, Stdio::null(), Stdio::piped());
    for _ in 0..UNREAD_REQUESTS {
        assert!(router.raw("POST", "/collective_rpc", "").starts_with("HTTP/1.1 501"));
    }
    let dropped = router.counter("pillion_route_access_lines_dropped_total");
    assert!(dropped > 0);
    let answer = engine::read(&mut BufReader::new(router.send("POST", "/v1/completions", "{}"))).unwrap();
    assert!(answer.line.contains("200"), "streams go on");
    let mut read = String::new();
    let out = router.process.stdout.take().unwrap();
    nix::sys::signal::kill(super::Pid::from_raw(router.process.id() as i32), super::Signal::SIGTERM).unwrap();
    BufReader::new(out).read_to_string(&mut read).unwrap();
    let lines = read.lines().filter(|line| line.contains("method=\"POST\" path=\"/collective_rpc\"")).count();
    assert!(
        (1024..UNREAD_REQUESTS).contains(&lines),
        "{lines} lines are written at the end, {dropped} dropped"
    );
}
