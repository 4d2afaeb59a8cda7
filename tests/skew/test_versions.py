"""Two releases meet that have no version in common: at a socket, and in the files that a sidecar leaves to the next one.

Each test runs both ways: an upgrade to this release, and a rollback to the one before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import library
from library import Release
from releases import BLOCKS, HASHES, Pair, assert_kept, over_disk, save, serving
from testkit.sidecar import Sidecar

OLD, NEW = "0.1.0", "0.2.0"
# What the reader of a file of the other release says of it.
POOL_SAID = {
    NEW: f"layout is version 1 (release not stated), this release's version 2 (release {NEW})",
    OLD: "its layout is version 2, this release's 1",
}
SSD_SAID = {
    NEW: f"is a log of version 1 (release not stated), this release's is version 3 (release {NEW}): it starts empty",
    OLD: "is a log of version 3, not 1, and starts empty",
}


@pytest.fixture(params=["upgrade", "rollback"])
def pair(request: pytest.FixtureRequest, old: Release, new: Release) -> Pair:
    """Both orders of the two releases."""
    assert (old.library.version, new.library.version) == (OLD, NEW)
    return Pair(old, new) if request.param == "upgrade" else Pair(new, old)


def assert_counted(release: Release, keeper: Sidecar, name: str, times: int = 1) -> None:
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
    with over_disk(tmp_path / "first", pair.first, disk) as keeper:
        save(pair.first, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    with over_disk(tmp_path / "control", pair.first, disk) as keeper:
        keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
        assert_kept(pair.first, keeper, BLOCKS)
    with over_disk(tmp_path / "then", pair.then, disk) as keeper:
        assert SSD_SAID[pair.then.library.version] in keeper.log.read_text()
        assert_counted(pair.then, keeper, 'pillion_files_given_up_total{file="ssd",reason="version"}')
        assert_kept(pair.then, keeper, 0)
        assert keeper.metrics()["pillion_ssd_recovered_blocks_total"] == 0
        save(pair.then, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    with over_disk(tmp_path / "after", pair.then, disk) as keeper:
        keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
        assert_kept(pair.then, keeper, BLOCKS)
