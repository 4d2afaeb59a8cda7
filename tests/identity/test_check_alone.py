"""The standing check alone, with facts, samples and adapters' digests taken away: it finds wrong KV by the second hit.

An engine keeps three prompts. Another one with other KV of them is asked them in turn, and computes all of the third.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import adapter, asking, engine, model, prompts, sidecar, weights
from testkit.asking import CHECKING, again, ask, keep

ASKED = [asking.prompt(seed) for seed in (400, 401, 402)]
BLIND = {"PILLION_TEST_BLIND": "1"}


@dataclasses.dataclass
class World:
    """A sidecar, and engines with one namespace."""

    directory: Path
    keeper: sidecar.Sidecar

    def options(self, **more: Any) -> engine.Options:
        """Options of an engine with the tiny model; an existing model stays as it is."""
        directory = model.write(self.directory / "model")
        usual = engine.Options(
            directory, self.keeper.socket, batched_tokens=prompts.STEP_TOKENS, variables=BLIND, extra=CHECKING
        )
        return dataclasses.replace(usual, **more)

    def kept_by(self, options: engine.Options, **more: Any) -> None:
        """An engine computes the prompts."""
        with engine.running(options, self.directory / "keeps.log") as running:
            for prompt in ASKED:
                keep(self.keeper, running, prompt, **more)
            running.exit()

    def found_by(
        self,
        options: engine.Options,
        right: list[list[int]],
        change: Callable[[engine.Engine], None] | None = None,
        **more: Any,
    ) -> None:
        """An engine with other KV is asked the prompts, and found by a check."""
        with engine.running(options, self.directory / "asks.log") as running:
            if change:
                change(running)
            hits = []
            for prompt, own in zip(ASKED, right, strict=True):
                tokens, hit = ask(running, prompt, **more)
                hits.append(hit)
                if hit == 0:
                    assert tokens == own
            assert hits[0] > 0, "nothing but the check was to tell them apart"
            assert hits[2] == 0, hits
            for prompt, own in zip(ASKED, right, strict=True):
                assert again(running, prompt, **more) == (own, 0)
            running.exit()
        assert self.keeper.metrics()["pillion_checks_differing_total"] >= 1
        assert "differs from the kept KV" in (self.directory / "asks.log").read_text()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world for this test alone."""
    with sidecar.serving(tmp_path) as keeper:
        yield World(tmp_path, keeper)


def test_another_configuration(world: World) -> None:
    """rope_theta edited in place."""
    options = world.options()
    world.kept_by(options)
    path = options.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5000.0}))
    world.found_by(options, asking.right(options, world.directory / "plain.log", *ASKED))


def test_other_weights(world: World) -> None:
    """One tensor under one name."""
    world.kept_by(world.options())
    changed = weights.changed(world.options().model, world.directory / "changed", weights.one_tensor)
    options = world.options(model=changed)
    world.found_by(options, asking.right(options, world.directory / "plain.log", *ASKED))


def test_weights_changed_in_place(world: World) -> None:
    """Under a running engine, and then a reset."""
    world.kept_by(world.options())
    changed = weights.changed(world.options().model, world.directory / "changed", weights.norms)
    right = asking.right(world.options(model=changed), world.directory / "plain.log", *ASKED)

    def change(running: engine.Engine) -> None:
        running.alter(weights.scale_norms)
        assert running.reset_prefix_cache()

    world.found_by(world.options(), right, change)


def test_an_overwritten_adapter(world: World) -> None:
    """Other bytes at its path."""
    options = world.options(arguments=dict(adapter.ARGUMENTS))
    path = world.directory / "adapter"
    asked = adapter.asked(adapter.write(path, seed=1))
    world.kept_by(options, lora=asked)
    adapter.write(path, seed=2)
    right = asking.right(options, world.directory / "plain.log", *ASKED, lora=asked)
    world.found_by(options, right, lora=asked)
