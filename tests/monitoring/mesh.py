"""Sidecars with disks, peers of each other, and a light engine that computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy

from pillion.engine import Engine, Namespace
from testkit import namespaces, ports
from testkit.sidecar import Sidecar, serving

HEADS, TOKENS, DIM = 2, 16, 256
BLOCKS = 64
# A pool for seven prompts of 16 blocks, and a disk for many.
DRAM, DISK = "8MiB", "64MiB"


def namespace() -> Namespace:
    """A namespace with blocks of 64 KiB."""
    return namespaces.new(layers=1, heads=HEADS, tokens=TOKENS, dim=DIM)


def joined(socket: Path, name: str, blocks: int = BLOCKS) -> Engine:
    """An engine without checks, so all of its hits are loaded."""
    return Engine(socket, name, namespace(), blocks, check_every=0)


def prompt(seed: int, blocks: int = 16) -> list[int]:
    """Tokens of this seed alone."""
    return [seed * 100_000 + token for token in range(blocks * TOKENS)]


def save(engine: Engine, tokens: list[int], value: float = 1.0, handover: bool = False) -> int:
    """Saves all of a prompt's blocks, filled with `value`; the number of blocks kept then."""
    with (engine.promise if handover else engine.load)(tokens) as request:
        kv = numpy.full((1, HEADS, len(tokens) - request.held, DIM), value, numpy.float32)
        return engine.save(request, tokens, kv, kv)


def save_to_disk(sidecar: Sidecar, engine: Engine, prompts: list[list[int]]) -> None:
    """Saves all prompts. Memory evicts a block, written or not, once there is no room: so this waits for the write of each."""
    written = sidecar.metrics().get("pillion_ssd_written_blocks_total", 0)
    for tokens in prompts:
        written += save(engine, tokens)
        sidecar.wait_metric("pillion_ssd_written_blocks_total", written)


def load(engine: Engine, tokens: list[int], awaits: bool = False) -> int:
    """Loads the kept blocks of a prompt; their number."""
    with engine.load([*tokens, 0], awaits) as request:
        return request.held // TOKENS


def disk(directory: Path) -> str:
    """A folder for `--ssd`, on the root disk too, and its size."""
    (directory / "disk").mkdir(parents=True)
    return f"{directory / 'disk'}:{DISK}:create"


@contextlib.contextmanager
def peers(directory: Path, also: tuple[str, ...] = ()) -> Iterator[tuple[Sidecar, Sidecar]]:
    """Two ready sidecars with disks and `also` these options, each a member for the other."""
    listen = [ports.free_port() for _ in range(2)]
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(2):
            folder = directory / f"node{number}"
            more = (
                f"--mesh-listen=127.0.0.1:{listen[number]}",
                f"--peer=127.0.0.1:{listen[1 - number]}",
                f"--node-id=node{number}",
                "--mesh-plaintext",
                *also,
            )
            disks = (disk(folder),)
            started.append(stack.enter_context(serving(folder, DRAM, gpu=False, ssd=disks, more=more)))
        for sidecar in started:
            sidecar.wait_metric("pillion_mesh_peers", 1)
        yield started[0], started[1]
