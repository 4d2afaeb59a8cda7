//! `pillion bench`, in small.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::client::pillion;
use crate::client::sidecar::Sidecar;
use serde_json::Value;

/// The last line of a successful benchmark.
fn line(arguments: &[&str]) -> Value {
    let ended = pillion(&[&["bench"], arguments, &["--json"]].concat());
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    serde_json::from_str(String::from_utf8(ended.stdout).unwrap().lines().last().unwrap()).unwrap()
}

/// The error of a refused benchmark.
fn refusal(arguments: &[&str]) -> String {
    let ended = pillion(&[&["bench"], arguments].concat());
    assert!(!ended.status.success());
    String::from_utf8(ended.stderr).unwrap()
}

fn expect_positive(line: &Value, names: &[&str]) {
    for name in names {
        assert!(line[name].as_f64().is_some_and(|value| value > 0.0), "{name} in {line}");
    }
}

/// A folder on the disk of the build: memory has no direct I/O.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(Path::new(env!("CARGO_BIN_EXE_pillion")).parent().unwrap()).unwrap()
}

#[test]
fn a_disk_is_measured_by_both_means_and_nothing_stays_on_it() {
    let folder = on_disk();
    let path = folder.path().to_str().unwrap();
    for io in ["auto", "threads"] {
        let small = ["disk", "--path", path, "--size", "8MiB", "--block-size", "256KiB", "--ssd-io", io];
        let line = line(&small);
        assert_eq!(line["bench"], "disk");
        assert!(io == "auto" || line["io"] == io, "{line}");
        let names =
            ["raw_write_gib_s", "tier_write_gib_s", "write_ratio", "raw_read_gib_s", "tier_read_gib_s"];
        expect_positive(&line, &names);
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
    }
    let too_large = refusal(&["disk", "--path", path, "--size", "900TiB"]);
    assert!(too_large.contains("lower its size"), "{too_large}");
    // The log of this size has segments of 16 MiB.
    let whole = refusal(&["disk", "--path", path, "--size", "64MiB", "--block-size", "64MiB"]);
    assert!(whole.contains("larger than a segment: raise --size, or lower --block-size"), "{whole}");
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn copies_are_measured_in_threads() {
    let line = line(&["copy", "--size", "4MiB", "--block-size", "1MiB", "--threads", "2"]);
    assert_eq!((&line["bench"], &line["threads"]), (&"copy".into(), &2.into()));
    expect_positive(&line, &["memcpy_gib_s", "save_gib_s", "load_gib_s", "save_ratio", "load_ratio"]);
}

#[test]
fn a_running_sidecar_answers_through_the_ring() {
    let folder = tempfile::tempdir().unwrap();
    let _sidecar = Sidecar::start(folder.path(), &[&"--dram", &"64MiB"]);
    let socket = folder.path().join("p.sock");
    let line = line(&["ring", "--socket", socket.to_str().unwrap(), "--count", "100"]);
    expect_positive(&line, &["word_us", "query_us", "query_p99_us", "query_asleep_us"]);
}

/// Figures of the process and of ended connections.
const MOVING: [&str; 4] = ["process_", "pillion_last_turn_", "pillion_sessions_closed_total", "pillion_turn"];

#[test]
fn questions_of_a_bench_count_as_nobody_s() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"64MiB"]);
    let socket = folder.path().join("p.sock");
    let figures = || -> Vec<String> {
        let (_, page) = sidecar.get("/metrics").unwrap();
        let samples = page.lines().filter(|line| !MOVING.iter().any(|moving| line.contains(moving)));
        samples.map(str::to_owned).collect()
    };
    sidecar.wait_started();
    let before = figures();
    let ring = || line(&["ring", "--socket", socket.to_str().unwrap(), "--count", "100"]);
    std::thread::scope(|scope| {
        let beside = scope.spawn(ring);
        ring();
        beside.join().unwrap();
    });
    sidecar.wait_metric("pillion_sessions_closed_total", |closed| closed == 2);
    assert_eq!(figures(), before);
    assert_eq!(sidecar.ask("GET", "/namespaces", &Value::Null).unwrap()["namespaces"], serde_json::json!([]));
}

/// A process that ends with its test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

const PEER_FIGURES: [&str; 6] = [
    "plain_fetch_gib_s",
    "mesh_fetch_gib_s",
    "fetch_ratio",
    "plain_block_us",
    "mesh_block_us",
    "mesh_block_p99_us",
];

#[test]
fn blocks_come_from_a_peer_by_both_means() {
    let line = line(&["peer", "--size", "8MiB", "--block-size", "256KiB", "--streams", "3"]);
    assert_eq!((&line["bench"], &line["streams"]), (&"peer".into(), &3.into()));
    expect_positive(&line, &PEER_FIGURES);
}

#[test]
fn the_end_that_serves_has_the_say_over_sizes_and_stays_for_the_next() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
    command.args(["bench", "peer", "--serve", "127.0.0.1:0", "--size", "2MiB", "--block-size", "1MiB"]);
    let mut serving = Ended(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut said = String::new();
    BufReader::new(serving.0.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let address =
        said.strip_prefix("serving 2.0 MiB at ").and_then(|rest| rest.split_once(": run pillion bench peer"));
    let (address, _) = address.unwrap_or_else(|| panic!("{said}"));
    for _ in 0..2 {
        expect_positive(&line(&["peer", address]), &PEER_FIGURES);
    }
    let both = refusal(&["peer", address, "--size", "4MiB"]);
    assert!(both.contains("cannot be used with"), "{both}");
    drop(serving);
    let absent = refusal(&["peer", address]);
    assert!(absent.contains(&format!("run pillion bench peer --serve {address} there")), "{absent}");
}

#[test]
fn another_program_at_the_address_is_told() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let answer = std::thread::spawn(move || other.accept().unwrap().0.write_all(&[1; 64]));
    let said = refusal(&["peer", &address]);
    assert!(said.contains("name the address that pillion bench peer --serve"), "{said}");
    answer.join().unwrap().unwrap();
}

#[test]
fn a_table_is_for_people() {
    let ended = pillion(&["bench", "copy", "--size", "1MiB", "--block-size", "64KiB"]);
    let text = String::from_utf8(ended.stdout).unwrap();
    assert!(text.starts_with("bench         copy\nthreads       2\n"), "{text}");
}

#[test]
fn every_refusal_names_the_remedy() {
    let absent = ["ring", "--socket", "/nonexistent/p.sock"];
    for (arguments, remedy) in [
        (
            &absent[..],
            "pillion serve --socket /nonexistent/p.sock, and mount its folder into both containers",
        ),
        (&["disk", "--path", "/nonexistent"], "name one on the disk"),
        (&["disk", "--path", "/dev/shm"], "pass a path on a disk"),
        (&["disk", "--path", "/", "--block-size", "5KiB"], "whole pages"),
        (&["disk", "--path", "/", "--size", "1MiB"], "--block-size"),
        (&["copy", "--threads", "0"], "1 to 256"),
        (&["copy", "--size", "1MiB"], "for each thread"),
        (&["peer", "--streams", "0"], "1 to 64"),
        (&["peer", "--size", "1MiB"], "1 to 2^32 blocks of --block-size"),
        (&["peer", "--serve", "127.0.0.1:65535", "--size", "2MiB"], "name a lower one"),
        (&["peer", "--serve", "192.0.2.1:9450", "--size", "2MiB"], "name an address of this host"),
    ] {
        let said = refusal(arguments);
        assert!(said.contains(remedy), "{arguments:?}: {said}");
    }
}
