"""The stage, with every release and every scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stage as stages


def pytest_itemcollected(item: pytest.Function) -> None:
    """The tests of a release and a scheduler are one group: its process imports vLLM once."""
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    if scheduler := chosen.get("stage") or chosen.get("scheduler"):
        item.add_marker(pytest.mark.xdist_group(f"{chosen['release']}-{scheduler}"))


@pytest.fixture(scope="session")
def player_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], stages.Player]]:
    """Starts the process of a release at its first call."""
    directory = tmp_path_factory.mktemp("players")
    started: dict[str, stages.Player] = {}
    with contextlib.ExitStack() as stack:

        def player_of(release: str) -> stages.Player:
            if release not in started:
                started[release] = stages.Player(release, directory / f"{release}.log")
                stack.callback(started[release].end)
            return started[release]

        yield player_of


@pytest.fixture
def remedy(request: pytest.FixtureRequest) -> str:
    """The remedy of the test's refusal: see scripts/support."""
    mark = request.node.get_closest_marker("refuses")
    return str(mark.args[1])


@pytest.fixture(params=stages.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of vLLM."""
    return str(request.param)


@pytest.fixture(params=stages.SCHEDULERS)
def stage(
    request: pytest.FixtureRequest, release: str, player_of: Callable[[str], stages.Player], tmp_path: Path
) -> stages.Stage:
    """Runs the test with each release and each scheduler."""
    return stages.Stage(player_of(release), stages.SCHEDULERS[request.param], tmp_path)
