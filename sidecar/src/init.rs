//! `pillion serve` as process 1 of a container: a minimal init, with the sidecar as its child.
//!
//! CUDA cannot open another process's memory where the two have the same process id, each in its own namespace. In
//! containers of one process each, engine and sidecar are both process 1 (docs/decisions/0006). So process 1 starts the
//! sidecar once more below itself, hands it SIGTERM and SIGINT, reaps, and ends as it ended.
//!
//! A sidecar that fails once it has served is started again here: were its container to end, Kubernetes would send its pod, and with
//! it an engine that serves on, no requests until the container is ready again.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus};

/// Added to a signal's number where an exit status can only be a number: what shells and container runtimes do.
const SIGNALLED: i32 = 128;

/// A sidecar that ran for so long had started. One that fails sooner ends process 1 too, so that its container's restarts are seen.
const STARTED: Duration = Duration::from_secs(5);
/// Before it is started again.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs this very command as a child; answers with its exit status once it has ended for good.
pub(crate) fn serve_as_child() -> anyhow::Result<ExitCode> {
    // Before the child exists: the end of one that ends at once is waiting then. It starts with no signal blocked.
    let watched: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD].into_iter().collect();
    watched.thread_block().context("cannot block signals")?;
    let signals = SignalFd::new(&watched).context("cannot watch signals")?;
    let program = std::env::current_exe().context("cannot find this program, to start it below process 1")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--below-init");
    let mut told_to_end = false;
    loop {
        let started = now();
        let child = command.spawn().context("cannot start the sidecar below process 1")?;
        let code = until_end(Pid::from_child(&child), &signals, &mut told_to_end)?;
        if code == 0 || told_to_end || now() - started < STARTED {
            return Ok(ExitCode::from(code));
        }
        eprintln!("pillion: the sidecar ended with status {code} and is started again");
        std::thread::sleep(PAUSE);
    }
}

#[expect(clippy::disallowed_methods, reason = "how long a process ran")]
fn now() -> Instant {
    Instant::now()
}

/// The exit status of a child, which gets the signals that come meanwhile.
fn until_end(child: Pid, signals: &SignalFd, told_to_end: &mut bool) -> anyhow::Result<u8> {
    loop {
        let signal = match signals.read_signal() {
            Ok(signal) => signal.and_then(|info| i32::try_from(info.ssi_signo).ok()),
            Err(nix::errno::Errno::EINTR) => None,
            Err(error) => return Err(error).context("cannot wait for signals"),
        };
        match signal.map(Signal::try_from) {
            Some(Ok(Signal::SIGCHLD)) => {
                if let Some(status) = reap(child).context("cannot wait for the sidecar")? {
                    return Ok(exit_code(status.exit_status(), status.terminating_signal()));
                }
            }
            Some(Ok(signal)) => {
                *told_to_end = true;
                pass_on(child, signal);
            }
            _ => {}
        }
    }
}

/// In the child: it must not outlive process 1, nobody would end it. Called by the only thread there is.
pub(crate) fn die_with_parent() -> anyhow::Result<()> {
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).context("cannot follow process 1")
}

/// Takes back every process that has ended, orphans too; the status of `child` if it is among them.
fn reap(child: Pid) -> Result<Option<WaitStatus>, Errno> {
    let mut ended = None;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == child => ended = Some(status),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            // None has ended, or none is left.
            Ok(None) | Err(Errno::CHILD) => return Ok(ended),
            Err(error) => return Err(error),
        }
    }
}

/// A child that has just ended needs no signal; its end is the next to be read.
fn pass_on(child: Pid, signal: Signal) {
    let signal = match signal {
        Signal::SIGTERM => rustix::process::Signal::TERM,
        _ => rustix::process::Signal::INT,
    };
    // It was not reaped yet, so the number is still its own.
    let _ = rustix::process::kill_process(child, signal);
}

/// The exit status that stands for a child's end.
fn exit_code(exited: Option<i32>, signal: Option<i32>) -> u8 {
    let code = exited.or(signal.map(|number| SIGNALLED + number));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_s_end_becomes_an_exit_status() {
        assert_eq!(exit_code(Some(0), None), 0);
        assert_eq!(exit_code(Some(1), None), 1);
        assert_eq!(exit_code(Some(255), None), 255);
        assert_eq!(exit_code(None, Some(9)), 137);
        assert_eq!(exit_code(None, Some(15)), 143);
        assert_eq!(exit_code(None, None), 255, "neither is never success");
    }
}
