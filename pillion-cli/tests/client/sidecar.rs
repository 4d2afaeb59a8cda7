use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tools::ctl::{self, ControlTarget, CtlError};

use super::watch;

pub(crate) struct Sidecar {
    process: Child,
    pub(crate) socket: PathBuf,
    port: u16,
}

/// The first of three free ports, below the kernel's range for connections and different in each test. A trial by `bind` could fail
/// the real one: a process started meanwhile by another test would inherit the listener until its exec.
pub(crate) fn free_port() -> u16 {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let three = || {
        let number = LAST.fetch_add(1, Ordering::Relaxed) + std::process::id() * 64;
        let port = 10_000 + 3 * (number % 7_500) as u16;
        let free = |port| TcpStream::connect(("127.0.0.1", port)).is_err();
        (port..port + 3).all(free).then_some(port)
    };
    std::iter::repeat_with(three).find_map(|port| port).unwrap()
}

impl Sidecar {
    /// A sidecar with its socket and log in `folder`, and more arguments; all its addresses are bound.
    pub(crate) fn start(folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_pillion")), folder, arguments)
    }

    /// A sidecar without io_uring from the kernel.
    pub(crate) fn start_without_io_uring(folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Self {
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client/without_io_uring.py"));
        command.arg(env!("CARGO_BIN_EXE_pillion"));
        Self::start_by(command, folder, arguments)
    }

    /// A sidecar by `command`, which gets the arguments of `pillion`.
    pub(crate) fn start_by(mut command: Command, folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Self {
        let (socket, port) = (folder.join("p.sock"), free_port());
        // A GPU driver's open files would count as a leak.
        command.args(["serve", "--gpu", "off", "--http", &format!("127.0.0.1:{port}"), "--socket"]);
        command.arg(&socket).args(arguments);
        Self::spawn(command, folder, port)
    }

    /// The same by a complete `command` with this port and folder.
    pub(crate) fn spawn(mut command: Command, folder: &Path, port: u16) -> Self {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let process = command.stderr(Stdio::from(log)).spawn().unwrap();
        let mut sidecar = Self { process, socket: folder.join("p.sock"), port };
        watch("a start", || {
            let said = || std::fs::read_to_string(folder.join("log"));
            assert!(sidecar.is_alive(), "it ended instead of starting: {:?}", said());
            sidecar.page("/readyz").filter(|text| text.starts_with("ready"))
        });
        sidecar
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    /// Returns true if the sidecar has not ended.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// The address of its control socket.
    pub(crate) fn control(&self) -> ControlTarget {
        ControlTarget::Unix(self.socket.with_extension("control.sock"))
    }

    /// The answer to a control request.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, CtlError> {
        let answer = ctl::send_request(&self.control(), method, path, &body.to_string())?;
        Ok(serde_json::from_str(&answer).expect("JSON"))
    }

    /// The address of its pages.
    pub(crate) fn http(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn page(&self, path: &str) -> Option<String> {
        Some(self.get(path)?.1)
    }

    /// The head of a page's answer, and its body.
    pub(crate) fn get(&self, path: &str) -> Option<(String, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.split_once("\r\n\r\n").map(|(head, body)| (head.to_owned(), body.to_owned()))
    }

    /// Waits until the sidecar has finished its start.
    pub(crate) fn wait_started(&self) {
        watch("all in service", || self.page("/readyz").filter(|text| text == "ready\n"));
    }

    /// Returns true if this line is in the page of metrics.
    pub(crate) fn shows(&self, line: &str) -> bool {
        self.page("/metrics").is_some_and(|page| page.lines().any(|found| found == line))
    }

    pub(crate) fn wait_line(&self, line: &str) {
        watch(line, || self.shows(line).then_some(()));
    }

    /// A metric, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        self.samples(name).unwrap_or_else(|| panic!("no metric {name}"))
    }

    /// The sum of a metric's samples; `None` for one with labels before its first event.
    fn samples(&self, name: &str) -> Option<u64> {
        let page = self.page("/metrics").expect("metrics");
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value =
                rest.strip_prefix(' ').or_else(|| rest.strip_prefix('{')?.split_once("} ").map(|it| it.1));
            Some(value?.parse::<u64>().expect("a number"))
        });
        values.reduce(|sum, value| sum + value)
    }

    /// Waits until a metric has a wanted value.
    pub(crate) fn wait_metric(&self, name: &str, wanted: impl Fn(u64) -> bool) -> u64 {
        watch(name, || self.samples(name).filter(|value| wanted(*value)))
    }

    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// SIGSTOP, or SIGCONT after it.
    pub(crate) fn freeze(&self, frozen: bool) {
        self.signal(if frozen { Signal::SIGSTOP } else { Signal::SIGCONT });
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Sends SIGTERM; the exit status must be 0.
    pub(crate) fn terminate(self) {
        self.signal(Signal::SIGTERM);
        assert_eq!(self.wait(), Some(0));
    }

    /// Its exit status, once it has ended.
    pub(crate) fn wait(mut self) -> Option<i32> {
        watch("its end", || self.process.try_wait().unwrap()).code()
    }

    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.end();
    }
}
