//! The control socket under requests too large, too slow or cut short, and under too many connections.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::json;
use tools::ctl::{self, ControlTarget, CtlError};

use crate::client::{WATCHDOG, watch};
use crate::scene::Scene;

fn connect(scene: &Scene) -> UnixStream {
    let stream = UnixStream::connect(socket(scene)).unwrap();
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    stream
}

fn socket(scene: &Scene) -> PathBuf {
    scene.pillion.socket.with_extension("control.sock")
}

/// The bytes up to the sidecar's hang-up. A sidecar that needs no more bytes of a request may reset the
/// connection.
fn answer(mut stream: UnixStream) -> String {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8(text).unwrap()
}

fn say(scene: &Scene, request: &[u8]) -> String {
    let mut stream = connect(scene);
    // The sidecar may have hung up before the end.
    let _ = stream.write_all(request);
    answer(stream)
}

/// An ordinary request, answered after any earlier one.
fn assert_answers(scene: &Scene) {
    let page = ctl::send_request(&ControlTarget::Unix(socket(scene)), "GET", "/namespaces", "").unwrap();
    assert!(page.contains("\"good\""), "{page}");
}

#[test]
fn requests_that_are_none_are_refused() {
    let mut scene = Scene::start();
    let body = |length: usize, body: &[u8]| {
        let head = format!(
            "POST /evict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    };
    let cases: [(&str, Vec<u8>, &str); 9] = [
        ("no HTTP", b"\xa4\x67version\x02\r\n\r\n".to_vec(), "400"),
        ("a line without end", vec![b'G'; 64 << 10], "4"),
        ("headers without end", [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'y'; 64 << 10]].concat(), "431"),
        ("another method", b"DELETE /evict HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(), "405"),
        ("another path", b"GET /../evict HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(), "404"),
        ("a body too long", body(1 << 20, &vec![b' '; 1 << 20]), "413"),
        ("no JSON", body(4, b"\xff\xfe{}"), "400"),
        ("arrays in arrays", body(60_000, &vec![b'['; 60_000]), "400"),
        ("another namespace", body(17, b"{\"namespace\":\"0\"}"), "400"),
    ];
    for (name, request, status) in &cases {
        let said = say(&scene, request);
        assert!(said.starts_with(&format!("HTTP/1.1 {status}")), "{name}: {said}");
    }
    let keys: Vec<String> = (0..4097).map(|_| "0".repeat(32)).collect();
    let lookup = json!({ "namespace": "0".repeat(32), "keys": keys }).to_string();
    let many = ctl::send_request(&ControlTarget::Unix(socket(&scene)), "POST", "/lookup", &lookup);
    assert!(
        matches!(&many, Err(CtlError::Refused { text, .. }) if text.contains("4096 at most")),
        "{many:?}"
    );
    assert_answers(&scene);
    scene.assert_unharmed("malformed requests");
}

#[test]
fn who_is_slow_or_hangs_up_half_way_keeps_nobody_waiting() {
    let mut scene = Scene::start();
    let slow = [
        b"".as_slice(),
        b"POST /evict HTTP/1.1\r\nHost",
        b"POST /evict HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{\"name",
    ];
    let waiting: Vec<UnixStream> = slow
        .map(|begin| {
            let mut stream = connect(&scene);
            stream.write_all(begin).unwrap();
            stream
        })
        .into();
    for begin in slow {
        let mut stream = connect(&scene);
        stream.write_all(begin).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        answer(stream);
        drop(connect(&scene));
    }
    assert_answers(&scene);
    scene.assert_served();
    for stream in waiting {
        let said = answer(stream);
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
    }
    watch("two refusals that are counted", || {
        (scene.pillion.metrics()["control_refused_total{reason=\"slow\"}"] >= 2).then_some(())
    });
    scene.assert_unharmed("slow requests");
}

#[test]
fn a_hundred_connections_wait_their_turn() {
    let mut scene = Scene::start();
    let idle: Vec<UnixStream> = (0..100).map(|_| connect(&scene)).collect();
    scene.assert_served();
    let metrics = scene.pillion.metrics();
    assert!(metrics.contains_key("blocks"), "the admin pages answer");
    drop(idle);
    assert_answers(&scene);
    // All requests at once, each with a count of every block.
    let asking: Vec<UnixStream> = (0..100)
        .map(|_| {
            let mut stream = connect(&scene);
            stream.write_all(b"GET /namespaces HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
            stream
        })
        .collect();
    scene.assert_served();
    for stream in asking {
        let said = answer(stream);
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    }
    assert_answers(&scene);
    scene.assert_unharmed("a hundred connections");
}
