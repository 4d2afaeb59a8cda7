//! The router's end behind a Service: clients with long-lived connections lose no request.

use std::io::{BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use super::client::{WATCHDOG, watch};
use super::{Router, answers, computes, engine};

const CLIENTS: usize = 6;

/// The requests of one client, until the listener closed.
#[derive(Debug, Default)]
struct Seen {
    answered: usize,
    /// Answers with the end of their connection.
    closing: usize,
    /// Requests without an answer on a connection with earlier ones, and on a new connection.
    lost: usize,
    lost_new: usize,
}

/// Sends requests without a pause, over one connection as long as it lasts.
fn hammer(port: u16, all_answered: &AtomicUsize) -> Seen {
    let body = json!({ "prompt": vec![1; 20] }).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length";
    let mut seen = Seen::default();
    loop {
        let stream = match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => stream,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return seen,
            // The listener closed while the connection was made.
            Err(_) => continue,
        };
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        for count in 0.. {
            let sent = write!(&stream, "{head}: {}\r\n\r\n{body}", body.len());
            let Some(answer) = sent.ok().and_then(|()| engine::read(&mut reader)) else {
                *(if count == 0 { &mut seen.lost_new } else { &mut seen.lost }) += 1;
                // The kernel may drop a connection halfway as the listener closes, and at no other time.
                assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "{seen:?}");
                return seen;
            };
            assert!(answer.line.contains("200"), "{answer:?}");
            seen.answered += 1;
            all_answered.fetch_add(1, Ordering::Relaxed);
            if answer.header("connection") == Some("close") {
                seen.closing += 1;
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn no_request_is_lost_while_clients_are_sent_elsewhere() {
    let (prefill, decode) = (computes(), answers());
    let mut router = Router::start(&[&prefill.url()], &[&decode.url()], &["--drain-time", "1500ms"]);
    let (port, answered) = (router.port, AtomicUsize::new(0));
    let all: Vec<Seen> = thread::scope(|scope| {
        let clients = [(); CLIENTS].map(|()| scope.spawn(|| hammer(port, &answered)));
        watch("answers", || (answered.load(Ordering::Relaxed) > 20 * CLIENTS).then_some(()));
        assert!(router.raw("GET", "/health", "").starts_with("HTTP/1.1 200"));
        router.signal(Signal::SIGTERM);
        let told = watch("an unready router", || {
            Some(router.raw("GET", "/health", "")).filter(|told| told.starts_with("HTTP/1.1 503"))
        });
        assert!(told.contains("\"decode_up\":1,\"draining\":true"), "{told}");
        let before = answered.load(Ordering::Relaxed);
        watch("answers while it drains", || (answered.load(Ordering::Relaxed) > before + 20).then_some(()));
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(all.iter().all(|seen| seen.lost == 0 && seen.closing > 0), "{all:?}");
    assert!(router.process.wait().unwrap().success());
}

#[test]
fn a_connection_that_was_made_before_the_end_has_its_first_request_answered() {
    let (prefill, decode) = (computes(), answers());
    let mut router = Router::start(&[&prefill.url()], &[&decode.url()], &["--drain-time", "0s"]);
    let made = TcpStream::connect(("127.0.0.1", router.port)).unwrap();
    made.set_read_timeout(Some(WATCHDOG)).unwrap();
    router.signal(Signal::SIGTERM);
    watch("a refusal", || TcpStream::connect(("127.0.0.1", router.port)).err());
    write!(&made, "GET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n").unwrap();
    let answer = engine::read(&mut BufReader::new(made)).unwrap();
    assert!(answer.line.contains("200") && answer.header("connection") == Some("close"), "{answer:?}");
    assert!(router.process.wait().unwrap().success());
}
