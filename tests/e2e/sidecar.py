"""The sidecar's side of the end-to-end tests: one real `pillion serve` per `Sidecar`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import log_tail

# The console script of the wheel under test, beside the interpreter that runs the tests.
BINARY = Path(sys.executable).with_name("pillion")
# Watchdogs only: no test asserts on them.
READY_WATCHDOG_S = 60
EXIT_WATCHDOG_S = 60
CONDITION_WATCHDOG_S = 60
POLL_S = 0.02
SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class Sidecar:
    """A sidecar with a socket, a pool file and an admin address of its own."""

    def __init__(
        self,
        directory: Path,
        dram: str = "128MiB",
        pool: Path | None = None,
        anonymous: bool = False,
        prefix: tuple[str, ...] = (),
        gpu: bool = True,
        ssd: tuple[str, ...] = (),
        http: str | None = None,
        more: tuple[str, ...] = (),
    ) -> None:
        """A pool of `anonymous` memory has no file; `prefix` goes before the command, see mounts.py; no `gpu`: it sees none.

        Each `ssd` is a PATH:SIZE; `more` are arguments as they are.
        """
        self.socket = directory / "pillion.sock"
        self.pool = pool or new_pool()
        self.log = directory / "sidecar.log"
        self.http = http or f"127.0.0.1:{_free_port()}"
        arguments = ["--socket", self.socket, "--dram", dram, "--http", self.http]
        arguments += [] if anonymous else ["--pool-path", self.pool]
        arguments += [] if gpu else ["--gpu", "off"]
        arguments += [*(f"--ssd={disk}" for disk in ssd), *more]
        self._process = subprocess.Popen(
            [str(part) for part in [*prefix, BINARY, "serve", *arguments]],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self) -> None:
        """Return once /readyz answers 200."""
        self.wait_for(lambda: self.get("/readyz") is not None, "readiness", READY_WATCHDOG_S)

    def get(self, path: str) -> str | None:
        """The body of an admin page, or None where it is not served or not ready."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return None

    def metrics(self) -> dict[str, int]:
        """Every sample of /metrics by name, summed over its labels."""
        page = self.get("/metrics")
        assert page is not None, f"no /metrics\n{log_tail(self.log)}"
        totals: dict[str, int] = {}
        for name, value in SAMPLE.findall(page):
            totals[name] = totals.get(name, 0) + int(float(value))
        return totals

    def sample(self, name: str) -> int:
        """One sample of /metrics by its name with the labels, as the page has it."""
        page = self.get("/metrics") or ""
        return next(int(line.removeprefix(name)) for line in page.splitlines() if line.startswith(f"{name} "))

    def wait_metric(self, name: str, at_least: int) -> None:
        """Wait until a counter got so far; saves commit behind the engine's back."""
        self.wait_for(lambda: self.metrics()[name] >= at_least, f"{name} >= {at_least}")

    def wait_for(self, condition: Callable[[], bool], what: str, watchdog_s: float = CONDITION_WATCHDOG_S) -> None:
        """Wait for a condition under a watchdog; a sidecar that ended fails at once."""
        deadline = time.monotonic() + watchdog_s
        while not condition():
            status = self._process.poll()
            assert status is None, f"sidecar ended with {status}\n{log_tail(self.log)}"
            assert time.monotonic() < deadline, f"no {what} in {watchdog_s} s\n{self.get('/metrics')}\n{log_tail(self.log)}"
            time.sleep(POLL_S)

    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        self._process.kill()
        self._process.wait(EXIT_WATCHDOG_S)

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        freeze(self._process.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM; the sidecar must drain and exit with status 0."""
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(EXIT_WATCHDOG_S)
        assert status == 0, f"sidecar: exit status {status} on SIGTERM\n{log_tail(self.log)}"

    def wait_refusal(self) -> str:
        """What a sidecar that cannot start says before it ends, which it must do with an error status."""
        status = self._process.wait(EXIT_WATCHDOG_S)
        assert status not in (0, -signal.SIGKILL), f"sidecar: exit status {status}\n{log_tail(self.log)}"
        return self.log.read_text()


def new_pool() -> Path:
    """A name for a pool file. It must lie on tmpfs; the tests read and damage it through this path."""
    return Path("/dev/shm") / f"pillion-test-{uuid.uuid4()}"


def freeze(pid: int) -> None:
    """SIGSTOP; returns when every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + CONDITION_WATCHDOG_S
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} runs on after SIGSTOP"
        time.sleep(POLL_S)


def _is_stopped(task: Path) -> bool:
    # The state follows the name, which stands in parentheses.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(directory: Path, dram: str = "128MiB", gpu: bool = True) -> Iterator[Sidecar]:
    """A ready sidecar; its clean exit is part of every test that uses it, unless the test killed it."""
    sidecar = Sidecar(directory, dram, gpu=gpu)
    try:
        sidecar.wait_ready()
        yield sidecar
        if sidecar._process.poll() is None:
            sidecar.terminate()
    finally:
        sidecar.kill()
        sidecar.pool.unlink(missing_ok=True)
