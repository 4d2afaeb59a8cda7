"""What the Python benchmarks share: a real sidecar, KV memory of tiny blocks, and sessions over the native module."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pillion import _shim
from testkit.sidecar import Sidecar, serving
from testkit.waiting import wait_for

# What is waited for takes some 10 us.
POLL_S = 0.0002
# Answers are waited for: a benchmark that counted misses would measure nothing.
BUDGET_US = 1_000_000


@contextlib.contextmanager
def sidecar(dram: str, more: tuple[str, ...] = (), binary: Path | None = None) -> Iterator[Sidecar]:
    """A ready sidecar in a folder of its own, with a pool of anonymous memory; `more` are arguments as they are."""
    with (
        tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder,
        serving(Path(folder), dram, anonymous=True, more=more, binary=binary) as running,
    ):
        yield running


class Engine:
    """One rank and its scheduler over `blocks` blocks of `block_bytes` bytes, not counting block 0.

    Block 0 is vLLM's null block, which is never kept.
    """

    def __init__(
        self, path: Path, blocks: int, block_bytes: int, name: str = "bench", more: dict[str, str] | None = None
    ) -> None:
        """`more`: facts beside those of every bench."""
        self.fd = os.memfd_create("pillion-bench-kv")
        os.truncate(self.fd, (blocks + 1) * block_bytes)
        self.blocks = blocks
        # An id of this run, which no other engine of the bench has.
        self.run = os.urandom(16)
        regions = [(0, 0, block_bytes, block_bytes)]
        facts = {"benchmark": "rig", "block_bytes": str(block_bytes)} | (more or {})
        self.worker = _shim.WorkerSession(str(path), name, 1, 0, 0, 1, blocks + 1, regions, [self.fd], "engine", facts)
        self.scheduler = _shim.SchedulerSession(str(path), name, 1, self.run, BUDGET_US, True, False)
        if not (self.worker.connected and self.scheduler.connected):
            sys.exit(f"not connected: {self.worker.take_notices()} {self.scheduler.take_notices()}")
        # Nothing is served before the ranks have joined.
        self.worker.join(self.run)
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
        self.worker.join(self.run)
        self.worker.start(step)
        self.worker.done(step, True)

        def ended() -> bool:
            scheduler.end_step()
            return scheduler.saving == 0

        wait_for(ended, "end of a save", poll_s=POLL_S)
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


def binary() -> Path | None:
    """Another sidecar, named on the command line, that is compared with the wheel's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path, help="another sidecar's executable, to compare with the wheel's")
    named: Path | None = parser.parse_args().binary
    return named


def compared(name: str, spent: dict[str, list[float]], part: float = 0.5) -> dict[str, float]:
    """Of samples taken in turns, by kind: the value below which `part` of a kind's samples lie, and its ratio to plain's."""
    values = {kind: sorted(samples)[int(len(samples) * part)] for kind, samples in spent.items()}
    plain = values.pop("plain")
    found = {f"{kind}_{name}_us": round(value, 2) for kind, value in values.items()}
    ratios = {f"{kind}_{name}_ratio": round(value / plain, 3) for kind, value in values.items()}
    return {f"plain_{name}_us": round(plain, 2)} | found | ratios


def say(text: str) -> None:
    """Progress; the result is the last line of standard output."""
    print(text, file=sys.stderr, flush=True)
