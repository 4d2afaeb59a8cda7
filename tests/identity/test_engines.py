"""The table of knobs with serving engines: one keeps a prompt, and another with the knob changed is asked it.

The answer must be the engine's own. Its hits show whether the knob makes another namespace. `make test` plays a part of the
table, `make identity` all of it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import asking, engine, sidecar
from testkit.asking import ask, keep, whole
from testkit.knobs import BASES, KNOBS, Knob, Models

EVERY = os.environ.get("EVERY_KNOB") == "1"
PLAYED = [knob for knob in KNOBS if not knob.never and (EVERY or knob.often)]
PROMPT = asking.prompt(360)
# A salt for a request without common blocks: its answer is computed.
ALONE = "alone"


class World:
    """A sidecar, and the base engines whose prompts it keeps."""

    def __init__(self, directory: Path, keeper: sidecar.Sidecar) -> None:
        self._directory, self._keeper = directory, keeper
        self._models = Models(directory)
        self._kept: set[str] = set()

    def hits(self, knob: Knob) -> int:
        """The engine with this knob is asked its base's prompt; its hit. Its answer must be its own."""
        if knob.base not in self._kept:
            base = BASES[knob.base]
            with engine.running(self._options(base), self._directory / f"{base.name}.log") as running:
                keep(self._keeper, running, PROMPT)
                running.exit()
            self._kept.add(knob.base)
        log = self._directory / f"{knob.name}.log"
        with engine.running(self._options(knob), log, until_served=not knob.refused) as running:
            own, none = ask(running, PROMPT, salt=ALONE + knob.name)
            assert none == 0
            tokens, hits = ask(running, PROMPT)
            running.exit()
        assert tokens == own
        return hits

    def _options(self, knob: Knob) -> engine.Options:
        return dataclasses.replace(self._models.options(knob), socket=self._keeper.socket)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world for this process: its engines start one after the other."""
    directory = tmp_path_factory.mktemp("world")
    with sidecar.serving(directory, dram="512MiB") as keeper:
        yield World(directory, keeper)


@pytest.mark.supports("ngram")
@pytest.mark.parametrize("knob", PLAYED, ids=lambda knob: knob.name)
def test_a_knob(knob: Knob, world: World) -> None:
    """A knob that changes KV gives no hit; a harmless one gives the whole hit."""
    hits = world.hits(knob)
    assert whole(hits) if knob.harmless else hits == 0, f"{hits} hits"
