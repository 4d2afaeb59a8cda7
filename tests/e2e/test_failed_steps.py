"""Failed steps, and blocks listed by vLLM though no step filled them: none of these blocks is kept, and the engine goes on.

`tests/gpu/test_steps.py` plays the same on a GPU, with either model runner.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import engine, prompts, sidecar, weights
from testkit.child import python_path
from testkit.transfer import TO_ANSWER, TO_COMPUTE
from testkit.waiting import Failed

# The tests of this file share their engines.
pytestmark = pytest.mark.xdist_group("steps")

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
OUTPUT_TOKENS = 8
PATIENCE_S = 120
# The failures of steps: see `failing_engine`. A prompt has three steps, and the second fails.
KINDS = ("prepare", "layer", "output")
FAILING = {kind: prompts.prompt(3 * prompts.STEP_TOKENS - 60, seed=900 + number) for number, kind in enumerate(KINDS)}
# Later prompts: longer ones, with the failed prompts as their beginnings.
LONGER = {kind: tokens + prompts.prompt(100, seed=920 + number) for number, (kind, tokens) in enumerate(FAILING.items())}
HEALTHY = [prompts.prompt(tokens, seed=940 + tokens) for tokens in (150, 420, 700)]
HIT_SHARE_MIN = 0.95

Answer = dict[str, Any]


def _ask(running: engine.Engine, tokens: list[int]) -> Answer:
    return running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


def _same(one: Answer, other: Answer) -> bool:
    """True if tokens and logprobs are equal to the bit."""
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def _right(plain: engine.Engine, tokens: list[int]) -> tuple[Answer, Answer]:
    """The answers of vLLM alone: computed, and upon its own blocks."""
    assert plain.reset_prefix_cache()
    return _ask(plain, tokens), _ask(plain, tokens)


@dataclasses.dataclass
class Scene:
    """An engine after failed steps, and the sidecar with the blocks of its accepted steps."""

    options: engine.Options
    keeper: sidecar.Sidecar
    unaccepted: int


def _options(options: engine.Options, keeper: sidecar.Sidecar) -> engine.Options:
    """Options of an engine whose driver fails steps."""
    path = os.pathsep.join([str(GPU_TESTS), python_path()["PYTHONPATH"]])
    return dataclasses.replace(
        options, socket=keeper.socket, batched_tokens=prompts.STEP_TOKENS, prefix=("env", f"PYTHONPATH={path}")
    )


def _fail_and_go_on(options: engine.Options, keeper: sidecar.Sidecar, log: Path, accepts: bool) -> int:
    """Plays each kind of failure, each followed by a healthy prompt; the number of steps without acceptance, counted by the
    engine."""
    driver, engine.DRIVER = engine.DRIVER, "failing_engine"
    try:
        running = engine.Engine(options, log)
    finally:
        engine.DRIVER = driver
    try:
        running.wait_started().wait_served()
        if accepts:
            running.command("accept_failed")
        for kind, healthy in zip(KINDS, HEALTHY, strict=True):
            running.command("fail", kind=kind, after=1)
            assert _ask(running, FAILING[kind])["finish_reason"] is None, "vLLM aborts the request of a failed step"
            assert running.command("failed")["struck"]
            _ask(running, healthy)
            # A prompt upon the failed step's blocks in vLLM's own cache.
            _ask(running, LONGER[kind])
        blocks = sum(len(tokens) // engine.BLOCK_TOKENS for tokens in HEALTHY)
        keeper.wait_metric("pillion_saved_blocks_total", blocks)
        return int(running.command("counter", metric="vllm:pillion_unaccepted_steps"))
    finally:
        running.kill()


@pytest.fixture(scope="module")
def scene(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """An engine after the three failures."""
    directory = tmp_path_factory.mktemp("steps")
    with sidecar.serving(directory) as keeper:
        unaccepted = _fail_and_go_on(_options(options, keeper), keeper, directory / "failing.log", accepts=False)
        yield Scene(options, keeper, unaccepted)


@pytest.mark.supports("failed-steps")
def test_nothing_of_a_failed_step_is_kept(scene: Scene, plain: engine.Engine, tmp_path: Path) -> None:
    """Another engine computes the failed prompts, and hits all healthy ones: the first engine saved again after each
    failure."""
    assert scene.unaccepted == len(KINDS)
    fresh = dataclasses.replace(scene.options, socket=scene.keeper.socket, batched_tokens=prompts.STEP_TOKENS)
    found = wanted = 0
    with engine.running(fresh, tmp_path / "fresh.log") as running:
        for kind in KINDS:
            answer = _ask(running, LONGER[kind])
            assert answer["cached_tokens"] <= prompts.STEP_TOKENS, f"{kind}: blocks behind the step that failed"
            assert answer["tokens"] == _right(plain, LONGER[kind])[0]["tokens"]
        for tokens in HEALTHY:
            answer = _ask(running, tokens)
            assert _same(answer, _right(plain, tokens)[1])
            found, wanted = found + answer["cached_tokens"], wanted + prompts.hit_tokens(len(tokens))
        running.exit()
    assert found >= HIT_SHARE_MIN * wanted


def test_a_failed_step_that_counts_as_accepted_is_noticed(
    options: engine.Options, plain: engine.Engine, tmp_path: Path
) -> None:
    """The control: without acceptance another engine answers from wrong KV."""
    with sidecar.serving(tmp_path) as keeper:
        _fail_and_go_on(_options(options, keeper), keeper, tmp_path / "failing.log", accepts=True)
        fresh = dataclasses.replace(options, socket=keeper.socket, batched_tokens=prompts.STEP_TOKENS)
        with engine.running(fresh, tmp_path / "fresh.log") as running:
            wrong = [_ask(running, LONGER[kind])["tokens"] != _right(plain, LONGER[kind])[0]["tokens"] for kind in KINDS]
            running.exit()
    assert any(wrong)


@pytest.mark.supports("failed-steps", "handover")
def test_a_failed_step_is_not_handed_over(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """D computes the prompt of P's failed step, while P is still asked to compute it."""
    tokens = prompts.prompt(3 * prompts.STEP_TOKENS - 60, seed=960)
    with sidecar.serving(tmp_path) as keeper:
        computing = dataclasses.replace(_options(options, keeper), copy="sidecar")
        driver, engine.DRIVER = engine.DRIVER, "failing_engine"
        p = engine.Engine(computing, tmp_path / "p.log")
        engine.DRIVER = driver
        answering = dataclasses.replace(computing, prefix=())
        with engine.running(answering, tmp_path / "d.log") as d:
            try:
                p.wait_started().wait_served()
                p.command("fail", kind="output", after=1)
                d.ask(1, tokens, OUTPUT_TOKENS, transfer=TO_ANSWER)
                p.ask(1, tokens, 1, transfer=TO_COMPUTE)
                [answer] = d.answered(PATIENCE_S)
                assert p.command("failed")["struck"]
            finally:
                p.kill()
            d.exit()
    assert answer["cached_tokens"] <= prompts.STEP_TOKENS
    assert answer["tokens"] == _right(plain, tokens)[0]["tokens"]


@pytest.mark.supports("failed-steps")
def test_a_fault_that_ends_an_engine_ends_no_other(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """NaN in one step's logits ends vLLM: the next engine computes the prompt."""
    tokens = HEALTHY[1]
    strict = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1", "VLLM_RAISE_ON_LOGIT_NANS": "1"}
    with sidecar.serving(tmp_path) as keeper:
        checking = dataclasses.replace(
            options, socket=keeper.socket, batched_tokens=prompts.STEP_TOKENS, variables=options.variables | strict
        )
        with engine.running(checking, tmp_path / "faulty.log") as running:
            running.alter(weights.break_a_layer)
            with pytest.raises(Failed):
                _ask(running, tokens)
        with engine.running(checking, tmp_path / "healthy.log") as running:
            answer = _ask(running, tokens)
            assert answer["cached_tokens"] == 0
            assert answer["tokens"] == _right(plain, tokens)[0]["tokens"]
            running.exit()


@pytest.mark.supports("failed-steps")
def test_nan_is_kept_for_nobody(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """vLLM answers with NaN in a layer and goes on: no block of the prompt is kept, and the next engine computes it."""
    tokens = HEALTHY[1]
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, socket=keeper.socket, batched_tokens=prompts.STEP_TOKENS)
        with engine.running(connected, tmp_path / "faulty.log") as running:
            running.alter(weights.break_a_layer)
            _ask(running, tokens)
            keeper.wait_metric("pillion_not_finite_blocks_total", prompts.stored_blocks(len(tokens), 1))
            assert keeper.metrics()["pillion_blocks"] == 0
            running.kill()
        assert "non-finite numbers" in keeper.log.read_text()
        with engine.running(connected, tmp_path / "healthy.log") as running:
            answer = _ask(running, tokens)
            assert answer["cached_tokens"] == 0
            assert answer["tokens"] == _right(plain, tokens)[0]["tokens"]
            assert running.reset_prefix_cache()
            keeper.wait_metric("pillion_blocks", prompts.stored_blocks(len(tokens), 1))
            assert _ask(running, tokens)["cached_tokens"] == prompts.hit_tokens(len(tokens))
            running.exit()


@pytest.mark.supports("priority")
def test_a_block_that_vllm_lists_and_no_step_filled(options: engine.Options, tmp_path: Path) -> None:
    """A request is preempted in the schedule() call of its listed blocks: vLLM computes upon them, and they are not kept."""
    running_prompt, urgent = prompts.prompt(300, seed=31), prompts.prompt(63, seed=32)
    other = running_prompt[:290] + prompts.prompt(30, seed=55)
    # Blocks for all of one prompt and most of the other.
    squeezed = {
        "scheduling_policy": "priority",
        "max_model_len": 384,
        "num_gpu_blocks_override": 13,
        "max_num_batched_tokens": 128,
        "long_prefill_token_threshold": 64,
    }
    few = dataclasses.replace(options, dtype="float32", arguments=squeezed)
    with engine.running(few, tmp_path / "plain.log") as alone:
        right = {}
        for name, tokens in (("running", running_prompt), ("other", other)):
            right[name] = _ask(alone, tokens)["tokens"]
            assert alone.reset_prefix_cache()
        alone.exit()
    with sidecar.serving(tmp_path) as keeper:
        kept = dataclasses.replace(few, socket=keeper.socket)
        sampling = {"max_tokens": OUTPUT_TOKENS, "logprobs": 0}
        with engine.running(kept, tmp_path / "squeezed.log") as running:
            running.command("squeeze", running=running_prompt, urgent=urgent, sampling=sampling)
            # A prompt upon the blocks listed since then.
            _ask(running, other)
            assert running.command("counter", metric="vllm:pillion_unproven_blocks") > 0, (
                "nothing was listed without a step to fill it"
            )
            running.exit()
        with engine.running(kept, tmp_path / "fresh.log") as running:
            assert _ask(running, running_prompt)["tokens"] == right["running"]
            assert _ask(running, other)["tokens"] == right["other"]
            running.exit()
