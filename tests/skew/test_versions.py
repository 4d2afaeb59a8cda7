"""Two releases meet: at a socket, where they refuse each other, and in the files that a sidecar leaves to the next one.

Each test runs both ways: an upgrade to this release, and a rollback to the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import library
from library import Release
from testkit import sidecar

BLOCKS = 9
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(BLOCKS)]
CONTENT = [hashlib.shake_128(bytes([number])).digest(library.BLOCK_BYTES) for number in range(BLOCKS)]
DRAM = "64MiB"
OLD, NEW = "0.1.0", "0.2.0"
# What the reader of a file of the other release says of it.
POOL_SAID = {
    NEW: f"layout is version 1 (release not stated), this release's version 2 (release {NEW})",
    OLD: "its layout is version 2, this release's 1",
}
SSD_SAID = {
    NEW: f"is a log of version 1 (release not stated), this release's is version 2 (release {NEW}): it starts empty",
    OLD: "is a log of version 2, not 1, and starts empty",
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """The release that comes first, or serves, and the one that follows, or asks."""

    first: Release
    then: Release


@pytest.fixture(params=["upgrade", "rollback"])
def pair(request: pytest.FixtureRequest, old: Release, new: Release) -> Pair:
    """Both orders of the two releases."""
    assert (old.library.version, new.library.version) == (OLD, NEW)
    return Pair(old, new) if request.param == "upgrade" else Pair(new, old)


@contextlib.contextmanager
def serving(directory: Path, release: Release, pool: Path, ssd: tuple[str, ...] = ()) -> Iterator[sidecar.Sidecar]:
    """A sidecar of a release, all of its pool in service and verified, gone when the block ends."""
    directory.mkdir()
    keeper = sidecar.Sidecar(directory, DRAM, pool=pool, gpu=False, ssd=ssd, binary=release.binary)
    try:
        keeper.wait_for(lambda: keeper.get("/readyz") == "ready\n", "its whole pool in service")
        # 0.1.0 verifies nothing.
        keeper.wait_for(lambda: keeper.metrics().get("pillion_adoption_unverified_blocks", 0) == 0, "verified blocks")
        yield keeper
        keeper.terminate()
    finally:
        keeper.kill()


@pytest.fixture
def pool() -> Iterator[Path]:
    """A pool file that outlives its sidecar."""
    path = sidecar.new_pool()
    yield path
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def connected(release: Release, keeper: sidecar.Sidecar) -> Iterator[library.Engine]:
    """An engine of a release that its sidecar serves."""
    engine = library.Engine(release.library, keeper.socket, BLOCKS)
    try:
        assert engine.refusal == (library.OK, "")
        yield engine
    finally:
        engine.close()


def save(release: Release, keeper: sidecar.Sidecar) -> None:
    """An engine computes all blocks and saves them."""
    with connected(release, keeper) as engine:
        for number, content in enumerate(CONTENT, 1):
            engine.put(number, content)
        assert engine.save(engine.open(HASHES), BLOCKS)
        keeper.wait_for(lambda: engine.state().saving == 0, "end of the save")
    assert keeper.metrics()["pillion_saved_blocks_total"] == BLOCKS


def assert_kept(release: Release, keeper: sidecar.Sidecar, expected: int) -> None:
    """So many of the blocks are hits of a new engine, and hold what was saved."""
    with connected(release, keeper) as engine:
        log = engine.open(HASHES)
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


def assert_counted(release: Release, keeper: sidecar.Sidecar, name: str, times: int = 1) -> None:
    """On /metrics, of which 0.1.0 has no such line."""
    if release.library.version == NEW:
        assert keeper.sample(name) == times


def test_an_engine_of_the_other_release_is_refused_and_goes_on(pair: Pair, tmp_path: Path, pool: Path) -> None:
    """Rank and scheduler are told both numbers in the first answer; requests are misses; nobody else is hurt."""
    with serving(tmp_path / "serving", pair.first, pool) as keeper:
        engine = library.Engine(pair.then.library, keeper.socket, BLOCKS)
        try:
            status, rank_told = engine.refusal
            assert status == library.REFUSED
            state = engine.state()
            assert not state.connected
            scheduler_told = state.notice.decode()
            assert engine.state().notice is None, "it is said once"
            for text in (rank_told, scheduler_told):
                assert "protocol version 1" in text or "side version 1" in text, text
                assert "protocol version 2" in text or "side version 2" in text, text
                assert "install the same pillion release on both" in text
            log = engine.open(HASHES)
            assert engine.query(log, BLOCKS) == 0
            assert not engine.save(log, BLOCKS)
        finally:
            engine.close()
        assert "connection refused" in keeper.log.read_text()
        assert_counted(pair.first, keeper, 'pillion_connections_refused_total{reason="version"}', times=2)
        save(pair.first, keeper)
        assert_kept(pair.first, keeper, BLOCKS)


def test_a_pool_file_of_the_other_release_is_served_empty_and_then_used(pair: Pair, tmp_path: Path, pool: Path) -> None:
    """The log names both versions; what the next sidecar keeps in the file is adopted by the one after it."""
    with serving(tmp_path / "first", pair.first, pool) as keeper:
        save(pair.first, keeper)
    # The control: the file holds blocks for a sidecar of its own release.
    with serving(tmp_path / "control", pair.first, pool) as keeper:
        assert_kept(pair.first, keeper, BLOCKS)
    with serving(tmp_path / "then", pair.then, pool) as keeper:
        assert POOL_SAID[pair.then.library.version] in keeper.log.read_text()
        assert_counted(pair.then, keeper, 'pillion_files_given_up_total{file="pool",reason="version"}')
        assert_kept(pair.then, keeper, 0)
        save(pair.then, keeper)
    with serving(tmp_path / "after", pair.then, pool) as keeper:
        assert keeper.metrics()["pillion_adopted_blocks_total"] == BLOCKS
        assert_kept(pair.then, keeper, BLOCKS)


def test_an_ssd_log_of_the_other_release_is_served_empty_and_then_used(pair: Pair, tmp_path: Path) -> None:
    """The same of a disk, each sidecar over a pool of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()

    @contextlib.contextmanager
    def over_disk(name: str, release: Release) -> Iterator[sidecar.Sidecar]:
        own = sidecar.new_pool()
        try:
            with serving(tmp_path / name, release, own, (f"{disk}:64MiB",)) as keeper:
                yield keeper
        finally:
            own.unlink(missing_ok=True)

    with over_disk("first", pair.first) as keeper:
        save(pair.first, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    with over_disk("control", pair.first) as keeper:
        keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
        assert_kept(pair.first, keeper, BLOCKS)
    with over_disk("then", pair.then) as keeper:
        assert SSD_SAID[pair.then.library.version] in keeper.log.read_text()
        assert_counted(pair.then, keeper, 'pillion_files_given_up_total{file="ssd",reason="version"}')
        assert_kept(pair.then, keeper, 0)
        assert keeper.metrics()["pillion_ssd_recovered_blocks_total"] == 0
        save(pair.then, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    with over_disk("after", pair.then) as keeper:
        keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
        assert_kept(pair.then, keeper, BLOCKS)
