"""A process driven by lines on its standard input and output: `Child` is the parent's end, `Parent` the child's end.

Most children speak JSON, one value a line. A child's other output goes to its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testkit.fork_server import Forked, ForkServer
from testkit.process import EXIT_WATCHDOG_S, Process, start
from testkit.waiting import allow, outlasted

# The folder of this package.
TESTS = Path(__file__).resolve().parents[1]
CHUNK_BYTES = 1 << 20


def python(module: str, *arguments: str) -> list[str]:
    """The command of a Python program; Python finds the module on the path that `Child` sets alone."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path(path: Iterable[Path] = ()) -> dict[str, str]:
    """The variable by which Python finds `path`, then testkit, then this process's own path."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, path), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}


class Child(Process):
    """The parent's end."""

    def __init__(
        self,
        command: Sequence[object],
        log: Path | None,
        environment: Mapping[str, str] | None = None,
        path: Iterable[Path] = (),
    ) -> None:
        """Appends standard error to `log`; without a log it goes to this process's standard error. Python finds `path`, then
        testkit."""
        variables = python_path(path) | dict(environment or {})
        started = start(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment=variables)
        self._take(started, command, log)

    @classmethod
    def copied(cls, server: ForkServer) -> Child:
        """A copy of a process that has done its imports."""
        child = cls.__new__(cls)
        child._take(server.fork(), server.command, server.log)
        return child

    def _take(self, process: subprocess.Popen[bytes] | Forked, command: Sequence[object], log: Path | None) -> None:
        Process.__init__(self, process, command, log)
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._unread = b""

    def tell(self, message: Any) -> None:
        """Sends a value as JSON."""
        self.write(json.dumps(message))

    def hear(self, watchdog_s: float) -> Any:
        """The next value of the child."""
        return json.loads(self.line(watchdog_s))

    def write(self, line: str) -> None:
        """Sends a line."""
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self.failed(f"ended before it was told {line[:80]}") from None

    def line(self, watchdog_s: float) -> str:
        """The next line of the child."""
        line = self.line_within(allow(watchdog_s))
        if line is None:
            raise self.failed(outlasted("answer", watchdog_s))
        return line

    def line_within(self, patience_s: float) -> str | None:
        """The next line, or None if it does not come within that time. The end of the child is an error."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            chunk = os.read(self._stdout.fileno(), CHUNK_BYTES)
            if not chunk:
                raise self.failed(f"ended with status {self._process.wait(EXIT_WATCHDOG_S)}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def close_input(self) -> None:
        """Closes the child's input; most children end then."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def close(self) -> None:
        """Kills the child and closes its pipes. After `kill` alone, the child's last lines can still be read."""
        self.kill()
        self.close_input()
        self._stdout.close()


class Parent:
    """The child's end. Once it is made, prints go to standard error, and standard output has lines alone."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def log_to(self, log: Path | str) -> None:
        """Redirects output into a file from now on."""
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def tell(self, message: Any) -> None:
        """Sends a value as JSON."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def hear(self) -> Any:
        """The parent's next value, or None when it has closed this process's input."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None
