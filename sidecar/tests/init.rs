//! `pillion serve` as process 1 of a process namespace, as in a container of its own.

mod client;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use client::{Session, hello, watch};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shm_protocol::handshake::Role;

/// A namespace whose process 1 is `pillion serve`; ended whatever the test does.
struct Container {
    unshare: Child,
    /// Process 1, by its number outside.
    init: Pid,
    /// The sidecar, by its number outside.
    sidecar: Pid,
}

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
    command
}

/// Whether process namespaces can be made here; says so where not, since the tests then show nothing.
fn permitted() -> bool {
    let permitted = unshare().arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !permitted {
        // Past the harness, which keeps to itself what a test that passes prints.
        let text = "SKIPPED: process 1 is untested: no process namespace can be made here (needs root)\n";
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    permitted
}

/// The first child of a process.
fn child_of(pid: Pid) -> Option<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    Some(Pid::from_raw(children.split_whitespace().next()?.parse().ok()?))
}

fn ready(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.starts_with("HTTP/1.1 200").then_some(())
}

// === impl Container ===

impl Container {
    fn start(socket: &Path) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let unshare = unshare()
            .arg(env!("CARGO_BIN_EXE_pillion"))
            .args(["serve", "--dram", "16MiB", "--http", &format!("127.0.0.1:{port}"), "--socket"])
            .arg(socket)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        watch("readiness", || ready(port));
        let init = child_of(Pid::from_raw(unshare.id() as i32)).expect("process 1");
        let sidecar = child_of(init).expect("a sidecar below process 1");
        Self { unshare, init, sidecar }
    }

    /// What process 1 ended with.
    fn end(&mut self) -> Option<i32> {
        self.unshare.wait().unwrap().code()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Which ends process 1 as well.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

fn open(socket: &Path) -> Session {
    Session::open(socket, &hello("engine", 1, Role::Scheduler { run: [1; 16] }), &[])
}

#[test]
fn the_sidecar_is_never_process_1() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    let container = Container::start(&socket);
    let status = std::fs::read_to_string(format!("/proc/{}/status", container.sidecar)).unwrap();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("its numbers");
    assert_ne!(numbers.split_whitespace().last(), Some("1"), "{numbers}");
    assert!(!open(&socket).sidecar_gone());
}

#[test]
fn signals_reach_the_sidecar_and_its_status_comes_back() {
    if !permitted() {
        return;
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("p.sock");
        let mut container = Container::start(&socket);
        let session = open(&socket);
        kill(container.init, signal).unwrap();
        assert_eq!(container.end(), Some(0), "{signal} drains");
        assert!(!socket.exists());
        session.closed();
    }
    let folder = tempfile::tempdir().unwrap();
    let mut container = Container::start(&folder.path().join("p.sock"));
    kill(container.sidecar, Signal::SIGKILL).unwrap();
    assert_eq!(container.end(), Some(128 + 9));
}

#[test]
fn the_sidecar_dies_with_process_1() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    let mut container = Container::start(&socket);
    let session = open(&socket);
    kill(container.init, Signal::SIGKILL).unwrap();
    container.end();
    watch("the sidecar's end", || session.sidecar_gone().then_some(()));
    session.closed();
}

#[test]
fn a_start_that_fails_fails_as_it_would_alone() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = unshare()
        .arg(env!("CARGO_BIN_EXE_pillion"))
        .args(["serve", "--dram", "1TiB", "--http", "127.0.0.1:0", "--socket"])
        .arg(folder.path().join("p.sock"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(text.contains("lower --dram"), "{text}");
}
