"""What the Python benchmarks share: a real sidecar, KV memory of tiny blocks, and sessions over the native module."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from pillion import _shim

BINARY = Path(os.environ.get("PILLION_BINARY", Path(sysconfig.get_path("scripts")) / "pillion"))
# Watchdogs only.
READY_WATCHDOG_S = 60
SAVE_WATCHDOG_S = 60
# Answers are waited for: a benchmark that counted misses would measure nothing.
BUDGET_US = 1_000_000
RUN = bytes(range(16))


@contextlib.contextmanager
def sidecar(dram: str, http: str | None = None, more: tuple[str, ...] = ()) -> Iterator[Path]:
    """A sidecar of its own, ready; yields its socket. `http` is its admin address, `more` are arguments as they are."""
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        path = Path(folder) / "pillion.sock"
        http = http or f"127.0.0.1:{free_port('127.0.0.1')}"
        with (Path(folder) / "log").open("w+") as log:
            command = [str(BINARY), "serve", "--socket", str(path), "--dram", dram, "--http", http, *more]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                wait_for(lambda: _is_ready(http) or process.poll() is not None, "readiness", READY_WATCHDOG_S)
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{' '.join(command)} ended:\n{log.read()}")
                yield path
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(READY_WATCHDOG_S)


def _is_ready(http: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{http}/readyz").close()
    except OSError:
        return False
    return True


def free_port(address: str) -> int:
    """One that is free, and so is the next."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError, OverflowError):
            one.bind((address, 0))
            port = int(one.getsockname()[1])
            other.bind((address, port + 1))
            return port


def wait_for(condition: Callable[[], bool], what: str, watchdog_s: float) -> None:
    """Waits for a condition, or ends the benchmark."""
    deadline = time.monotonic() + watchdog_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"no {what} within {watchdog_s} s")
        time.sleep(0.0002)


class Engine:
    """One rank and its scheduler over `blocks` blocks of `block_bytes` bytes, not counting block 0.

    Block 0 is vLLM's null block, which is never kept.
    """

    def __init__(self, path: Path, blocks: int, block_bytes: int) -> None:
        self.fd = os.memfd_create("pillion-bench-kv")
        os.truncate(self.fd, (blocks + 1) * block_bytes)
        self.blocks = blocks
        regions = [(0, 0, block_bytes, block_bytes)]
        facts = {"benchmark": "rig", "block_bytes": str(block_bytes)}
        self.worker = _shim.WorkerSession(str(path), "bench", 1, 0, 0, 1, blocks + 1, regions, [self.fd], "engine", facts)
        self.scheduler = _shim.SchedulerSession(str(path), "bench", 1, RUN, BUDGET_US, True, False)
        if not (self.worker.connected and self.scheduler.connected):
            sys.exit(f"not connected: {self.worker.take_notices()} {self.scheduler.take_notices()}")
        self._step = 0

    def step(self) -> int:
        """The number of the next step."""
        self._step += 1
        return self._step

    def save(self, hashes: list[bytes]) -> None:
        """Keeps these keys, with whatever the blocks hold, and returns when they are committed."""
        for first in range(0, len(hashes), self.blocks):
            self._save_some(hashes[first : first + self.blocks])

    def _save_some(self, hashes: list[bytes]) -> None:
        scheduler, step = self.scheduler, self.step()
        log = self.log(hashes)
        if not scheduler.save(log, 0, list(range(1, len(hashes) + 1)), step):
            sys.exit("a save found no room")
        scheduler.end_step()
        self.worker.join(RUN)
        self.worker.start(step)
        self.worker.done(step, True)

        def ended() -> bool:
            scheduler.end_step()
            return scheduler.saving == 0

        wait_for(ended, "end of a save", SAVE_WATCHDOG_S)
        scheduler.close(log)

    def log(self, hashes: list[bytes]) -> int:
        """A log of these keys."""
        log = self.scheduler.open()
        if self.scheduler.append(log, hashes, 0) != len(hashes):
            sys.exit("a key log found no room")
        return log


def percentile(samples: list[float], part: float) -> float:
    """The value below which `part` of the samples lie, to a tenth of a microsecond."""
    ordered = sorted(samples)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 1)


def median(samples: list[float]) -> float:
    """To a tenth of a microsecond."""
    return round(statistics.median(samples), 1)


def say(text: str) -> None:
    """Progress; the result is the last line of standard output."""
    print(text, file=sys.stderr, flush=True)
