//! `pillion route` between a client and servers in place of engines.

#[path = "route/affinity.rs"]
mod affinity;
#[path = "route/apis.rs"]
mod apis;
mod client;
#[path = "route/drain.rs"]
mod drain;
#[path = "route/engine.rs"]
mod engine;
#[path = "route/first_token.rs"]
mod first_token;
#[path = "route/hostile.rs"]
mod hostile;
#[path = "route/judged.rs"]
mod judged;
#[path = "route/listed.rs"]
mod listed;
#[path = "route/observed.rs"]
mod observed;
#[path = "route/placed.rs"]
mod placed;
#[path = "route/tls.rs"]
mod tls;

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use client::sidecar::free_port;
use client::{WATCHDOG, watch};
use engine::{Asked, Engine, Manner};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

const PARAMS: &str = "kv_transfer_params";
const FIRST: &[&str] = &["--order", "prefill-first"];

struct Router {
    process: Child,
    port: u16,
}

impl Router {
    fn start(prefill: &[&str], decode: &[&str], arguments: &[&str]) -> Self {
        Self::logging(prefill, decode, arguments, Stdio::null())
    }

    fn logging(prefill: &[&str], decode: &[&str], arguments: &[&str], log: impl Into<Stdio>) -> Self {
        Self::writing(prefill, decode, arguments, log, Stdio::inherit())
    }

    /// A router with this log and this standard output.
    fn writing(
        prefill: &[&str],
        decode: &[&str],
        arguments: &[&str],
        log: impl Into<Stdio>,
        out: impl Into<Stdio>,
    ) -> Self {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
        command.args(["route", "--listen", &format!("127.0.0.1:{port}")]).args(arguments);
        if !arguments.contains(&"--decode-prompt-share") {
            // No prompt goes to one engine because of the times of this machine.
            command.args(["--decode-prompt-share", "0"]);
        }
        for (option, urls) in [("--prefill", prefill), ("--decode", decode)] {
            command.args(urls.iter().flat_map(|url| [option, *url]));
        }
        let process = command.stderr(log).stdout(out).spawn().unwrap();
        let router = Self { process, port };
        watch("the router's start", || TcpStream::connect(("127.0.0.1", port)).ok());
        router
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: router\r\nauthorization: Bearer t\r\nconnection: close"
        );
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    /// A whole answer, as bytes of the wire.
    fn raw(&self, method: &str, path: &str, body: &str) -> String {
        let mut text = String::new();
        self.send(method, path, body).read_to_string(&mut text).unwrap();
        text
    }

    /// The whole answer to a body with the content type JSON, of a form whose name has a byte of no letter.
    fn json(&self, path: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json; form=");
        stream.write_all(&[head.as_bytes(), b"\xe9"].concat()).unwrap();
        write!(stream, "\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len()).unwrap();
        stream.write_all(body).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn ask(&self, request: &Value) -> Asked {
        engine::read(&mut BufReader::new(self.send("POST", "/v1/completions", &request.to_string()))).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }

    fn counter(&self, line: &str) -> u64 {
        let page = self.raw("GET", "/metrics", "");
        page.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Token ids of a new prompt: no engine has answered it.
fn ids(tokens: u64) -> Vec<u64> {
    static PROMPTS: AtomicU64 = AtomicU64::new(0);
    let begin = PROMPTS.fetch_add(1, Ordering::Relaxed);
    (begin..begin + tokens).collect()
}

fn prompt(tokens: u64) -> Value {
    json!({ "prompt": ids(tokens), "max_tokens": 9, PARAMS: { "do_remote_prefill": true, "spoofed": true } })
}

fn said() -> Value {
    json!({ "do_remote_prefill": true, "remote_engine_id": "p", "pillion": { "tokens": 256 } })
}

fn computes() -> Engine {
    Engine::start(Manner::Json(200, json!({ "choices": [{ "text": "x" }], PARAMS: said() }).to_string()))
}

fn answers() -> Engine {
    Engine::start(Manner::Json(200, "{\"answer\":  1}".into()))
}

#[test]
fn a_long_prompt_is_computed_by_one_engine_and_answered_by_another() {
    let (prefill, decode) = (computes(), answers());
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    let answer = router.ask(&prompt(256));
    assert_eq!(answer.body, "{\"answer\":  1}", "byte for byte");
    let ([computed], [answered]) = (&prefill.asked()[..], &decode.asked()[..]) else {
        panic!("one request each")
    };
    assert_eq!(
        (&computed.json()["max_tokens"], &computed.json()[PARAMS]["do_remote_decode"]),
        (&json!(1), &json!(true))
    );
    assert_eq!((&answered.json()["max_tokens"], &answered.json()[PARAMS]), (&json!(9), &said()));
    assert!(computed.header("x-request-id").is_some());
    for name in ["x-request-id", "authorization"] {
        assert_eq!(computed.header(name), answered.header(name));
    }
    router.ask(&prompt(255));
    assert_eq!(prefill.asked().len(), 1, "a short one stays");
    assert!(
        decode.asked()[1].json().get(PARAMS).is_none(),
        "the client's own parameters for connectors are removed"
    );
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"short\"}"), 1);
    assert_eq!(router.counter("pillion_route_prompts_total{way=\"pair\"}"), 1);
}

#[test]
fn at_once_the_second_engine_does_not_wait_for_the_first_one_s_answer() {
    for arguments in [&["--order", "at-once"][..], &[]] {
        let (prefill, decode) = (Engine::start(Manner::Hang), answers());
        let router = Router::start(&[&prefill.url()], &[&decode.url()], arguments);
        assert_eq!(router.ask(&prompt(300)).body, "{\"answer\":  1}");
        assert_eq!(decode.asked()[0].json()[PARAMS]["do_remote_prefill"], true);
        watch("the end of the other request with the answer", || (prefill.hung_up() == 1).then_some(()));
    }
}

#[test]
fn a_prompt_that_may_take_longer_than_the_other_engine_waits_is_computed_first() {
    let (prefill, decode) = (computes(), answers());
    for (tokens, engine) in [(65_536, Value::Null), (65_537, json!("p"))] {
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
        // The first prompt of an engine is computed first in any case.
        router.ask(&prompt(300));
        router.ask(&prompt(tokens));
        assert_eq!(decode.asked().pop().unwrap().json()[PARAMS]["remote_engine_id"], engine);
    }
}

#[test]
fn an_engine_that_has_a_prompt_computes_the_next_one_before_the_other_engine_is_asked() {
    let computed = Manner::Json(200, json!({ PARAMS: said() }).to_string());
    let prefill = Engine::start(Manner::First(Box::new(Manner::Hang), Box::new(computed)));
    let decode = Engine::start(Manner::Hang);
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    let mut sent = Vec::new();
    for count in 1..=2 {
        sent.push(router.send("POST", "/v1/completions", &prompt(300).to_string()));
        watch("the requests", || {
            (prefill.asked().len() == count && decode.asked().len() == count).then_some(())
        });
    }
    let engines = decode.asked().into_iter().map(|asked| asked.json()[PARAMS]["remote_engine_id"].clone());
    assert_eq!(engines.collect::<Vec<_>>(), [Value::Null, json!("p")]);
}

/// The answer to a prompt sent to both roles at once. The prefill engine fails `so` once `count` requests
/// have come to the decode engine, which has two entries in the list.
fn fails_behind(so: Manner, decode: &Engine, count: usize, released: &Arc<AtomicBool>) -> Asked {
    let prefill = Engine::start(Manner::Once(Arc::clone(released), Box::new(so)));
    let router = Router::start(&[&prefill.url()], &[&decode.url(), &decode.url()], &[]);
    let asked = router.send("POST", "/v1/completions", &prompt(300).to_string());
    watch("the requests", || (decode.asked().len() == count).then_some(()));
    released.store(true, Ordering::Relaxed);
    engine::read(&mut BufReader::new(asked)).unwrap()
}

#[test]
fn who_was_asked_at_once_does_not_wait_for_what_failed() {
    let released = Arc::new(AtomicBool::new(false));
    // The decode engine may end before or after the prefill engine.
    let gives_up = Manner::Once(Arc::clone(&released), Box::new(Manner::Json(500, "{}".into())));
    let breaks = || Manner::Breaks(String::new());
    for (so, waiting, is_hung_up) in [
        (Manner::Json(200, "no parameters".into()), Manner::Hang, true),
        (breaks(), Manner::Hang, true),
        (breaks(), gives_up, false),
    ] {
        released.store(false, Ordering::Relaxed);
        let answers = Box::new(Manner::Json(200, "{\"answer\":  1}".into()));
        let decode = Engine::start(Manner::First(Box::new(waiting), answers));
        let told = fails_behind(so, &decode, 1, &released);
        assert_eq!((told.body.as_str(), decode.asked().len()), ("{\"answer\":  1}", 2));
        assert!(decode.asked()[1].json().get(PARAMS).is_none(), "there is nothing to wait for");
        if is_hung_up {
            watch("the hang-up", || (decode.hung_up() == 1).then_some(()));
        }
    }
}

#[test]
fn who_was_asked_at_once_is_left_to_end_its_own_wait_for_what_is_late() {
    for (late, reason, limit) in [(Manner::Hang, "late", "300ms"), (Manner::Freeze, "silent", "1000s")] {
        let released = Arc::new(AtomicBool::new(false));
        let answer = Manner::Json(200, "{\"answer\":  1}".into());
        let (prefill, decode) =
            (Engine::start(late), Engine::start(Manner::Once(Arc::clone(&released), Box::new(answer))));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--prefill-timeout", limit]);
        let asked = router.send("POST", "/v1/completions", &prompt(300).to_string());
        let failed = format!("pillion_route_prefill_failures_total{{reason=\"{reason}\"}}");
        watch("the failure", || (router.counter(&failed) == 1).then_some(()));
        released.store(true, Ordering::Relaxed);
        assert_eq!(engine::read(&mut BufReader::new(asked)).unwrap().body, "{\"answer\":  1}");
        assert_eq!(decode.asked().len(), 1, "its answer is used");
    }
}

#[test]
fn of_those_asked_at_once_two_that_broke_off_are_the_most() {
    let breaks = || Manner::Breaks(String::new());
    // A prompt sent a second time is not sent a third time.
    let gives_up = Manner::Json(500, "{\"error\": 1}".into());
    let decode = Engine::start(Manner::First(Box::new(Manner::Hang), Box::new(gives_up)));
    let told = fails_behind(breaks(), &decode, 1, &Arc::default());
    assert!(told.line.contains("500") && decode.asked().len() == 2, "{told:?} {:?}", decode.asked());
    // A decode engine broke off before the prefill engine did: no third engine is asked.
    let decode = Engine::start(Manner::First(Box::new(breaks()), Box::new(Manner::Hang)));
    let told = fails_behind(breaks(), &decode, 2, &Arc::default());
    assert!(told.line.contains("502") && decode.asked().len() == 2, "{told:?} {:?}", decode.asked());
    assert!(told.body.contains("broke off"), "{}", told.body);
    // A decode engine gives the prompt up after another one broke off.
    let gives_up = Manner::Json(500, "{\"error\": 1}".into());
    let decode = Engine::start(Manner::First(Box::new(breaks()), Box::new(gives_up)));
    let router =
        Router::start(&[&computes().url()], &[&decode.url(), &decode.url()], &["--order", "at-once"]);
    assert!(router.ask(&prompt(400)).line.contains("500") && decode.asked().len() == 2);
}

#[test]
fn streams_come_as_they_are_and_all_else_goes_to_who_answers() {
    let events: Vec<String> = (0..40).map(|at| format!("data: {{\"n\": {at}}}\n\n")).collect();
    let (prefill, decode) = (computes(), Engine::start(Manner::Events(events.clone())));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    let answer = router.raw("POST", "/v1/completions", &prompt(400).to_string());
    let head = answer.split_once("\r\n\r\n").unwrap().0;
    assert!(head.contains("text/event-stream") && head.contains("transfer-encoding: chunked"), "{head}");
    assert_eq!(unchunked(&answer), events.concat());
    router.raw("GET", "/v1/models", "");
    router.raw("POST", "/v1/audio/transcriptions", "no JSON");
    let lines: Vec<_> =
        decode.asked().iter().skip(1).map(|asked| (asked.line.clone(), asked.body.clone())).collect();
    assert_eq!(lines[0].0, "GET /v1/models HTTP/1.1");
    assert_eq!(lines[1].1, "no JSON");
}

#[test]
fn what_a_client_says_to_connectors_reaches_no_engine_by_another_path_or_as_what_is_no_json() {
    let decode = answers();
    let router = Router::start(&[&computes().url()], &[&decode.url()], &[]);
    let said = |max_tokens: &str| format!("{{\"{PARAMS}\": {{}}, \"max_tokens\": {max_tokens}}}");
    router.json("/v1/%63ompletions", said("1").as_bytes());
    assert_eq!(decode.asked()[0].body, "{\"max_tokens\":1}");
    let utf_16: Vec<u8> = said("1").encode_utf16().flat_map(u16::to_le_bytes).collect();
    for path in ["/v1/completions", "/v1/%63ompletions", "/inference/v1/generate"] {
        for body in [said("NaN").as_bytes(), &utf_16] {
            let answer = router.json(path, body);
            assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("the body is no JSON"), "{answer}");
        }
    }
    let nested = format!("{{\"sampling_params\": {{\"\\ud800\": 0, \"extra_args\": {}}}}}", said("1"));
    assert!(router.json("/inference/v1/generate", nested.as_bytes()).contains("400 Bad Request"));
    router.json("/reset_prefix_cache", b"");
    assert_eq!(decode.asked().len(), 2, "an empty body is not refused");
    for place in ["vllm_xargs", "sampling_params"] {
        let extra = json!({ "a": 1, PARAMS: { "do_remote_prefill": true } });
        let extra = if place == "vllm_xargs" { extra } else { json!({ "extra_args": extra }) };
        router.json("/inference/v1/generate", json!({ place: extra }).to_string().as_bytes());
        let asked = decode.asked().pop().unwrap().body;
        assert!(asked.contains("{\"a\":1}") && !asked.contains(PARAMS), "{asked}");
    }
}

#[test]
fn an_engine_that_does_not_compute_a_prompt_costs_no_answer() {
    let (fails, slow, decode) =
        (Engine::start(Manner::Json(500, "{}".into())), Engine::start(Manner::Hang), answers());
    let ways = [
        (fails.url(), "status", "1000s"),
        (slow.url(), "late", "300ms"),
        (format!("http://127.0.0.1:{}", free_port()), "unreachable", "1000s"),
    ];
    for (url, reason, limit) in &ways {
        let arguments = [FIRST, &["--prefill-timeout", limit]].concat();
        let router = Router::start(&[url], &[&decode.url()], &arguments);
        assert_eq!(router.ask(&prompt(400)).body, "{\"answer\":  1}", "{reason}");
        assert!(decode.asked().last().unwrap().json().get(PARAMS).is_none(), "there is nothing to wait for");
        assert_eq!(
            router.counter(&format!("pillion_route_prefill_failures_total{{reason=\"{reason}\"}}")),
            1
        );
        router.ask(&prompt(400));
        let alone = router.counter("pillion_route_prompts_total{way=\"no_prefill\"}");
        assert_eq!(
            alone,
            u64::from(*reason == "unreachable"),
            "an unreachable engine is not asked again at once"
        );
        router.ask(&prompt(400));
        let alone = router.counter("pillion_route_prompts_total{way=\"no_prefill\"}");
        let expected =
            [("status", 0), ("late", 1), ("unreachable", 2)].into_iter().find(|(name, _)| name == reason);
        assert_eq!(
            Some(alone),
            expected.map(|(_, count)| count),
            "an engine late twice in a row is not asked either"
        );
    }
    watch("the hang-ups", || (slow.hung_up() == 2).then_some(()));
}

#[test]
fn an_engine_that_is_late_is_down_if_its_server_is_silent() {
    let (still, decode) = (Engine::start(Manner::Freeze), answers());
    let arguments = [FIRST, &["--prefill-timeout", "300ms"]].concat();
    let router = Router::start(&[&still.url()], &[&decode.url()], &arguments);
    assert_eq!(router.ask(&prompt(400)).body, "{\"answer\":  1}");
    assert_eq!(router.counter("pillion_route_prefill_failures_total{reason=\"late\"}"), 1);
    let up = |count: usize| {
        router.raw("GET", "/health", "").contains(&format!("\"prefill_up\":{count}")).then_some(())
    };
    watch("the engine down", || up(0));
}

#[test]
fn a_prompt_that_was_given_up_is_put_to_two_engines_once_more() {
    let failed = || Manner::Json(500, "{\"error\": \"e\"}".into());
    let event = || Manner::Events(vec!["data: {\"error\": {}}\n\n".into(), "data: [DONE]\n\n".into()]);
    let ways = [
        (failed(), "at-once"),
        (failed(), "by-load"),
        (failed(), "prefill-first"),
        (event(), "prefill-first"),
    ];
    for (gives_up, order) in ways {
        let (first, second) = (computes(), computes());
        let right = Manner::Json(200, "{\"answer\": 2}".into());
        let decode = Engine::start(Manner::First(Box::new(gives_up), Box::new(right)));
        let router = Router::start(&[&first.url(), &second.url()], &[&decode.url()], &["--order", order]);
        assert_eq!(router.ask(&prompt(300)).body, "{\"answer\": 2}");
        assert_eq!(decode.asked().len(), 2);
        if order == "prefill-first" {
            assert_eq!((first.asked().len(), second.asked().len()), (1, 1), "another one computes");
        }
        assert_eq!(router.counter("pillion_route_retries_total"), 1);
    }
    // Also for a stream whose first event may not come from another engine.
    let right = Manner::Events(vec!["data: 1\n\n".into()]);
    let decode = Engine::start(Manner::First(Box::new(failed()), Box::new(right)));
    let router = Router::start(&[&computes().url()], &[&decode.url()], &[]);
    assert!(router.raw("POST", "/v1/completions", &stream_of(300).to_string()).contains("data: 1"));
    assert_eq!(router.counter("pillion_route_retries_total"), 1);
    // No third attempt, and no second one after a part of the answer was sent.
    let (prefill, decode) = (computes(), Engine::start(failed()));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], FIRST);
    assert!(router.ask(&prompt(300)).line.contains("500"));
    assert_eq!((prefill.asked().len(), decode.asked().len()), (2, 2));
    router.ask(&prompt(20));
    assert_eq!(decode.asked().len(), 3, "one engine's own error is the client's");
    let events = vec!["data: {}\n\n".into(), "data: {\"error\": {}}\n\n".into()];
    let decode = Engine::start(Manner::Events(events));
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
    let told = router.raw("POST", "/v1/completions", &prompt(300).to_string());
    assert!(told.contains("error") && decode.asked().len() == 1);
}

/// The beginning of a chat, as vLLM writes it.
const ROLE: &str = concat!(
    r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
    "\n\n"
);
const ERROR: &str = "data: {\"error\": {\"message\": \"Internal server error\"}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const COMMENT: &str = ": keep-alive\n\n";

/// A prompt of more than 256 tokens.
fn chat() -> Value {
    let said = "a".repeat(2000);
    json!({ "messages": [{ "role": "user", "content": said }], "max_tokens": 9, "stream": true })
}

/// The data of a body in chunks.
fn unchunked(answer: &str) -> String {
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    body.split("\r\n").skip(1).step_by(2).collect()
}

#[test]
fn a_chat_that_was_given_up_behind_its_role_is_put_to_two_engines_once_more() {
    let several = vec![ROLE.into(), ERROR.into(), DONE.into()];
    let one = vec![several.concat()];
    let slow = [&[COMMENT.to_owned(), COMMENT.into()], &several[..]].concat();
    for gives_up in [several, one, slow] {
        let right = vec![COMMENT.into(), ROLE.into(), COMMENT.into(), "data: 1\n\n".into(), DONE.into()];
        let manners = [Manner::Events(gives_up), Manner::Events(right.clone())].map(Box::new);
        let [gives_up, answers] = manners;
        let (prefill, decode) = (computes(), Engine::start(Manner::First(gives_up, answers)));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &[]);
        let answer = router.raw("POST", "/v1/chat/completions", &chat().to_string());
        assert_eq!(unchunked(&answer), right.concat(), "held events come in their order");
        assert_eq!(router.counter("pillion_route_retries_total"), 1);
    }
}

#[test]
fn another_one_is_asked_for_what_was_given_up() {
    let gives_up = || Engine::start(Manner::Json(500, "{}".into()));
    let (prefill, all) = (computes(), [gives_up(), gives_up()]);
    let router = Router::start(&[&prefill.url()], &[&all[0].url(), &all[1].url()], &[]);
    router.ask(&prompt(300));
    assert_eq!(all.map(|decode| decode.asked().len()), [1, 1]);
}

#[test]
fn an_engine_that_stands_still_is_given_up_long_before_its_time() {
    let decode = answers();
    let start = |manner| {
        let still = Engine::start(manner);
        let arguments = [FIRST, &["--prefill-timeout", "1000s"]].concat();
        let router = Router::start(&[&still.url()], &[&decode.url()], &arguments);
        let asked = router.send("POST", "/v1/completions", &prompt(400).to_string());
        (router, asked)
    };
    for (router, asked) in [start(Manner::Freeze), start(Manner::Vanish)] {
        assert_eq!(engine::read(&mut BufReader::new(asked)).unwrap().body, "{\"answer\":  1}");
        let failed = "pillion_route_prefill_failures_total{reason=\"silent\"}";
        watch("the failure", || (router.counter(failed) == 1).then_some(()));
    }
}

#[test]
fn another_engine_answers_for_one_that_ends_before_it_said_anything() {
    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let begun = format!("{HEAD}{:x}\r\n{ROLE}\r\n", ROLE.len());
    let ends = [String::new(), HEAD.into(), begun].map(|begin| Engine::start(Manner::Breaks(begin)));
    for end in &ends {
        let decode = answers();
        let router = Router::start(&[&computes().url()], &[&end.url(), &decode.url()], &[]);
        // At least one of these beginnings goes to the engine that ends.
        for start in 0..20 {
            let asked = json!({ "prompt": vec![start; 20] });
            assert_eq!(router.ask(&asked).body, "{\"answer\":  1}");
        }
        assert_eq!(end.asked().len(), 1, "it is left alone then");
    }
    let before = || ends.each_ref().map(|end| end.asked().len());
    let asked = before();
    let urls = ends.each_ref().map(Engine::url);
    let router = Router::start(&[&computes().url()], &urls.each_ref().map(String::as_str), &[]);
    let told = router.ask(&prompt(20));
    assert!(told.line.contains("502") && told.body.contains("the connection ended before"), "{told:?}");
    assert_eq!(before().iter().sum::<usize>(), asked.iter().sum::<usize>() + 2, "a third one is spared");
    // The prefill engine is one of the two.
    let broken = Engine::start(Manner::Breaks(String::new()));
    let asked = before();
    let router = Router::start(&[&broken.url()], &urls.each_ref().map(String::as_str), FIRST);
    assert!(router.ask(&prompt(400)).line.contains("502"));
    assert_eq!(before().iter().sum::<usize>(), asked.iter().sum::<usize>() + 1, "a second one is spared");
    // A prompt is not sent again after an engine broke off on it.
    let gives_up = Engine::start(Manner::Json(500, "{\"error\": 1}".into()));
    let router = Router::start(&[&broken.url()], &[&gives_up.url()], FIRST);
    assert!(router.ask(&prompt(400)).line.contains("500") && gives_up.asked().len() == 1);
    // Requests other than prompts are sent once.
    let router = Router::start(&[&computes().url()], &[&urls[0], &urls[0]], &[]);
    let asked = ends[0].asked().len();
    let told = router.raw("POST", "/v1/audio/transcriptions", "");
    assert!(told.contains("502") && ends[0].asked().len() == asked + 1, "{told}");
    assert!(router.raw("GET", "/health", "").contains("\"decode_up\":2"));
}

#[test]
fn another_engine_answers_for_one_without_room() {
    let full = Engine::start(Manner::Json(503, "{\"error\": \"busy\"}".into()));
    let (prefill, decode) = (computes(), answers());
    let router = Router::start(&[&prefill.url()], &[&full.url(), &decode.url()], &[]);
    for start in 0..40 {
        assert_eq!(router.ask(&json!({ "prompt": vec![start; 20] })).body, "{\"answer\":  1}");
    }
    assert!(full.asked().len() > 1, "it is asked again");
    let router = Router::start(&[&prefill.url()], &[&full.url(), &full.url()], &[]);
    let told = router.ask(&prompt(20));
    assert!(told.line.contains("503") && told.body.contains("busy"), "the last one's own error: {told:?}");
    let gone = format!("http://127.0.0.1:{}", free_port());
    let router = Router::start(&[&prefill.url()], &[&full.url(), &gone], &[]);
    assert!((0..20).all(|start| router.ask(&json!({ "prompt": [start] })).line.contains("503")));
}

#[test]
fn a_burst_of_prompts_that_begin_alike_is_spread_once_they_are_computed() {
    const PROMPTS: usize = 8;
    let computed = Manner::Json(200, json!({ PARAMS: said() }).to_string());
    let prefill = Engine::start(Manner::Behind(PROMPTS, Box::new(computed)));
    let decode = [(); 2].map(|()| Engine::start(Manner::Hang));
    let router = Router::start(&[&prefill.url()], &[&decode[0].url(), &decode[1].url()], &[]);
    let request = prompt(300).to_string();
    let _asked = [(); PROMPTS].map(|()| router.send("POST", "/v1/completions", &request));
    let counts = || decode.each_ref().map(|engine| engine.asked().len());
    watch("the requests", || (counts().iter().sum::<usize>() == PROMPTS).then_some(()));
    assert!(counts().iter().all(|count| *count > 1), "{:?}", counts());
}

#[test]
fn another_engine_answers_for_one_that_stands_still() {
    const PROMPTS: u64 = 8;
    let (decode, slow) = (answers(), Engine::start(Manner::Hang));
    let waits = Router::start(&[&slow.url()], &[&slow.url()], &[]);
    let _waiting = waits.send("POST", "/v1/completions", &prompt(9).to_string());
    watch("the request", || (slow.asked().len() == 1).then_some(()));
    for still in [Engine::start(Manner::Freeze), Engine::start(Manner::Stall)] {
        let router = Router::start(&[&still.url()], &[&still.url(), &decode.url()], &[]);
        let send =
            |start| router.send("POST", "/v1/completions", &json!({ "prompt": vec![start; 20] }).to_string());
        for asked in (0..PROMPTS).map(send).collect::<Vec<_>>() {
            assert_eq!(engine::read(&mut BufReader::new(asked)).unwrap().body, "{\"answer\":  1}");
        }
        let given_up = still.asked().len();
        assert!((1..PROMPTS as usize).contains(&given_up), "beginnings are spread: {given_up}");
        watch("the hang-ups", || (still.hung_up() == given_up).then_some(()));
        assert!(router.raw("GET", "/health", "").contains("\"decode_up\":1"));
    }
    assert_eq!(slow.hung_up(), 0, "a slow engine that lives is waited for, also in that time");
}

#[test]
fn the_one_engine_that_answers_is_waited_for_though_it_stands_still() {
    let still = Engine::start(Manner::Freeze);
    let router = Router::start(&[&still.url()], &[&still.url()], &[]);
    let mut waiting = router.send("POST", "/v1/completions", &prompt(9).to_string());
    waiting.set_read_timeout(Some(Duration::from_secs(7))).unwrap();
    let read = waiting.read(&mut [0]).unwrap_err().kind();
    assert!(matches!(read, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{read:?}");
    assert_eq!(still.hung_up(), 0);
}

#[test]
fn a_client_that_hangs_up_ends_both_requests() {
    for order in ["prefill-first", "at-once", "by-load"] {
        let (prefill, decode) = (Engine::start(Manner::Hang), Engine::start(Manner::Hang));
        let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--order", order]);
        let asked = router.send("POST", "/v1/completions", &prompt(400).to_string());
        let engines = if order == "prefill-first" { vec![&prefill] } else { vec![&prefill, &decode] };
        engines.iter().for_each(|engine| watch("the request", || (engine.asked().len() == 1).then_some(())));
        drop(asked);
        engines.iter().for_each(|engine| watch("the hang-up", || (engine.hung_up() == 1).then_some(())));
    }
}

#[test]
fn another_engine_answers_for_one_that_is_gone() {
    let decode = answers();
    let gone = [free_port(), free_port()].map(|port| format!("http://127.0.0.1:{port}"));
    let router = Router::start(&[&gone[0]], &[&gone[0], &gone[1], &decode.url()], &[]);
    for tokens in 1..20 {
        assert_eq!(router.ask(&prompt(tokens)).body, "{\"answer\":  1}");
    }
    let alone = Router::start(&[&gone[0]], &[&gone[1]], &[]);
    let answer = alone.ask(&prompt(9));
    assert!(answer.line.contains("502"), "{}", answer.line);
    let text = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(text.contains("--decode") && text.contains(&gone[1]), "{text}");
    assert!(alone.raw("GET", "/health", "").starts_with("HTTP/1.1 503"));
}

#[test]
fn bodies_beyond_the_memory_for_them_are_refused_while_a_stream_goes_on() {
    let events: Vec<String> = (0..40).map(|at| format!("data: {at}\n\n")).collect();
    let released = Arc::new(AtomicBool::new(false));
    let held = Manner::First(
        Box::new(Manner::Held(events, Arc::clone(&released))),
        Box::new(Manner::Json(200, "{}".into())),
    );
    let decode = Engine::start(held);
    let log = std::env::temp_dir().join(format!("pillion-route-refused-{}", std::process::id()));
    let router = Router::logging(
        &[&computes().url()],
        &[&decode.url()],
        &["--request-memory", "2MiB"],
        File::create(&log).unwrap(),
    );
    let body = |bytes: usize| json!({ "prompt": [1], "user": "a".repeat(bytes) }).to_string();
    let mut stream = router.send("POST", "/v1/completions", &body(900_000));
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).unwrap();
    let ask = || router.raw("POST", "/v1/completions", &body(500_000));
    assert!(ask().starts_with("HTTP/1.1 200"), "the body of a request that is being answered is gone");
    let mut begun = TcpStream::connect(("127.0.0.1", router.port)).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 900000\r\n\r\n";
    write!(begun, "{head}{}", "a".repeat(800_000)).unwrap();
    let told = watch("a refusal", || Some(ask()).filter(|told| told.starts_with("HTTP/1.1 503")));
    assert!(told.contains("--request-memory"), "{told}");
    ask();
    assert!(router.counter("pillion_route_requests_refused_total{reason=\"client\"}") > 1);
    let lines = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    assert_eq!(
        lines.matches("--request-memory").count(),
        1,
        "the log is not as long as its requests: {lines}"
    );
    assert!(router.ask(&prompt(9)).line.contains("200"), "a short one has room");
    released.store(true, Ordering::Relaxed);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("data: 39\n\n\r\n0\r\n\r\n"), "{text}");
    drop(begun);
    watch("room again", || ask().starts_with("HTTP/1.1 200").then_some(()));
}

#[test]
fn it_ends_once_the_last_answer_has() {
    let events: Vec<String> = (0..40).map(|at| format!("data: {at}\n\n")).collect();
    let released = Arc::new(AtomicBool::new(false));
    let (prefill, decode) = (computes(), Engine::start(Manner::Held(events, Arc::clone(&released))));
    let mut router = Router::start(&[&prefill.url()], &[&decode.url()], &["--drain-time", "0s"]);
    let mut idle = TcpStream::connect(("127.0.0.1", router.port)).unwrap();
    let mut stream = router.send("POST", "/v1/completions", &prompt(9).to_string());
    watch("the request", || (decode.asked().len() == 1).then_some(()));
    router.signal(Signal::SIGTERM);
    watch("a refusal", || TcpStream::connect(("127.0.0.1", router.port)).err());
    assert_eq!(idle.read(&mut [0]).unwrap(), 0, "a client that asks nothing is let go");
    assert!(router.process.try_wait().unwrap().is_none());
    released.store(true, Ordering::Relaxed);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("data: 39\n\n\r\n0\r\n\r\n"), "{text}");
    assert!(router.process.wait().unwrap().success());
}

fn stream_of(tokens: u64) -> Value {
    json!({ "prompt": ids(tokens), "max_tokens": 9, "stream": true })
}
