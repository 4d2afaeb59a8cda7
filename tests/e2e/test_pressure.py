"""Too few KV blocks, and clients that disconnect: preemption, resumption, aborts with copies in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from testkit import engine, prompts, sidecar

# Three requests of 7 blocks that grow to 10 each, in 24 blocks less vLLM's null block: vLLM must preempt one.
FEW_BLOCKS = 24
SQUEEZED = [prompts.prompt(200, seed=seed) for seed in (201, 202, 203)]
SQUEEZED_OUTPUT_TOKENS = 96
ABORTED = [prompts.prompt(320, seed=seed) for seed in (211, 212)]
NEARLY_ALL = prompts.prompt(640, seed=213)
OUTPUT_TOKENS = 8


@pytest.fixture(
    scope="module",
    params=[pytest.param(copy, marks=pytest.mark.xdist_group(f"squeezed-{copy}")) for copy in ("engine", "sidecar")],
)
def squeezed(
    request: pytest.FixtureRequest, options: engine.Options, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[engine.Engine, sidecar.Sidecar]]:
    """An engine with few blocks."""
    directory = tmp_path_factory.mktemp(f"squeezed-{request.param}")
    with sidecar.serving(directory) as keeper:
        few = dataclasses.replace(options, socket=keeper.socket, copy=request.param, blocks=FEW_BLOCKS)
        with engine.running(few, directory / "engine.log") as running:
            yield running, keeper
            running.exit()


def _right_answers(plain: engine.Engine, asked: list[list[int]], output_tokens: int) -> list[list[int]]:
    assert plain.reset_prefix_cache()
    return [plain.generate([tokens], max_tokens=output_tokens)[0]["tokens"] for tokens in asked]


@pytest.mark.supports("preemption")
def test_preempted_and_resumed(squeezed: tuple[engine.Engine, sidecar.Sidecar], plain: engine.Engine) -> None:
    """A preempted request is resumed from the cache, and its tokens are right."""
    running, keeper = squeezed
    right = _right_answers(plain, SQUEEZED, SQUEEZED_OUTPUT_TOKENS)
    before = running.metrics()
    answers = running.generate(SQUEEZED, max_tokens=SQUEEZED_OUTPUT_TOKENS)
    assert [answer["tokens"] for answer in answers] == right
    after = running.metrics()
    assert after["preemptions"] > before["preemptions"]
    # vLLM's hit counter leaves out preempted requests; Pillion's counter shows their loads from the cache.
    assert after["external_hits"] == before["external_hits"]
    loaded = keeper.metrics()["pillion_loaded_bytes_total"]
    assert loaded > 0
    assert loaded % prompts.BLOCK_BYTES == 0
    assert keeper.metrics()["pillion_load_failures_total"] == 0


@pytest.mark.supports("preemption")
def test_aborted_with_saves_and_loads_in_flight(squeezed: tuple[engine.Engine, sidecar.Sidecar], plain: engine.Engine) -> None:
    """Aborts at every early step: cold (saves in flight), then warm (loads in flight); nothing leaks."""
    running, keeper = squeezed
    right = _right_answers(plain, ABORTED, OUTPUT_TOKENS)
    for steps in (0, 1, 2, 3):
        running.reset_prefix_cache()
        aborted, answered = running.generate(ABORTED, max_tokens=OUTPUT_TOKENS, abort_after_steps={"0": steps})
        assert aborted["aborted"]
        assert answered["tokens"] == right[1]
    # Every block is free again: a prompt of nearly all blocks is answered, and hits when asked again.
    right = _right_answers(plain, [NEARLY_ALL], OUTPUT_TOKENS)
    for hit_tokens in (0, prompts.hit_tokens(len(NEARLY_ALL))):
        assert running.reset_prefix_cache()
        before = running.metrics()["external_hits"]
        saved = keeper.metrics()["pillion_saved_bytes_total"]
        answer = running.generate([NEARLY_ALL], max_tokens=OUTPUT_TOKENS)[0]
        assert answer["tokens"] == right[0]
        assert running.metrics()["external_hits"] - before == hit_tokens
        if not hit_tokens:
            blocks = prompts.stored_blocks(len(NEARLY_ALL), OUTPUT_TOKENS)
            keeper.wait_metric("pillion_saved_bytes_total", saved + blocks * prompts.BLOCK_BYTES)


def test_shared_prefix_asked_at_once(squeezed: tuple[engine.Engine, sidecar.Sidecar], plain: engine.Engine) -> None:
    """Two requests load the same blocks in one step, under pressure."""
    running, _ = squeezed
    shared = prompts.prompt(256, seed=221)
    asked = [[*shared, *prompts.prompt(40, seed=seed)] for seed in (222, 223)]
    right = _right_answers(plain, asked, OUTPUT_TOKENS)
    for _ in range(2):
        assert running.reset_prefix_cache()
        answers = running.generate(asked, max_tokens=OUTPUT_TOKENS)
        assert [answer["tokens"] for answer in answers] == right
