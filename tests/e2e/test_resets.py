"""Weights that change under a running engine: blocks of the old weights are no hit with the new ones, and the reverse.

Equal weights are one namespace, in whichever way an engine got them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import asking, engine, prompts, sidecar, weights
from testkit.asking import CHECKING, ask, keep, whole

# The tests of this file share the model of other weights.
pytestmark = pytest.mark.xdist_group("resets")

FIRST, SECOND, THIRD = (asking.prompt(seed) for seed in (300, 301, 302))


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model, and the answers of vLLM alone to each prompt."""

    model: Path
    right: list[list[int]]


@pytest.fixture(scope="module")
def connected(options: engine.Options) -> engine.Options:
    """An engine whose namespace differs by its live sample alone."""
    return dataclasses.replace(options, batched_tokens=prompts.STEP_TOKENS, extra={"pillion.model_id": "tiny"} | CHECKING)


@pytest.fixture(scope="module")
def old(connected: engine.Options, plain: engine.Engine) -> Weights:
    """The weights at an engine's start."""
    assert plain.reset_prefix_cache()
    return Weights(connected.model, [ask(plain, asked)[0] for asked in (FIRST, SECOND, THIRD)])


@pytest.fixture(scope="module")
def new(connected: engine.Options, old: Weights, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights after the change: other norms."""
    directory = tmp_path_factory.mktemp("new")
    changed = weights.changed(connected.model, directory / "model", weights.norms)
    log = directory / "plain.log"
    right = asking.right(dataclasses.replace(connected, model=changed), log, FIRST, SECOND, THIRD)
    assert all(one != other for one, other in zip(right, old.right, strict=True)), "the weights differ where it shows"
    return Weights(changed, right)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[sidecar.Sidecar]:
    """A sidecar for this test alone."""
    with sidecar.serving(tmp_path) as keeper:
        yield keeper


@pytest.mark.supports("new-weights")
def test_a_reset_after_a_change_in_place(
    connected: engine.Options, old: Weights, new: Weights, keeper: sidecar.Sidecar, tmp_path: Path
) -> None:
    """As an RL trainer in the engine's process does: other weights, then vLLM's reset. With the old weights again, the old
    blocks hit."""
    trained = dataclasses.replace(connected, socket=keeper.socket)
    with engine.running(trained, tmp_path / "trained.log") as running:
        assert keep(keeper, running, FIRST)[0] == old.right[0]
        for connector_too in (False, True):
            assert running.reset_prefix_cache(connector_too)
            tokens, hits = ask(running, FIRST)
            assert tokens == old.right[0]
            assert whole(hits), f"reset of equal weights: {hits} hits"
        running.alter(weights.scale_norms)
        assert running.reset_prefix_cache()
        assert keep(keeper, running, FIRST) == (new.right[0], 0)
        assert running.reset_prefix_cache()
        tokens, hits = ask(running, FIRST)
        assert tokens == new.right[0]
        assert whole(hits), f"the blocks of the new weights: {hits} hits"
        assert keep(keeper, running, SECOND)[0] == new.right[1]
        running.alter(weights.unscale_norms)
        assert running.reset_prefix_cache()
        tokens, hits = ask(running, FIRST)
        assert tokens == old.right[0]
        assert whole(hits), f"the blocks of the old weights: {hits} hits"
        running.exit()
    # An engine with the old weights hits no block of the new ones; an engine with the new weights hits them all.
    with engine.running(trained, tmp_path / "old.log") as running:
        assert ask(running, SECOND) == (old.right[1], 0)
        tokens, hits = ask(running, FIRST)
        assert tokens == old.right[0]
        assert whole(hits)
        running.exit()
    with engine.running(dataclasses.replace(trained, model=new.model), tmp_path / "new.log") as running:
        tokens, hits = ask(running, SECOND)
        assert tokens == new.right[1]
        assert whole(hits), f"the same weights from a file: {hits} hits"
        running.exit()


@pytest.mark.supports("new-weights")
def test_reloaded_weights_without_a_reset(
    connected: engine.Options, old: Weights, new: Weights, keeper: sidecar.Sidecar, tmp_path: Path
) -> None:
    """vLLM resets nothing when its weights are reloaded: prompts that are new to this engine are still answered rightly."""
    reloaded = dataclasses.replace(connected, socket=keeper.socket)
    with engine.running(reloaded, tmp_path / "keeps.log") as running:
        for asked, right in zip((FIRST, SECOND, THIRD), old.right, strict=True):
            assert keep(keeper, running, asked)[0] == right
        running.exit()
    with engine.running(reloaded, tmp_path / "reloaded.log") as running:
        tokens, hits = ask(running, FIRST)
        assert tokens == old.right[0]
        assert whole(hits)
        # The prompt hits neither before the rank has sent the sample of its present weights.
        running.rpc("reload_weights", until_served=False, weights_path=str(new.model))
        assert ask(running, SECOND) == (new.right[1], 0)
        running.rpc("reload_weights", weights_path=str(old.model))
        running.wait_served()
        tokens, hits = ask(running, THIRD)
        assert tokens == old.right[2]
        assert whole(hits), f"the weights of before: {hits} hits"
        running.exit()
