//! `pillion serve` as process 1 of a process namespace, as in a container of its own.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::client::sidecar::Sidecar;
use crate::client::{Session, WATCHDOG, in_time, now, watch};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shm_protocol::transport;

/// A sidecar killed within this time ends process 1 too: less than its 5 s.
const STARTING: Duration = Duration::from_secs(4);

/// A process namespace with `pillion serve` as process 1.
struct Container {
    /// `unshare`: it ends with process 1.
    unshare: Sidecar,
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

/// Returns true if process namespaces can be made here. Prints a line if not, since the tests then show
/// nothing.
fn permitted() -> bool {
    let permitted = unshare().arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !permitted {
        // Past the harness, because it hides the output of passing tests.
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

// === impl Container ===

impl Container {
    fn start(folder: &Path) -> Self {
        let mut command = unshare();
        command.arg(env!("CARGO_BIN_EXE_pillion"));
        let unshare = Sidecar::start_by(command, folder, &[&"--dram", &"16MiB"]);
        let init = child_of(unshare.pid()).expect("process 1");
        let sidecar = child_of(init).expect("a sidecar below process 1");
        Self { unshare, init, sidecar }
    }

    /// The exit status of process 1.
    fn end(self) -> Option<i32> {
        self.unshare.wait()
    }

    fn session(&self) -> Session {
        Session::scheduler(&self.unshare.socket, "engine", 1, [1; 16])
    }
}

#[test]
fn the_sidecar_is_never_process_1() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let container = Container::start(folder.path());
    let status = std::fs::read_to_string(format!("/proc/{}/status", container.sidecar)).unwrap();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("its numbers");
    assert_ne!(numbers.split_whitespace().last(), Some("1"), "{numbers}");
    assert!(!container.session().sidecar_gone());
}

#[test]
fn signals_reach_the_sidecar_and_its_status_comes_back() {
    if !permitted() {
        return;
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let folder = tempfile::tempdir().unwrap();
        let container = Container::start(folder.path());
        let session = container.session();
        kill(container.init, signal).unwrap();
        assert_eq!(container.end(), Some(0), "{signal} drains");
        assert!(!folder.path().join("p.sock").exists());
        session.closed();
    }
    let (container, _folder) = in_time("a kill at a start", || {
        let (began, folder) = (now(), tempfile::tempdir().unwrap());
        let container = Container::start(folder.path());
        kill(container.sidecar, Signal::SIGKILL).unwrap();
        (began.elapsed() < STARTING).then_some((container, folder))
    });
    assert_eq!(container.end(), Some(128 + 9));
}

#[test]
fn a_sidecar_that_fails_once_it_has_served_is_started_again_in_its_container() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let container = Container::start(folder.path());
    std::thread::sleep(Duration::from_secs(6));
    kill(container.sidecar, Signal::SIGKILL).unwrap();
    let next = || child_of(container.init).filter(|child| *child != container.sidecar);
    watch("another sidecar", next);
    watch("its socket", || transport::connect_socket(&container.unshare.socket, WATCHDOG).ok());
    let session = container.session();
    kill(container.init, Signal::SIGTERM).unwrap();
    assert_eq!(container.end(), Some(0));
    session.closed();
}

/// Another listener has the sidecar's address for some seconds: its next starts fail at once.
#[test]
fn once_a_sidecar_has_served_starts_that_fail_do_not_end_its_container() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let container = Container::start(folder.path());
    let ends = || {
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        log.matches("restarts in").count()
    };
    let take = || TcpListener::bind(container.unshare.http()).ok();
    std::thread::sleep(Duration::from_secs(6));
    kill(container.sidecar, Signal::SIGKILL).unwrap();
    let taken = watch("its address", take);
    watch("a start that failed", || (ends() >= 2).then_some(()));
    drop(taken);
    watch("another sidecar", || container.unshare.page("/readyz"));
    let before = ends();
    kill(child_of(container.init).unwrap(), Signal::SIGKILL).unwrap();
    let _taken = watch("its address", take);
    watch("a start that failed", || (ends() >= before + 2).then_some(()));
    // In the pause before the next start.
    kill(container.init, Signal::SIGTERM).unwrap();
    assert_eq!(container.end(), Some(0));
}

#[test]
fn the_sidecar_dies_with_process_1() {
    if !permitted() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let container = Container::start(folder.path());
    let session = container.session();
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
