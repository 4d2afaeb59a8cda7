"""The stage, with every release and every scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stage as scripted


@pytest.fixture(scope="session")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, scripted.Player]]:
    """A process for each release; both import vLLM at the same time."""
    directory = tmp_path_factory.mktemp("players")
    started = {release: scripted.Player(release, directory / f"{release}.log") for release in scripted.RELEASES}
    yield started
    for player in started.values():
        player.end()


@pytest.fixture(params=scripted.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of vLLM."""
    return str(request.param)


@pytest.fixture(params=scripted.SCHEDULERS)
def stage(request: pytest.FixtureRequest, release: str, players: dict[str, scripted.Player], tmp_path: Path) -> scripted.Stage:
    """Each release with each scheduler."""
    return scripted.Stage(players[release], scripted.SCHEDULERS[request.param], tmp_path)
