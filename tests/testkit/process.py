"""A process with a log. All of its children end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from testkit import logs
from testkit.waiting import Failed, allow, outlasted

EXIT_WATCHDOG_S = 60


class Started(Protocol):
    """A running process, with the interface of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""


def start(
    command: Sequence[object],
    log: Path | None,
    *,
    stdin: int,
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts the leader of a process group: signals to the group reach its children, and no other process.

    Output, unless it is piped, is appended to `log`; without a log it goes to this process's output. The process inherits the
    descriptors of `keep`. It stays in this session: Linux shares processors out among sessions first (autogroup), and a process
    of vLLM that spins for a message (sched_yield, 1 s) keeps those of another session off its processor as long.
    """
    with contextlib.ExitStack() as stack:
        output: IO[bytes] | None = stack.enter_context(log.open("ab")) if log else None
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=stdin,
            stdout=output if stdout is None else stdout,
            stderr=output,
            env=os.environ | (environment or {}),
            pass_fds=keep,
            process_group=0,
        )


class Process:
    """One process, the leader of a group."""

    def __init__(self, process: Started, command: Sequence[object], log: Path | None) -> None:
        """`command` is the command to type for it."""
        self._process = process
        self.command = [str(part) for part in command]
        self.log = log

    @property
    def pid(self) -> int:
        """The id of the started process: with a prefix, the prefix's process."""
        return self._process.pid

    def ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills the group with SIGKILL, as the kernel's out-of-memory killer would."""
        self.signal(signal.SIGKILL)
        self._process.wait(allow(EXIT_WATCHDOG_S))

    def wait_exit(self, watchdog_s: float = EXIT_WATCHDOG_S) -> None:
        """Waits for its end; the status must be 0."""
        try:
            status = self._process.wait(allow(watchdog_s))
        except subprocess.TimeoutExpired:
            raise self.failed(outlasted("exit", watchdog_s)) from None
        if status != 0:
            raise self.failed(f"exit status {status}")

    def failed(self, reason: str) -> Failed:
        """An error with the process's command and the end of its log."""
        return Failed(reason, f": {' '.join(self.command)}{self.evidence()}", self.log)

    def evidence(self) -> str:
        """The end of the log."""
        return f"\n--- {self.log}\n{logs.tail(self.log)}" if self.log else ""
