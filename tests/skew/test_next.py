"""Two releases that have versions in common, this one and the next: engines are served, and files are adopted.

Each test runs both ways: an upgrade to the next release, and a rollback to this one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from library import Release
from releases import BLOCKS, Pair, assert_kept, over_disk, save, serving


@pytest.fixture(params=["upgrade", "rollback"])
def pair(request: pytest.FixtureRequest, new: Release, following: Release) -> Pair:
    """Both orders of the two releases."""
    assert (new.library.version, following.library.version) == ("0.2.0", "0.3.0")
    return Pair(new, following) if request.param == "upgrade" else Pair(following, new)


def test_an_engine_of_the_other_release_is_served(pair: Pair, tmp_path: Path, pool: Path) -> None:
    """It saves and hits, and engines of the sidecar's own release hit what it saved."""
    with serving(tmp_path / "serving", pair.first, pool) as keeper:
        save(pair.then, keeper)
        assert_kept(pair.then, keeper, BLOCKS)
        assert_kept(pair.first, keeper, BLOCKS)


def test_a_pool_file_of_the_other_release_is_adopted(pair: Pair, tmp_path: Path, pool: Path) -> None:
    """There and back."""
    with serving(tmp_path / "first", pair.first, pool) as keeper:
        save(pair.first, keeper)
    for name, release in (("then", pair.then), ("back", pair.first)):
        with serving(tmp_path / name, release, pool) as keeper:
            assert keeper.metrics()["pillion_adopted_blocks_total"] == BLOCKS
            assert_kept(release, keeper, BLOCKS)


def test_an_ssd_log_of_the_other_release_is_adopted(pair: Pair, tmp_path: Path) -> None:
    """There and back, each sidecar over a pool of its own."""
    disk = tmp_path / "disk"
    with over_disk(tmp_path / "first", pair.first, disk) as keeper:
        save(pair.first, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    for name, release in (("then", pair.then), ("back", pair.first)):
        with over_disk(tmp_path / name, release, disk) as keeper:
            keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
            assert_kept(release, keeper, BLOCKS)
