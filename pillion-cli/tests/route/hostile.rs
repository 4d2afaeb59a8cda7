//! Clients with hostile bodies, or with held connections: the router's memory is bounded, and others are
//! answered.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use serde_json::json;

use super::client::sidecar::free_port;
use super::client::{WATCHDOG, now, watch};
use super::{Router, answers, computes, engine};

const BODIES: usize = 60;
/// Gaps on the heap add up from wave to wave.
const WAVES: usize = 5;
/// Each body has another size than the one before: bodies of one size would fill the gaps of each other.
const BODY_BYTES: [usize; 7] = [256 << 10, 5 << 20, 700 << 10, 3 << 20, 1 << 20, 8 << 20, 2 << 20];
const MEMORY: usize = 64 << 20;
const IDLE: usize = 1500;

/// A body of about this many bytes.
fn hostile(at: usize, bytes: usize) -> String {
    let many = |element: &str| vec![element; bytes / (element.len() + 1)].join(",");
    match at % 8 {
        0 => format!("{{\"messages\":[{}]}}", many("{\"\":0}")),
        1 => format!("{{\"messages\":[{{\"role\":\"user\",\"content\":[{}]}}]}}", many("{\"text\":\"\"}")),
        2 => format!("{{\"messages\":{}{}}}", "[".repeat(bytes / 2), "]".repeat(bytes / 2)),
        3 => format!("{{\"{}\":0}}", "\\n".repeat(bytes / 2)),
        4 => format!("{{{}}}", many("\"a\":0")),
        5 => {
            format!("{{{}}}", (0..bytes / 10).map(|at| format!("\"{at:x}\":0")).collect::<Vec<_>>().join(","))
        }
        6 => format!("{{\"prompt\":[{}]}}", many("[1]")),
        _ => format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}]}}",
            "\\u00e9".repeat(bytes / 6)
        ),
    }
}

/// A connection from another address of this host, as from another client.
fn connected(router: &Router, host: u8) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrV4::new([127, 0, 0, host].into(), 0)).unwrap();
    connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, router.port)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    stream
}

/// The most memory of a process so far, in bytes.
fn peak_bytes(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Sends hostile bodies from many clients at once, each of another size than in the wave before.
fn send_wave(router: &Router, wave: usize) {
    thread::scope(|scope| {
        for at in 0..BODIES {
            scope.spawn(move || {
                let body = hostile(at, BODY_BYTES[(at + wave) % BODY_BYTES.len()]);
                let mut stream = connected(router, 2 + (at % 40) as u8);
                let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\nconnection: close";
                // The router hangs up on a refused client while it sends.
                let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                let _ = stream.read_to_end(&mut Vec::new());
            });
        }
    });
}

#[test]
fn bodies_of_hostile_shape_take_no_more_than_their_share_of_memory() {
    let (prefill, decode) = (computes(), answers());
    let memory = format!("{MEMORY}B");
    let router = Router::start(&[&prefill.url()], &[&decode.url()], &["--request-memory", &memory]);
    let peaks: Vec<_> = (0..WAVES)
        .map(|wave| {
            send_wave(&router, wave);
            peak_bytes(router.process.id())
        })
        .collect();
    let last = peaks[WAVES - 1];
    assert!(last <= 2 * MEMORY + (64 << 20), "the most memory after each wave: {peaks:?}");
    assert!(last <= peaks[0] + MEMORY / 2, "freed bodies are given back: {peaks:?}");
    assert!(router.ask(&json!({ "prompt": [1] })).line.contains("200"), "it goes on");
}

fn median_of_asks(router: &Router) -> Duration {
    let mut times: Vec<_> = (0..50)
        .map(|_| {
            let begun = now();
            assert!(router.ask(&json!({ "prompt": [1] })).line.contains("200"));
            begun.elapsed()
        })
        .collect();
    times.sort();
    times[25]
}

#[test]
fn clients_that_ask_nothing_hold_up_no_other() {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit).unwrap();
    let (prefill, decode) = (computes(), answers());
    for most in [limit, 1024] {
        let port = free_port();
        let router = ["route", "--prefill", &prefill.url(), "--decode", &decode.url(), "--listen"].join(" ");
        let command =
            format!("ulimit -n {most}; exec {} {router} 127.0.0.1:{port}", env!("CARGO_BIN_EXE_pillion"));
        let process = Command::new("sh").args(["-c", &command]).stderr(Stdio::null()).spawn().unwrap();
        let router = Router { process, port };
        watch("the router's start", || TcpStream::connect(("127.0.0.1", port)).ok());
        let alone = median_of_asks(&router);
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let idle: Vec<_> =
            (0..IDLE).map(|_| TcpStream::connect_timeout(&address, WATCHDOG).unwrap()).collect();
        let beside = median_of_asks(&router);
        assert!(beside <= alone + Duration::from_millis(200), "{alone:?} {beside:?} beside {}", idle.len());
        let answered = router.send("POST", "/v1/completions", &json!({ "prompt": vec![1; 300] }).to_string());
        let answered = engine::read(&mut BufReader::new(answered)).unwrap();
        assert!(answered.line.contains("200"), "engines have descriptors: {answered:?}");
    }
}
