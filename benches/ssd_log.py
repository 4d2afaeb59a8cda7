"""The common part of the benchmarks of the SSD tier: the Rust half, which drives the tier as `pillion bench disk` does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build() -> Path:
    """The executable of tools/benches/ssd.rs."""
    command = ["cargo", "bench", "--quiet", "--package", "tools", "--bench", "ssd", "--no-run", "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    # The binary `pillion` is built with it.
    [found] = [said["executable"] for said in messages if said.get("executable") and said["target"]["kind"] == ["bench"]]
    return Path(found)


def run(executable: Path, log: Path, log_bytes: int, *loads: str) -> dict[str, float]:
    """Opens a log and runs loads on it; the figures of all."""
    command = [str(executable), str(log), str(log_bytes), *loads]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder on this checkout's disk, removed at the end."""
    where = ROOT / ".cache"
    where.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-ssd-", dir=where) as path:
        yield Path(path)
