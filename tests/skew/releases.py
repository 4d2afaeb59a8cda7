"""A sidecar of one release and an engine of another, for the tests of version skew."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import library
from library import Release
from testkit import sidecar

BLOCKS = 9
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(BLOCKS)]
CONTENT = [hashlib.shake_128(bytes([number])).digest(library.BLOCK_BYTES) for number in range(BLOCKS)]
DRAM = "64MiB"


@dataclasses.dataclass(frozen=True)
class Stated:
    """An engine's facts, and the keys of its blocks."""

    facts: dict[str, str] = dataclasses.field(default_factory=lambda: {"model": "skew"})
    hashes: list[bytes] = dataclasses.field(default_factory=lambda: HASHES)


USUAL = Stated()


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two releases in order: the first one serves, or comes first; the other one asks, or comes next."""

    first: Release
    then: Release


@contextlib.contextmanager
def serving(directory: Path, release: Release, pool: Path, ssd: tuple[str, ...] = ()) -> Iterator[sidecar.Sidecar]:
    """A sidecar of a release with all of its pool in service and verified, killed at the block's end."""
    directory.mkdir()
    keeper = sidecar.Sidecar(directory, DRAM, pool=pool, gpu=False, ssd=ssd, binary=release.binary)
    try:
        keeper.wait_for(lambda: keeper.get("/readyz") == "ready\n", "its whole pool in service")
        keeper.wait_for(lambda: keeper.metrics()["pillion_adoption_unverified_blocks"] == 0, "verified blocks")
        yield keeper
        keeper.terminate()
    finally:
        keeper.kill()


@contextlib.contextmanager
def over_disk(directory: Path, release: Release, disk: Path) -> Iterator[sidecar.Sidecar]:
    """A sidecar over a disk, with a pool for this sidecar alone."""
    disk.mkdir(exist_ok=True)
    pool = sidecar.new_pool()
    try:
        with serving(directory, release, pool, (f"{disk}:64MiB:create",)) as keeper:
            yield keeper
    finally:
        pool.unlink(missing_ok=True)


@contextlib.contextmanager
def connected(release: Release, keeper: sidecar.Sidecar, stated: Stated = USUAL) -> Iterator[library.Engine]:
    """An engine of a release, connected to a sidecar."""
    engine = library.Engine(release.library, keeper.socket, BLOCKS, stated.facts)
    try:
        assert engine.refusal == (library.OK, "")
        yield engine
    finally:
        engine.close()


def compute_and_save(engine: library.Engine, keeper: sidecar.Sidecar, stated: Stated = USUAL) -> bool:
    """An engine computes all blocks and saves them; false where its library drops the save."""
    for number, content in enumerate(CONTENT, 1):
        engine.put(number, content)
    posted = engine.save(engine.open(stated.hashes), BLOCKS)
    keeper.wait_for(lambda: engine.state().saving == 0, "end of the save")
    return posted


def save(release: Release, keeper: sidecar.Sidecar, stated: Stated = USUAL) -> None:
    """An engine computes and saves all blocks; they must be kept."""
    with connected(release, keeper, stated) as engine:
        assert compute_and_save(engine, keeper, stated)
    assert keeper.metrics()["pillion_saved_blocks_total"] == BLOCKS


def assert_kept(release: Release, keeper: sidecar.Sidecar, expected: int, stated: Stated = USUAL) -> None:
    """A new engine hits so many of the blocks, with the saved bytes."""
    with connected(release, keeper, stated) as engine:
        log = engine.open(stated.hashes)
        hits: list[int] = []

        def answered() -> bool:
            hits.append(engine.query(log, BLOCKS))
            if hits[-1] < 0:
                engine.idle()
            return hits[-1] >= 0

        keeper.wait_for(answered, "answer")
        assert hits[-1] == expected
        if expected:
            assert engine.load(log, expected) == []
        assert [engine.block(number) for number in range(1, 1 + expected)] == CONTENT[:expected]
