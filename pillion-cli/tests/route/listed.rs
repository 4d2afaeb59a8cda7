//! The list of engines changes while the router runs, and no stream is cut.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use super::client::watch;
use super::engine::{Engine, Manner};
use super::{Router, answers, computes, prompt};

fn write(file: &Path, prefill: &[&Engine], decode: &[&Engine]) {
    let urls = |engines: &[&Engine]| json!(engines.iter().map(|engine| engine.url()).collect::<Vec<_>>());
    std::fs::write(file, format!("prefill = {}\ndecode = {}\n", urls(prefill), urls(decode))).unwrap();
}

fn decode_up(router: &Router, count: usize) -> Option<()> {
    router.raw("GET", "/health", "").contains(&format!("\"decode_up\":{count}")).then_some(())
}

#[test]
fn engines_join_and_leave_by_the_file_while_a_stream_goes_on() {
    let events: Vec<String> = (0..40).map(|at| format!("data: {at}\n\n")).collect();
    let released = Arc::new(AtomicBool::new(false));
    let (prefill, old) = (computes(), Engine::start(Manner::Held(events, Arc::clone(&released))));
    let (first, second, third) = (answers(), answers(), answers());
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("engines.toml"), folder.path().join("log"));
    let log_of = || std::fs::read_to_string(&log).unwrap();
    write(&file, &[&prefill], &[&old]);
    let arguments = ["--engines", file.to_str().unwrap(), "--refresh-interval", "1000s"];
    let router = Router::logging(&[], &[], &arguments, File::create(&log).unwrap());
    let mut stream = router.send("POST", "/v1/completions", &prompt(9).to_string());
    watch("the request", || (old.asked().len() == 1).then_some(()));
    write(&file, &[&prefill], &[&first, &second]);
    router.signal(Signal::SIGHUP);
    watch("the new engines", || decode_up(&router, 2));
    // Each prompt is new: equal prompts would all go to one engine.
    for start in 0..20 {
        assert_eq!(router.ask(&json!({ "prompt": vec![start; 20] })).body, "{\"answer\":  1}");
    }
    assert_eq!(old.asked().len(), 1, "an engine that left is not asked");
    assert!(!first.asked().is_empty() && !second.asked().is_empty());
    let told = router.raw("POST", "/reset_prefix_cache", "");
    assert!(told.starts_with("HTTP/1.1 200"), "{told}");
    assert_eq!((old.asked().len(), prefill.asked().len()), (1, 1), "all engines are those of the list");
    std::fs::write(&file, "prefill = [\"http://p:1\"]\ndecode = [\"d:1\"]\n").unwrap();
    router.signal(Signal::SIGHUP);
    watch("the error", || log_of().contains("engines.toml, line 2: ").then_some(()));
    assert!(log_of().contains("write http://HOST:PORT"), "{}", log_of());
    assert!(decode_up(&router, 2).is_some(), "the list before goes on");
    write(&file, &[&prefill], &[&first, &second, &third]);
    router.signal(Signal::SIGHUP);
    watch("the third engine", || decode_up(&router, 3));
    released.store(true, Ordering::Relaxed);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("data: 39\n\n\r\n0\r\n\r\n"), "{text}");
}

#[test]
fn the_file_is_read_at_each_interval_and_a_malformed_one_is_told_once() {
    let (prefill, first, second) = (computes(), answers(), answers());
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("engines.toml"), folder.path().join("log"));
    write(&file, &[&prefill], &[&first]);
    let arguments = ["--engines", file.to_str().unwrap(), "--refresh-interval", "1s"];
    let router = Router::logging(&[], &[], &arguments, File::create(&log).unwrap());
    watch("the first list", || decode_up(&router, 1));
    std::fs::write(&file, "prefill = []\n").unwrap();
    let errors = || std::fs::read_to_string(&log).unwrap().matches("engines.toml, line 1: ").count();
    watch("the error", || (errors() == 1).then_some(()));
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(errors(), 1);
    write(&file, &[&prefill], &[&first, &second]);
    watch("the second engine", || decode_up(&router, 2));
}

#[test]
fn a_host_without_an_address_is_no_engine_and_sighup_ends_nothing() {
    let (prefill, decode) = (computes(), answers());
    let named = format!("http://localhost:{}", decode.port);
    let router = Router::start(&[&prefill.url()], &[&named], &[]);
    router.signal(Signal::SIGHUP);
    assert_eq!(router.ask(&prompt(300)).body, "{\"answer\":  1}");
    assert_eq!(decode.asked()[0].header("host").unwrap(), format!("localhost:{}", decode.port));
    let router = Router::start(&[&prefill.url()], &["http://pillion.invalid:1"], &[]);
    let told = router.ask(&prompt(300));
    assert!(
        told.line.contains("502") && told.body.contains("no name of an engine has an address"),
        "{told:?}"
    );
    assert!(router.raw("GET", "/health", "").starts_with("HTTP/1.1 503"));
}

#[test]
fn the_router_does_not_start_with_a_malformed_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines.toml");
    File::create(&file).unwrap().write_all(b"prefill = [\"http://p:1\"]\n\ndecode = 1\n").unwrap();
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pillion"));
        let ended = command.args(["route", "--listen", "127.0.0.1:0"]).args(arguments).output().unwrap();
        assert!(!ended.status.success());
        String::from_utf8(ended.stderr).unwrap()
    };
    let file = file.to_str().unwrap();
    let error = run(&["--engines", file]);
    assert!(error.contains("engines.toml, line 3: ") && error.contains("decode = ["), "{error}");
    assert!(run(&["--engines", file, "--decode", "http://d:1"]).contains("cannot be used with"));
    assert!(run(&["--decode", "http://d:1"]).contains("--prefill"));
    let often = run(&["--prefill", "http://p:1", "--decode", "http://d:1", "--refresh-interval", "1ms"]);
    assert!(often.contains("--refresh-interval is 1ms; give 1s or more"), "{often}");
}
