"""candle, an engine in Rust, decodes on vLLM's KV and vLLM on candle's, in float32; a wrong candle is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from pillion.engine import Engine, Namespace
from testkit import decoding, engine, model, prompts, sidecar
from testkit.candle import EXAMPLE, build, equal, told
from testkit.decoding import EQUAL_MAX, HITS, KEPT, PROMPTS, TOKENS, Prefilled, ask, assert_alike

# The prompts are prefilled once, and candle is built once.
pytestmark = pytest.mark.xdist_group("candle")

# Two log probabilities in float32.
DIFFERENCE_MAX = 5e-3
GLUE_LINES_MAX = 40


@pytest.fixture(scope="session")
def candle() -> Path:
    """The example's binary."""
    return build()


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefilled]:
    """A sidecar with vLLM's blocks."""
    directory = tmp_path_factory.mktemp("prefilled")
    with decoding.prefilled(directory, model.write(directory / "model"), dtype="float32") as known:
        yield known


def test_the_glue_is_short_and_has_no_key_block_or_plan() -> None:
    """All lines of the file but comments and empty ones."""
    lines = [line.strip() for line in (EXAMPLE / "candle_decode.rs").read_text().splitlines()]
    glue = [line for line in lines if line and not line.startswith("//")]
    assert len(glue) <= GLUE_LINES_MAX
    assert not any(word in line for line in glue for word in ("hash", "plan", "block", "connector_shim", "shm_protocol"))


@pytest.mark.supports("decoders")
def test_candle_decodes_what_vllm_prefilled(prefilled: Prefilled, candle: Path) -> None:
    """Every possible block is loaded, and every token is right."""
    found = told(candle, prefilled.keeper.socket, prefilled.options.model, PROMPTS)
    assert (equal(found["answers"], prefilled.right), sum(found["loaded"])) == (TOKENS, HITS), found


def test_on_damaged_kv_few_tokens_are_right(prefilled: Prefilled, candle: Path, tmp_path: Path) -> None:
    """The control: all but the first block of each prompt is zeroed. Candle refuses a wrong first block."""
    [known] = prefilled.keeper.namespaces()
    found = Namespace(known["namespace"], known["facts"], known["block_bytes"])
    with sidecar.serving(tmp_path) as keeper:
        own = dataclasses.replace(found, digest="")
        with (
            Engine(prefilled.keeper.socket, "reads", found, 256, check_every=0) as reads,
            Engine(keeper.socket, "damages", own, 256, check_every=0) as damages,
        ):
            for number, tokens in enumerate(PROMPTS):
                with reads.load(tokens) as right, damages.load(tokens[:1]) as wrong:
                    k, v = (numpy.array(part) for part in reads.read(right))
                    first = 0 if number == len(PROMPTS) - 1 else found.tokens
                    k[:, :, first:], v[:, :, first:] = 0, 0
                    damages.save(wrong, tokens[: right.held], k, v)
        got = told(candle, keeper.socket, prefilled.options.model, PROMPTS[:-1])
        assert sum(got["loaded"]) == HITS - prompts.hit_tokens(len(PROMPTS[-1]))
        assert equal(got["answers"], prefilled.right[:-1]) <= EQUAL_MAX
        refused = told(candle, keeper.socket, prefilled.options.model, PROMPTS[-1:])
        assert "the namespace is closed to it" in refused["error"]


@pytest.mark.supports("decoders")
def test_vllm_decodes_what_candle_prefilled(prefilled: Prefilled, candle: Path, tmp_path: Path) -> None:
    """Candle proves itself by a prompt of vLLM. A candle with one matrix 5 % off keeps nothing."""
    shared = prompts.prompt(40, seed=3)
    with (
        sidecar.serving(tmp_path) as keeper,
        engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running,
    ):
        weights = prefilled.options.model
        ask(running, [shared])
        before = keeper.metrics()["pillion_saved_blocks_total"]
        refused = told(candle, keeper.socket, weights, [shared, *PROMPTS], damage=1.05)
        assert "the namespace is closed to it" in refused["error"]
        assert keeper.metrics()["pillion_saved_blocks_total"] == before
        found = told(candle, keeper.socket, weights, [shared, *PROMPTS])
        assert equal(found["answers"][1:], prefilled.right) == TOKENS and sum(found["loaded"][1:]) == 0
        assert sum(found["kept"][1:]) == KEPT
        assert_alike(ask(running, PROMPTS), prefilled.right, DIFFERENCE_MAX)
        assert running.metrics()["external_hits"] == HITS
        running.exit()


def test_after_a_restart_of_sidecar_and_engines(prefilled: Prefilled, candle: Path, tmp_path: Path) -> None:
    """The next vLLM has answered a prompt of its own: it alone states the facts to the next sidecar of the pool.

    This is the last test here: it kills the sidecar of the others.
    """
    prefilled.keeper.wait_summed()
    prefilled.keeper.kill()
    with sidecar.serving(tmp_path, pool=prefilled.keeper.pool) as again:
        refused = told(candle, again.socket, prefilled.options.model, PROMPTS)
        assert "let vLLM answer one prompt first" in refused["error"]
        options = dataclasses.replace(prefilled.options, socket=again.socket)
        with engine.running(options, tmp_path / "engine.log") as running:
            ask(running, [prompts.prompt(40, seed=3)])
            found = told(candle, again.socket, prefilled.options.model, PROMPTS)
            running.exit()
        assert (equal(found["answers"], prefilled.right), sum(found["loaded"])) == (TOKENS, HITS), found
