"""The common parts of the Python benchmarks: a real sidecar, and an engine with tiny blocks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from benches import harness
from testkit import sessions
from testkit.sidecar import Sidecar, serving

POLL_S, BUDGET_US = sessions.POLL_S, sessions.QUERY_BUDGET_US


@contextlib.contextmanager
def sidecar(dram: str, more: tuple[str, ...] = (), binary: Path | None = None) -> Iterator[Sidecar]:
    """A ready sidecar in a folder of its own, with a pool of anonymous memory; `more` are arguments as they are."""
    with (
        tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder,
        serving(Path(folder), dram, anonymous=True, more=more, binary=binary) as running,
    ):
        yield running


class Engine(sessions.Sessions):
    """One rank and its scheduler over `blocks` blocks of `block_bytes` bytes, not counting block 0.

    Block 0 is vLLM's null block, and never kept.
    """

    def __init__(
        self,
        path: Path,
        blocks: int,
        block_bytes: int,
        name: str = "bench",
        more: dict[str, str] | None = None,
        wait_max_ms: int | None = None,
        part_blocks: int = 0,
    ) -> None:
        """`more`: facts beside those of every bench. With `part_blocks` the sidecar copies, and loads may come in parts."""
        self.fd = os.memfd_create("pillion-bench-kv")
        os.truncate(self.fd, (blocks + 1) * block_bytes)
        self.blocks = blocks
        facts = {"benchmark": "rig", "block_bytes": str(block_bytes)} | (more or {})
        regions = [(0, 0, block_bytes, block_bytes)]
        files = [self.fd]
        copier: Literal["sidecar", "engine"] = "sidecar" if part_blocks else "engine"
        super().__init__(
            path, name, blocks + 1, regions, facts, copier=copier, files=files, wait_max_ms=wait_max_ms, part_blocks=part_blocks
        )

    def save(self, hashes: list[bytes]) -> None:
        """Saves these keys with the blocks' present bytes, and returns when they are committed."""
        for first in range(0, len(hashes), self.blocks):
            some = hashes[first : first + self.blocks]
            self.keep(some, list(range(1, len(some) + 1)))


def binary(text: str | None) -> Path | None:
    """The sidecar named on the command line, to compare with the sidecar of the wheel."""
    parser = harness.parser(text)
    parser.add_argument("--binary", type=Path, help="another sidecar's executable, to compare with the wheel's")
    named: Path | None = parser.parse_args().binary
    return named


def compared(name: str, spent: dict[str, list[float]], part: float = 0.5) -> dict[str, float]:
    """Compares kinds of samples taken in turns: the value below which `part` of a kind's samples lie, and its ratio to the
    plain kind."""
    values = {kind: sorted(samples)[int(len(samples) * part)] for kind, samples in spent.items()}
    plain = values.pop("plain")
    found = {f"{kind}_{name}_us": round(value, 2) for kind, value in values.items()}
    ratios = {f"{kind}_{name}_ratio": round(value / plain, 3) for kind, value in values.items()}
    return {f"plain_{name}_us": round(plain, 2)} | found | ratios
