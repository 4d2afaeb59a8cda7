//! A running sidecar that routers ask for scores.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use shm_protocol::layout::header;
use shm_protocol::prefill::PrefillRate;

use crate::client::engine::Engine;
use crate::client::prompts::{TOKENS, facts, keys_of};
use crate::client::sidecar::{Sidecar, free_port};
use crate::client::{WATCHDOG, hex, now, pillion, watch};

const TOKEN: &str = "fedcba9876543210fedcba9876543210";
const RUN: [u8; 16] = [5; 16];

/// The address of routers.
struct Routers {
    address: String,
    token_file: PathBuf,
}

/// An answer: its status, its head and its JSON.
struct RouterAnswer {
    status: u16,
    head: String,
    json: Value,
}

impl Routers {
    fn new(folder: &Path) -> Self {
        let token_file = folder.join("score-token");
        std::fs::write(&token_file, TOKEN).unwrap();
        std::fs::set_permissions(&token_file, PermissionsExt::from_mode(0o600)).unwrap();
        Self { address: format!("127.0.0.1:{}", free_port()), token_file }
    }

    /// A sidecar with this address.
    fn start(&self, folder: &Path, more: &str) -> Sidecar {
        let (address, file) = (&self.address, &self.token_file);
        let options: [&dyn AsRef<std::ffi::OsStr>; 7] =
            [&"--dram", &"64MiB", &"--score-listen", address, &"--score-token-file", file, &more];
        let sidecar = Sidecar::start(folder, &options);
        sidecar.wait_started();
        sidecar
    }

    fn ask(&self, body: &Value) -> RouterAnswer {
        self.say("POST /score", TOKEN, &body.to_string())
    }

    /// The places of a prompt in an answer of status 200.
    fn score(&self, tokens: &[u32]) -> Value {
        let RouterAnswer { status, json, .. } = self.ask(&json!({ "tokens": tokens }));
        assert_eq!(status, 200, "{json}");
        json
    }

    fn refused(&self, status: u16, body: &Value, text: &str) {
        let answer = self.ask(body);
        let said = answer.json["error"].as_str().unwrap_or_default();
        assert!(answer.status == status && said.contains(text), "{}: {said}", answer.status);
    }

    fn say(&self, request: &str, token: &str, body: &str) -> RouterAnswer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let length = body.len();
        let head = format!(
            "{request} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\nContent-Length: \
             {length}\r\n\r\n"
        );
        // A refused body may not be read to its end.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_default();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
        RouterAnswer {
            status,
            head: head.to_lowercase(),
            json: serde_json::from_str(body).unwrap_or_default(),
        }
    }
}

#[test]
fn a_router_learns_how_much_of_a_prompt_is_in_memory_and_on_disk_and_when_the_rest_is_computed() {
    let folder = tempfile::tempdir().unwrap();
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let routers = Routers::new(folder.path());
    let sidecar = routers.start(folder.path(), &format!("--ssd={}:64MiB:create", disk.path().display()));
    let prompt: Vec<u32> = (7..7 + 100 * TOKENS as u32 + 10).collect();
    routers.refused(400, &json!({ "tokens": prompt }), "no engine is connected");
    let mut engine = Engine::stating(facts("tiny"), RUN, &sidecar, None);
    engine.save_keys(&keys_of(&prompt));
    sidecar.wait_metric("pillion_ssd_written_blocks_total", |written| written == 100);

    let mut score = routers.score(&prompt);
    let whole = json!({
        "namespace": engine.namespace(), "block_tokens": 16, "tokens": 1610, "device": null, "memory": 1600,
        "disk": 1600, "found": 1600, "peers": {}, "promised": 0, "expected_ms": null,
    });
    assert_eq!(score, whole);
    // A millisecond for a token.
    let rate = PrefillRate::new(1e6, 0.0).unwrap();
    engine.scheduler.store(header::PREFILL, rate.to_word());
    watch("an expected time", || {
        score = routers.score(&prompt);
        (!score["expected_ms"].is_null()).then_some(())
    });
    assert_eq!(score["expected_ms"], json!(10.0), "ten tokens are not kept");

    let mut other = prompt.clone();
    other[805] += 1;
    assert_eq!(routers.score(&other)["memory"], json!(800), "up to the block that differs");
    let keys: Vec<String> = keys_of(&prompt).iter().map(hex).collect();
    let by_keys = routers.ask(&json!({ "namespace": engine.namespace(), "keys": keys[..50] }));
    assert_eq!((&by_keys.json["memory"], &by_keys.json["tokens"]), (&json!(800), &json!(800)));
    let socket = sidecar.socket.to_str().unwrap();
    let tokens: Vec<String> = prompt.iter().map(u32::to_string).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let printed = |through: &[&str]| {
        let output = pillion(&[&["ctl"], through, &["score"], &tokens[..]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let file = routers.token_file.to_str().unwrap();
    assert_eq!(printed(&["--socket", socket]), score);
    assert_eq!(printed(&["--address", &routers.address, "--token-file", file]), score);
    let hint = |through: &str, words: &[&str]| {
        let output = pillion(&[&["ctl", "--socket", through, "hint"], words, &tokens[..]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        serde_json::from_slice::<Value>(&output.stdout).map_err(|_| said)
    };
    let pinned = json!({
        "namespace": engine.namespace(), "action": "pin", "seconds": 60, "blocks": 100, "done": 100, "clipped": 0,
        "missing": 0,
    });
    assert_eq!(hint(socket, &["pin", "--seconds", "60"]), Ok(pinned));
    assert!(hint(socket, &["keep"]).unwrap_err().contains("pass one of retain, pin, demote, prefetch"));
    assert!(hint(socket, &["pin", "--seconds", "3601"]).unwrap_err().contains("pass 1 to 3600"));

    // The next life has the blocks on its disk, and the same engine.
    drop(engine);
    sidecar.kill();
    let sidecar = routers.start(folder.path(), &format!("--ssd={}:64MiB:create", disk.path().display()));
    let engine = Engine::stating(facts("tiny"), RUN, &sidecar, None);
    let score = routers.score(&prompt);
    assert_eq!((&score["memory"], &score["disk"], &score["found"]), (&json!(0), &json!(1600), &json!(1600)));
    assert_eq!(sidecar.metric("pillion_query_waits_total"), 0);
    let fetched = hint(sidecar.socket.to_str().unwrap(), &["prefetch"]).unwrap();
    assert_eq!((&fetched["done"], &fetched["missing"]), (&json!(100), &json!(0)));
    watch("blocks from the disk", || (routers.score(&prompt)["memory"] == json!(1600)).then_some(()));
    drop(engine);
    sidecar.terminate();
}

#[test]
fn a_router_s_token_is_for_scores_alone_and_wrong_questions_are_refused_with_what_to_ask() {
    let folder = tempfile::tempdir().unwrap();
    let routers = Routers::new(folder.path());
    let sidecar = routers.start(folder.path(), "--log-level=info");
    let engine = Engine::stating(facts("tiny"), RUN, &sidecar, None);
    watch("an engine", || (routers.ask(&json!({ "tokens": [] })).status == 200).then_some(()));
    let status = |request: &str, token: &str| routers.say(request, token, "{}").status;
    assert_eq!(status("POST /score", &TOKEN[1..]), 401);
    assert_eq!(
        (status("GET /score", TOKEN), status("POST /drain", TOKEN), status("GET /namespaces", TOKEN)),
        (405, 404, 404)
    );
    for wrong in [
        json!({}),
        json!({ "tokens": [1], "keys": [] }),
        json!({ "text": "hello" }),
        json!({ "tokens": [-1] }),
    ] {
        assert_eq!(routers.ask(&wrong).status, 400, "{wrong}");
    }
    routers.refused(400, &json!({ "keys": ["0"] }), "pillion keys");
    let unknown = json!({ "namespace": "0".repeat(32), "tokens": [1] });
    routers.refused(400, &unknown, &format!("pass one of {} (tiny)", engine.namespace()));
    routers.refused(413, &json!({ "tokens": vec![0; 16 * 32_769] }), "32768 at most");
    routers.refused(413, &json!({ "tokens": vec![1_000_000_000; 500_000] }), "at most 4194304 bytes");
    let mut second = facts("other");
    let other = Engine::stating(second.clone(), [6; 16], &sidecar, None);
    routers.refused(400, &json!({ "tokens": [1] }), "engines of several namespaces");
    drop(other);
    second.extend([("model".into(), "windows".into()), ("group_kind".into(), "window 64".into())]);
    let windows = Engine::stating(second, [7; 16], &sidecar, None);
    routers.refused(400, &json!({ "namespace": windows.namespace(), "tokens": [1] }), "no leading runs");
    let mut sealed = facts("sealed");
    sealed.insert("none_hash".into(), "random of e".into());
    let sealed = Engine::stating(sealed, [8; 16], &sidecar, None);
    routers.refused(400, &json!({ "namespace": sealed.namespace(), "tokens": [1] }), "PYTHONHASHSEED");
    assert!(sidecar.shows("pillion_score_refused_total{reason=\"token\"} 1"));
    assert!(sidecar.shows("pillion_score_refused_total{reason=\"too_large\"} 2"));
    assert_eq!(sidecar.metric("pillion_control_refused_total"), 0);
    sidecar.terminate();
}

#[test]
fn scores_take_5_percent_of_the_data_thread_and_then_routers_are_refused_for_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let routers = Routers::new(folder.path());
    let sidecar = routers.start(folder.path(), "--log-level=info");
    let mut engine = Engine::stating(facts("tiny"), RUN, &sidecar, None);
    let prompt: Vec<u32> = (0..3_000 * TOKENS as u32).collect();
    let keys = keys_of(&prompt);
    engine.save_keys(&keys);
    let body = json!({ "keys": keys.iter().map(hex).collect::<Vec<_>>() }).to_string();
    let began = now();
    let (refused, answered) = (AtomicBool::new(false), AtomicBool::new(false));
    // A busy machine may never spend the budget.
    let asks = || began.elapsed() < Duration::from_secs(if refused.load(Ordering::Relaxed) { 3 } else { 15 });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while asks() {
                    let answer = routers.say("POST /score", TOKEN, &body);
                    match answer.status {
                        200 => answered.store(true, Ordering::Relaxed),
                        429 => {
                            assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
                            refused.store(true, Ordering::Relaxed);
                        }
                        other => panic!("{other}: {}", answer.json),
                    }
                }
            });
        }
        // Engines are answered meanwhile.
        let probe = engine.save(&mut 0);
        assert_eq!(engine.served(&probe), (probe.clone(), 0));
    });
    assert!(answered.into_inner());
    let elapsed = began.elapsed();
    let page = sidecar.page("/metrics").unwrap();
    let spent = page.lines().find_map(|line| line.strip_prefix("pillion_score_seconds_total "));
    let spent: f64 = spent.unwrap().parse().unwrap();
    // The last second may be cut, and its last step may end beyond the budget.
    let most = 0.05 * (elapsed.as_secs_f64().ceil() + 1.0) + 0.02;
    assert!(spent < most, "{spent} s of {elapsed:?}");
    let refused = refused.into_inner();
    assert!(!refused || spent > 0.049, "refused after {spent} s");
    assert_eq!(sidecar.metric("pillion_score_refused_total") > 0, refused);
    std::thread::sleep(Duration::from_millis(1_100));
    assert_eq!(routers.say("POST /score", TOKEN, &body).json["memory"], json!(48_000), "after a second");
    sidecar.terminate();
}

/// The documented example for a router in Python.
#[test]
fn the_example_of_a_router_names_the_pod_that_has_the_prompt_and_none_without_an_answer() {
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let pods = folders.each_ref().map(|folder| Routers::new(folder.path()));
    let start = |pod: usize| pods[pod].start(folders[pod].path(), "--log-level=info");
    let sidecars = [start(0), start(1)];
    let mut engines = sidecars.each_ref().map(|sidecar| Engine::stating(facts("tiny"), RUN, sidecar, None));
    let prompt: Vec<u32> = (0..20 * TOKENS as u32).collect();
    // The last pod has no sidecar.
    let best = || {
        let addresses: Vec<&str> = pods.iter().map(|pod| pod.address.as_str()).collect();
        let mut example = std::process::Command::new("python3");
        example.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/score_pods.py"));
        example.args(["--deadline-s", "30", "--token-file"]).arg(&pods[0].token_file).args(addresses);
        let mut example = example.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let tokens: Vec<String> = prompt.iter().map(u32::to_string).collect();
        example.stdin.take().unwrap().write_all(tokens.join(" ").as_bytes()).unwrap();
        let output = example.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(best(), "", "no pod has any of it");
    let keys = keys_of(&prompt);
    engines[0].save_keys(&keys[..5]);
    assert_eq!(best(), pods[0].address);
    engines[1].save_keys(&keys[..15]);
    assert_eq!(best(), pods[1].address, "by the tokens found");
    // The first pod computes all of it sooner than the second one the rest.
    for (engine, ns) in engines.iter_mut().zip([1e4, 1e6]) {
        engine.scheduler.store(header::PREFILL, PrefillRate::new(ns, 0.0).unwrap().to_word());
    }
    watch("the faster pod", || (best() == pods[0].address).then_some(()));
    sidecars.into_iter().for_each(Sidecar::terminate);
}
