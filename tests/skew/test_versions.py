"""Two releases with common versions of protocol and files: the previous one and this one, this one and the next.

Each test runs both ways: an upgrade, and a rollback.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from library import Release
from releases import BLOCKS, HASHES, Pair, Stated, assert_kept, compute_and_save, connected, over_disk, save, serving

OLD, NEW, NEXT = "0.2.0", "0.3.0", "0.4.0"
BOTH_WAYS = ("upgrade", "rollback")
# Pages of the tests' blocks. Some of their numbers are not finite.
PAGE = "layers=1 tokens=16 kv_heads=1 keys=64 values=0 dtype=float32"


def hashed(algorithm: str, hashes: list[bytes]) -> Stated:
    """An engine of this hash algorithm."""
    return Stated({"model": "skew", "page_form": PAGE, "hash_algorithm": algorithm}, hashes)


def before_and_this(request: pytest.FixtureRequest) -> list[Release]:
    """The release before, and this one."""
    releases = [request.getfixturevalue("old"), request.getfixturevalue("new")]
    assert [release.library.version for release in releases] == [OLD, NEW]
    return releases


def this_and_next(request: pytest.FixtureRequest) -> list[Release]:
    """This release, and the next."""
    releases = [request.getfixturevalue("new"), request.getfixturevalue("following")]
    assert [release.library.version for release in releases] == [NEW, NEXT]
    return releases


@pytest.fixture(params=[(releases, way) for releases in (before_and_this, this_and_next) for way in BOTH_WAYS])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Both orders of two releases."""
    releases, way = request.param
    first, then = releases(request)
    return Pair(first, then) if way == "upgrade" else Pair(then, first)


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_an_engine_of_the_next_release_is_served(way: str, request: pytest.FixtureRequest, tmp_path: Path, pool: Path) -> None:
    """The next release's engine saves and hits, and engines of the sidecar's own release hit its blocks."""
    serves, asks = this_and_next(request) if way == "upgrade" else reversed(this_and_next(request))
    with serving(tmp_path / "serving", serves, pool) as keeper:
        save(asks, keeper)
        assert_kept(asks, keeper, BLOCKS)
        assert_kept(serves, keeper, BLOCKS)


def test_an_engine_of_the_release_before_loads_and_nothing_of_it_is_kept(
    old: Release, new: Release, tmp_path: Path, pool: Path
) -> None:
    """The older engine cannot state accepted steps, so its blocks are not kept. Its log and the sidecar's name the remedy."""
    remedy = "Install release 0.3.0 or later of Pillion's wheel in the engine's image"
    with serving(tmp_path / "serving", new, pool) as keeper:
        with connected(old, keeper) as engine:
            told = engine.state().notice.decode()
            assert "runs release 0.2.0" in told and remedy in told
            assert compute_and_save(engine, keeper)
        assert keeper.metrics()["pillion_saves_unaccepted_total"] == BLOCKS
        assert_kept(old, keeper, 0)
        assert remedy in keeper.log.read_text()
        save(new, keeper)
        assert_kept(old, keeper, BLOCKS)


def test_at_a_sidecar_of_the_release_before_an_engine_loads_and_saves_nothing(
    old: Release, new: Release, tmp_path: Path, pool: Path
) -> None:
    """The older sidecar would keep blocks of steps without acceptance. The engine's log names the remedy."""
    with serving(tmp_path / "serving", old, pool) as keeper:
        with connected(new, keeper) as engine:
            assert "upgrade the sidecar to 0.3.0 or later" in engine.state().notice.decode()
            assert not compute_and_save(engine, keeper)
        assert keeper.metrics()["pillion_saves_posted_blocks_total"] == 0
        save(old, keeper)
        assert_kept(new, keeper, BLOCKS)


def test_a_pool_file_of_the_other_release_is_adopted(pair: Pair, tmp_path: Path, pool: Path) -> None:
    """The next release adopts the blocks, and the first one adopts them again."""
    with serving(tmp_path / "first", pair.first, pool) as keeper:
        save(pair.first, keeper)
    for name, release in (("then", pair.then), ("back", pair.first)):
        with serving(tmp_path / name, release, pool) as keeper:
            assert keeper.metrics()["pillion_adopted_blocks_total"] == BLOCKS
            assert_kept(release, keeper, BLOCKS)


def test_an_ssd_log_of_the_other_release_is_adopted(pair: Pair, tmp_path: Path) -> None:
    """The next release adopts the blocks, and the first one adopts them again; each sidecar has a pool of its own."""
    disk = tmp_path / "disk"
    with over_disk(tmp_path / "first", pair.first, disk) as keeper:
        save(pair.first, keeper)
        keeper.wait_metric("pillion_ssd_written_blocks_total", BLOCKS)
    for name, release in (("then", pair.then), ("back", pair.first)):
        with over_disk(tmp_path / name, release, disk) as keeper:
            keeper.wait_metric("pillion_ssd_recovered_blocks_total", BLOCKS)
            assert_kept(release, keeper, BLOCKS)


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (hashed("sha256", HASHES), hashed("sha256", HASHES), BLOCKS),
        (hashed("xxhash", [key[:16] + bytes(16) for key in HASHES]), hashed("xxhash+sha256", HASHES), 0),
    ],
    ids=["sha256", "xxhash"],
)
def test_what_is_found_of_the_release_before(
    old: Release, new: Release, before: Stated, now: Stated, found: int, tmp_path: Path, pool: Path
) -> None:
    """Blocks of sha256 are found, though the older release never searched them for non-finite numbers. Blocks of xxhash have
    other keys now."""
    with serving(tmp_path / "before", old, pool) as keeper:
        save(old, keeper, before)
    with serving(tmp_path / "now", new, pool) as keeper:
        assert keeper.metrics()["pillion_adopted_blocks_total"] == BLOCKS
        assert_kept(new, keeper, found, now)
        with connected(new, keeper, now) as engine:
            assert compute_and_save(engine, keeper, now)
        assert keeper.metrics()["pillion_not_finite_blocks_total"] == BLOCKS - found
