//! `pillion serve` as process 1 of a container: a minimal init, with the sidecar as its child.
//!
//! CUDA cannot open the memory of another process if both have the same process id, each in its own PID
//! namespace. In containers of one process each, engine and sidecar would both be process 1, and the sidecar
//! could not open the engine's GPU memory (docs/decisions/0006). Therefore process 1 does not serve. It runs
//! its own program as a child with another process id: this child is the sidecar. Process 1 passes SIGTERM
//! and SIGINT on to the child, reaps ended processes, and ends with the exit status of the child.
//!
//! If a sidecar fails without such a signal, process 1 either ends too or starts the next sidecar:
//!
//! - As long as no sidecar has run for 5 s, process 1 ends too, so that a wrong option is noticed.
//! - Once a sidecar has run for 5 s, process 1 starts the next one after every failure, without limit. The pause before a start
//!   is 1 s, and doubles up to 10 s while sidecars fail within 5 s. If the container ended instead,
//!   Kubernetes would delay its next start longer each time, and would send the pod no requests meanwhile,
//!   though its engine still serves.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus};

/// Added to a signal's number to make an exit status, as shells and container runtimes do.
const SIGNALLED: i32 = 128;

/// A sidecar that has run for this long counts as started.
const STARTED: Duration = Duration::from_secs(5);
/// The pause before the next start, after a sidecar that counts as started.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause. Each sidecar that fails before it counts as started doubles the pause.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Runs this command as a child, again after failures, and returns the exit status of the last child.
pub(crate) fn serve_as_child() -> anyhow::Result<ExitCode> {
    // The signals are blocked before the child exists: even the SIGCHLD of a child that ends at once waits to
    // be read. The child starts without blocked signals.
    let watched: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD].into_iter().collect();
    watched.thread_block().context("cannot block signals")?;
    let signals = SignalFd::new(&watched).context("cannot watch signals")?;
    let program = std::env::current_exe().context(
        "cannot find the path of this program, which is to run below process \
         1",
    )?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--below-init");
    let (mut told_to_end, mut has_served, mut pause) = (false, false, PAUSE_MIN);
    loop {
        let started = now();
        let child = command.spawn().context("cannot start the sidecar below process 1")?;
        let code = until_end(Pid::from_child(&child), &signals, &mut told_to_end)?;
        if now() - started >= STARTED {
            (has_served, pause) = (true, PAUSE_MIN);
        }
        if code == 0 || told_to_end || !has_served {
            return Ok(ExitCode::from(code));
        }
        let seconds = pause.as_secs();
        eprintln!("pillion: the sidecar ended with status {code} and restarts in {seconds} s");
        if must_end_within(pause, &signals)? {
            return Ok(ExitCode::SUCCESS);
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Waits for the pause before the next start. Returns true if SIGTERM or SIGINT came meanwhile.
fn must_end_within(pause: Duration, signals: &SignalFd) -> anyhow::Result<bool> {
    let until = now() + pause;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(now())).expect("a short time");
        match rustix::event::poll(&mut [PollFd::new(signals, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(false),
            // An orphan has ended: `reap_children` takes it back when the next sidecar ends.
            Ok(_) if matches!(next(signals)?, None | Some(Signal::SIGCHLD)) => {}
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for signals"),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "how long a process ran")]
fn now() -> Instant {
    Instant::now()
}

/// Waits for the end of the child, and returns its exit status. Passes SIGTERM and SIGINT on to the child
/// until then.
fn until_end(child: Pid, signals: &SignalFd, told_to_end: &mut bool) -> anyhow::Result<u8> {
    loop {
        match next(signals)? {
            Some(Signal::SIGCHLD) => {
                if let Some(status) = reap_children(child).context("cannot wait for the sidecar")? {
                    return Ok(exit_code(status.exit_status(), status.terminating_signal()));
                }
            }
            Some(signal) => {
                *told_to_end = true;
                pass_on(child, signal);
            }
            None => {}
        }
    }
}

/// Waits for the next signal; `None` if the wait was interrupted.
fn next(signals: &SignalFd) -> anyhow::Result<Option<Signal>> {
    match signals.read_signal() {
        Ok(info) => Ok(info.and_then(|info| Signal::try_from(info.ssi_signo as i32).ok())),
        Err(nix::errno::Errno::EINTR) => Ok(None),
        Err(error) => Err(error).context("cannot wait for signals"),
    }
}

/// Called in the child, before any second thread: asks the kernel to kill the child when process 1 ends.
pub(crate) fn die_with_parent() -> anyhow::Result<()> {
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).context("cannot follow process 1")
}

/// Reaps all processes that have ended, orphans too. Returns the status of `child` if it is among them.
fn reap_children(child: Pid) -> Result<Option<WaitStatus>, Errno> {
    let mut ended = None;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == child => ended = Some(status),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            // No child has ended, or no child is left.
            Ok(None) | Err(Errno::CHILD) => return Ok(ended),
            Err(error) => return Err(error),
        }
    }
}

/// Sends a signal to the child. The signal has no effect on a child that has just ended; that end is read
/// next.
fn pass_on(child: Pid, signal: Signal) {
    let signal = match signal {
        Signal::SIGTERM => rustix::process::Signal::TERM,
        _ => rustix::process::Signal::INT,
    };
    // The child is not reaped yet, so its process id is not used again.
    let _ = rustix::process::kill_process(child, signal);
}

/// The exit status for a child's end.
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
        assert_eq!(exit_code(None, None), 255, "an end without a status or signal is no success");
    }
}
