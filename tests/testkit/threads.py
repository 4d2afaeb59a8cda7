"""The threads of a process as the kernel sees them, and frozen processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from testkit.waiting import wait_for


def state(pid: int, thread: int) -> str:
    """One letter, as proc(5) lists them: S sleeps, T is stopped by a signal, Z is ended."""
    # The state follows the name in parentheses.
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def named(pid: int, prefix: str) -> set[int]:
    """The threads of a process with names that begin with `prefix`."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may end once it is listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith(prefix):
                found.add(int(task.name))
    return found


def states(pid: int) -> set[str]:
    """The states of a process's threads; an empty set for a process that has ended."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found.add(state(pid, int(task.name)))
    return found


def freeze(pid: int) -> None:
    """Sends SIGSTOP; returns when every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: states(pid) == {"T"}, f"standstill of process {pid} after SIGSTOP")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freezes the process while the block runs."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
