"""A process that is started with a log and ends with all that it started."""

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
    """What is known of a process that runs: as `subprocess.Popen` has it."""

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
    """A process that leads a group: signals to it reach what it starts, and nobody else.

    What it prints, unless that is piped, is appended to `log`; without a log it goes where this process's goes. It inherits
    the descriptors of `keep`. It stays in our session: Linux shares processors out among sessions first (autogroup), and there
    a process of vLLM that spins for a message (sched_yield, 1 s) keeps those of another session off its processor as long.
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
    """One process, which leads a group."""

    def __init__(self, process: Started, command: Sequence[object], log: Path | None) -> None:
        """`command` is what a person would have to type for it."""
        self._process = process
        self.command = [str(part) for part in command]
        self.log = log

    @property
    def pid(self) -> int:
        """The process that was started: with a prefix, that of the prefix."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """To the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        self.signal(signal.SIGKILL)
        self._process.wait(allow(EXIT_WATCHDOG_S))

    def wait_exit(self, watchdog_s: float = EXIT_WATCHDOG_S) -> None:
        """Wait for its end, which must have status 0."""
        try:
            status = self._process.wait(allow(watchdog_s))
        except subprocess.TimeoutExpired:
            raise self.failed(outlasted("exit", watchdog_s)) from None
        if status != 0:
            raise self.failed(f"exit status {status}")

    def failed(self, reason: str) -> Failed:
        """An error that shows what is known of the process."""
        return Failed(reason, f": {' '.join(self.command)}{self.evidence()}", self.log)

    def evidence(self) -> str:
        """The end of the log."""
        return f"\n--- {self.log}\n{logs.tail(self.log)}" if self.log else ""
