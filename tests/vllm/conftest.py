"""The stage, with every release and every scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import stage as stages


@pytest.fixture(scope="session")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, stages.Player]]:
    """A process for each release; both import vLLM at the same time."""
    directory = tmp_path_factory.mktemp("players")
    started: dict[str, stages.Player] = {}
    with contextlib.ExitStack() as stack:
        for release in stages.RELEASES:
            started[release] = stages.Player(release, directory / f"{release}.log")
            stack.callback(started[release].end)
        yield started


@pytest.fixture(params=stages.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of vLLM."""
    return str(request.param)


@pytest.fixture(params=stages.SCHEDULERS)
def stage(request: pytest.FixtureRequest, release: str, players: dict[str, stages.Player], tmp_path: Path) -> stages.Stage:
    """Each release with each scheduler."""
    return stages.Stage(players[release], stages.SCHEDULERS[request.param], tmp_path)
