//! A running sidecar under an operator's requests: `pillion ctl` and its HTTP requests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::client::engine::{Engine, SAVED};
use crate::client::sidecar::{Sidecar, free_port};
use crate::client::{BLOCK_BYTES, hex, pillion, watch};
use serde_json::{Value, json};
use shm_protocol::message::{Kind, Message, Status};
use tools::ctl::CtlError;

const BLOCKS: u64 = SAVED.end as u64 - SAVED.start as u64;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The answer of a successful `pillion ctl`.
fn ctl(sidecar: &Sidecar, arguments: &[&str]) -> Value {
    let socket = sidecar.socket.to_str().unwrap();
    let output = pillion(&[&["ctl", "--socket", socket], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn status(refused: Result<Value, CtlError>) -> u16 {
    match refused {
        Err(CtlError::Refused { status, .. }) => status.as_u16(),
        other => panic!("{other:?}"),
    }
}

fn log(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("log")).unwrap()
}

/// A folder on a disk with direct I/O, maybe the root disk, and the option that gives it to the sidecar.
fn disk() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let option = format!("--ssd={}:64MiB:create", folder.path().display());
    (folder, option)
}

#[test]
fn an_evicted_namespace_is_a_miss_and_the_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (_disk, ssd) = disk();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"32MiB", &ssd]);
    sidecar.wait_started();
    let (mut tiny, mut other) = (Engine::connect(&sidecar), Engine::of("other", &sidecar, None));
    let mut stamp = 0;
    let gone = tiny.save(&mut stamp);
    let kept = other.save(&mut stamp);
    sidecar.wait_metric("pillion_ssd_written_blocks_total", |written| written == 2 * BLOCKS);
    assert_eq!(tiny.served(&gone), (gone.clone(), 0));

    let namespace = tiny.namespace().to_owned();
    let entry = ctl(&sidecar, &["namespaces", &namespace]);
    assert_eq!((&entry["memory_blocks"], &entry["disk_blocks"]), (&json!(BLOCKS), &json!(BLOCKS)), "{entry}");
    assert_eq!(entry["facts"], json!({"model": "tiny"}));
    let asked = [hex(&gone[0]), hex(&kept[0])];
    let found = ctl(&sidecar, &["lookup", &namespace, &asked[0], &asked[1]]);
    let here = |key: &str, is: bool| json!({"key": key, "memory": is, "disk": is, "peers": []});
    assert_eq!(
        found["keys"],
        json!([here(&asked[0], true), here(&asked[1], false)]),
        "the second key belongs to another namespace"
    );

    let evicted = ctl(&sidecar, &["evict", &namespace]);
    assert_eq!(evicted, json!({"namespace": namespace, "memory_blocks": BLOCKS, "disk_blocks": 0}));
    assert_eq!(tiny.served(&gone), (Vec::new(), 0), "{}", log(folder.path()));
    assert_eq!(other.served(&kept), (kept.clone(), 0));
    let found = ctl(&sidecar, &["lookup", &namespace, &asked[0]]);
    assert_eq!(found["keys"], json!([here(&asked[0], false)]));
    let page = ctl(&sidecar, &["namespaces"]);
    let counts = page["namespaces"].as_array().unwrap().iter().map(|entry| {
        (
            entry["facts"]["model"].as_str().unwrap(),
            entry["memory_blocks"].clone(),
            entry["disk_blocks"].clone(),
        )
    });
    let mut counts: Vec<_> = counts.collect();
    counts.sort_unstable_by_key(|(model, ..)| *model);
    assert_eq!(counts, [("other", json!(BLOCKS), json!(BLOCKS)), ("tiny", json!(0), json!(0))]);
    sidecar.wait_metric("pillion_pool_used_bytes", |used| used == BLOCKS * BLOCK_BYTES);
    let again = tiny.save(&mut stamp);
    assert_eq!(tiny.served(&again), (again, 0));
    let unknown = sidecar.ask("POST", "/evict", &json!({"namespace": "0".repeat(32)}));
    assert_eq!(status(unknown), 404);
    sidecar.terminate();
}

#[test]
fn what_an_engine_was_told_of_is_loaded_although_it_was_evicted() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB"]);
    sidecar.wait_started();
    let mut engine = Engine::connect(&sidecar);
    let mut stamp = 0;
    let keys = engine.save(&mut stamp);
    engine.save(&mut stamp);
    assert!(!engine.loaded(SAVED, &keys), "the engine's memory holds others by now");
    engine.scheduler.open_log(0, &keys);
    let lease = engine.next_op();
    assert_eq!(engine.scheduler.query(0, lease, BLOCKS as u32).value, BLOCKS as u32);
    let namespace = engine.namespace().to_owned();
    assert_eq!(ctl(&sidecar, &["evict", &namespace])["memory_blocks"], json!(2 * BLOCKS));
    assert_eq!(sidecar.metric("pillion_blocks"), 0);
    let op = engine.next_op();
    let load = Message { op, lease, step: 1, ..Message::new(Kind::Load) };
    engine.scheduler.with_blocks(load, &SAVED.collect::<Vec<_>>());
    assert_eq!(watch("the load's end", || engine.load_ended(op)), Status::Ok);
    assert!(engine.loaded(SAVED, &keys));
    sidecar.wait_metric("pillion_pool_used_bytes", |used| used == 0);
    sidecar.terminate();
}

#[test]
fn evictions_beside_saves_and_queries_never_show_other_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (_disk, ssd) = disk();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB", &ssd]);
    sidecar.wait_started();
    let mut engine = Engine::connect(&sidecar);
    let evict = json!({"namespace": engine.namespace()});
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let evicting = scope.spawn(|| {
            let mut evictions = 0;
            while !stop.load(Ordering::Relaxed) {
                sidecar.ask("POST", "/evict", &evict).unwrap();
                evictions += 1;
            }
            evictions
        });
        let mut stamp = 0;
        for _ in 0..30 {
            let keys = engine.post_save(&mut stamp);
            engine.scheduler.saved();
            assert_eq!(engine.served(&keys).1, 0);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(evicting.join().unwrap() > 0);
    });
    let namespace = engine.namespace().to_owned();
    ctl(&sidecar, &["evict", &namespace]);
    sidecar.wait_metric("pillion_pool_used_bytes", |used| used == 0);
    let keys = engine.save(&mut 1_000_000);
    assert_eq!(engine.served(&keys), (keys, 0));
    sidecar.terminate();
}

#[test]
fn what_disks_alone_keep_is_evicted_too_and_what_an_earlier_life_left_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let (_disk, ssd) = disk();
    let start = || {
        let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"32MiB", &ssd]);
        sidecar.wait_started();
        sidecar
    };
    let sidecar = start();
    let mut engine = Engine::connect(&sidecar);
    let keys = engine.save(&mut 0);
    let namespace = engine.namespace().to_owned();
    sidecar.wait_metric("pillion_ssd_written_blocks_total", |written| written == BLOCKS);
    sidecar.kill();

    let sidecar = start();
    let listed = ctl(&sidecar, &["namespaces", &namespace]);
    assert_eq!(listed, json!({"namespace": namespace, "memory_blocks": 0, "disk_blocks": BLOCKS}));
    let found = ctl(&sidecar, &["lookup", &namespace, &hex(&keys[0])]);
    assert_eq!(found["keys"][0]["disk"], json!(true));
    let evicted = ctl(&sidecar, &["evict", &namespace]);
    assert_eq!(evicted["disk_blocks"], json!(BLOCKS));
    assert_eq!(Engine::connect(&sidecar).served(&keys), (Vec::new(), 0));
    sidecar.terminate();
}

#[test]
fn a_drain_by_the_socket_is_that_of_sigterm() {
    let end = |by_socket: bool| {
        let folder = tempfile::tempdir().unwrap();
        let (disk, ssd) = disk();
        let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"32MiB", &ssd]);
        sidecar.wait_started();
        let mut engine = Engine::connect(&sidecar);
        engine.save(&mut 0);
        if by_socket {
            assert_eq!(ctl(&sidecar, &["drain"]), json!({"draining": true}));
            assert_eq!(sidecar.wait(), Some(0));
        } else {
            sidecar.terminate();
        }
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        let said: Vec<bool> =
            [" draining", " drained"].iter().map(|line| log(folder.path()).contains(line)).collect();
        let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"32MiB", &ssd]);
        sidecar.wait_started();
        let recovered = sidecar.metric("pillion_ssd_recovered_blocks_total");
        drop(disk);
        (left, said, recovered)
    };
    let ended = end(true);
    assert_eq!(ended, end(false));
    assert_eq!(
        ended,
        (vec!["log".into()], vec![true, true], BLOCKS),
        "no socket is left, and every block is written"
    );
}

#[test]
fn the_log_level_changes_what_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB"]);
    let refusals = || log(folder.path()).matches("a control request was refused").count();
    let be_refused = || assert_eq!(status(sidecar.ask("GET", "/nothing", &Value::Null)), 404);
    assert_eq!(ctl(&sidecar, &["log-level"]), json!({"level": "info"}));
    be_refused();
    assert_eq!(refusals(), 0);
    assert_eq!(ctl(&sidecar, &["log-level", "debug"]), json!({"level": "debug", "before": "info"}));
    be_refused();
    assert_eq!(refusals(), 1);
    assert_eq!(ctl(&sidecar, &["log-level", "error"]), json!({"level": "error", "before": "debug"}));
    be_refused();
    let warned = log(folder.path()).len();
    let none = crate::client::greet(
        &sidecar.socket,
        &crate::client::hello("", 1, shm_protocol::handshake::Role::Scheduler { run: [1; 16] }),
        &[],
    );
    drop(none);
    assert_eq!((refusals(), log(folder.path()).len()), (1, warned), "not even a warning");
    assert_eq!(status(sidecar.ask("POST", "/log-level", &json!({"level": "loud"}))), 400);
    assert_eq!(sidecar.metric("pillion_control_refused_total"), 4);
    sidecar.terminate();
}

#[test]
fn the_socket_is_its_user_s_alone_and_the_old_page_names_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("elsewhere/c.sock");
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB", &"--control-socket", &other]);
    assert_eq!(std::fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o600);
    let (head, body) = sidecar.get("/namespaces").unwrap();
    assert!(head.starts_with("HTTP/1.1 410 "), "{head}");
    assert_eq!(body, format!("run pillion ctl --control-socket {} namespaces\n", other.display()));
    let path = other.to_str().unwrap();
    let output = pillion(&["ctl", "namespaces", "--control-socket", path]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer, json!({"namespaces": [], "peers": [], "not_told": []}));
    let socket = sidecar.socket.to_str().unwrap();
    let absent = pillion(&["ctl", "namespaces", "--socket", socket]);
    let text = String::from_utf8_lossy(&absent.stderr);
    assert!(!absent.status.success() && text.contains("--control-socket PATH"), "{text}");
    let doctor = pillion(&["doctor", "--socket", socket, "--control-socket", path]);
    let text = String::from_utf8_lossy(&doctor.stdout);
    assert!(text.contains("ok    control: 0 namespaces"), "{text}");
    let blind = pillion(&["doctor", "--socket", socket]);
    let text = String::from_utf8_lossy(&blind.stdout);
    assert!(
        text.contains("warn  control: namespaces were not checked") && text.contains("--control-socket PATH"),
        "{text}"
    );
    sidecar.terminate();
    assert!(!other.exists());
}

fn token_file(folder: &Path, mode: u32) -> PathBuf {
    let path = folder.join("token");
    std::fs::write(&path, format!("{TOKEN}\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    path
}

#[test]
fn over_tcp_who_has_the_token_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let file = token_file(folder.path(), 0o644);
    let serve = ["serve", "--dram", "16MiB", "--gpu", "off", "--http", "127.0.0.1:0", "--socket"];
    let socket = folder.path().join("p.sock").display().to_string();
    let refused = |more: &[&str]| {
        let output = pillion(&[&serve[..], &[&socket, "--control-listen", &address], more].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&[]).contains("pass --control-token-file FILE too"));
    assert!(refused(&["--control-token-file", file.to_str().unwrap()]).contains("chmod o-rwx"));

    let file = token_file(folder.path(), 0o640);
    let sidecar = Sidecar::start(
        folder.path(),
        &[&"--dram", &"16MiB", &"--control-listen", &address, &"--control-token-file", &file],
    );
    let ask = |header: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        write!(stream, "GET /namespaces HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(ask(""), "401");
    let wrong = [
        format!("Bearer {}", &TOKEN[1..]),
        format!("Bearer {TOKEN}0"),
        TOKEN.into(),
        format!("Basic {TOKEN}"),
    ];
    for wrong in wrong {
        assert_eq!(ask(&format!("Authorization: {wrong}\r\n")), "401", "{wrong}");
    }
    assert_eq!(ask(&format!("Authorization: Bearer {TOKEN}\r\n")), "200");
    assert!(sidecar.shows("pillion_control_refused_total{reason=\"token\"} 5"));
    let file = file.to_str().unwrap();
    let output = pillion(&["ctl", "--address", &address, "--token-file", file, "drain"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sidecar.wait(), Some(0));
    let alone = pillion(&["ctl", "--address", &address, "drain"]);
    assert!(String::from_utf8_lossy(&alone.stderr).contains("--token-file FILE"));
}
