"""vLLM's sleep mode on a GPU: its KV memory is freed and allocated again; kept blocks hit again, and no lost block does.

Sleep mode's memory cannot be shared with another process, so the engine copies for itself. vLLM 0.33 says when that must end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_options
import pytest
from gpu_options import SHAPE, Mode

from pillion import vllm_compat
from testkit import engine, prompts, sidecar

OUTPUT_TOKENS = 8
BLOCK_BYTES = engine.BLOCK_TOKENS * SHAPE.kv_bytes_per_token()
PROMPT = prompts.prompt(2990, seed=21)
HIT = prompts.hit_tokens(len(PROMPT))
# Prompts with saves under way at the sleep.
LATE = [prompts.prompt(1500, seed=seed) for seed in (22, 23, 24)]
# The limit of logprobs: other rounding moves one by less, other KV by more.
NEAR = 0.1
MODES = [Mode(1, graphs=False, copy="auto"), Mode(2, graphs=True, copy="auto")]


@dataclasses.dataclass
class Asleep:
    """An engine with sleep mode, its sidecar, and its own local hit."""

    keeper: sidecar.Sidecar
    engine: engine.Engine
    local: dict[str, Any]
    log: Path

    def ask(self, hit: int) -> dict[str, Any]:
        """The answer to the prompt, with so many tokens from the sidecar."""
        before = self.engine.metrics()["external_hits"]
        (answer,) = self.engine.generate([PROMPT], max_tokens=OUTPUT_TOKENS)
        assert self.engine.metrics()["external_hits"] - before == hit
        return answer

    def expect_hit(self) -> None:
        """The prompt comes from the sidecar alone. The answer equals the engine's own hit, bit for bit."""
        answer = self.ask(HIT)
        assert answer["cached_tokens"] == HIT
        assert (answer["tokens"], answer["logprobs"]) == (self.local["tokens"], self.local["logprobs"])


@pytest.fixture(scope="class", params=MODES, ids=str)
def asleep(request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asleep]:
    """An engine after its saves of the prompt."""
    if not vllm_compat.tells_of_sleep():
        pytest.skip("SKIPPED: this vLLM does not tell connectors of a sleep")
    directory = tmp_path_factory.mktemp("sleep")
    with sidecar.serving(directory, "1GiB") as keeper:
        options = gpu_options.options(gpu_model, request.param, keeper.socket)
        options = dataclasses.replace(options, arguments=options.arguments | {"enable_sleep_mode": True})
        with engine.running(options, directory / "engine.log") as running:
            cold, local = (running.generate([PROMPT], max_tokens=OUTPUT_TOKENS)[0] for _ in range(2))
            assert local["cached_tokens"] == HIT and running.metrics()["external_hits"] == 0
            stored = prompts.different_blocks([(PROMPT, answer["tokens"]) for answer in (cold, local)])
            keeper.wait_metric("pillion_saved_bytes_total", stored * BLOCK_BYTES)
            yield Asleep(keeper, running, local, directory / "engine.log")
            running.exit()


@pytest.mark.supports("sleep")
class TestSleep:
    """The tests of one mode, in this order."""

    def test_the_engine_copies(self, asleep: Asleep) -> None:
        """The sidecar cannot reach the memory."""
        log = asleep.log.read_text()
        assert "the engine copies its blocks itself" in log and "STAYS OUT" not in log

    def test_what_is_kept_hits_after_a_sleep(self, asleep: Asleep) -> None:
        """The prompt hits after each of two sleeps."""
        for _ in range(2):
            asleep.engine.sleep(1)
            asleep.engine.wake_up()
            asleep.expect_hit()

    def test_what_was_being_saved_is_not_kept_wrong(self, asleep: Asleep) -> None:
        """An interrupted save gives nothing, and earlier saves are right."""

        def first_logprobs() -> list[dict[str, float]]:
            return [asleep.engine.generate([tokens], max_tokens=1)[0]["logprobs"][0] for tokens in LATE]

        right = first_logprobs()
        asleep.engine.sleep(1)
        asleep.engine.wake_up()
        again = first_logprobs()
        asleep.keeper.wait_for(asleep.engine.reset_prefix_cache, "reset of the engine's own cache")
        for answers in (again, first_logprobs()):
            for answer, wanted in zip(answers, right, strict=True):
                both = answer.keys() & wanted.keys()
                # Hits of other lengths have other step sizes, and round otherwise.
                assert both and all(abs(answer[token] - wanted[token]) < NEAR for token in both)

    def test_without_its_weights_it_finds_nothing(self, asleep: Asleep) -> None:
        """Sleep level 2 drops the weights. Until they are loaded again the engine computes other KV, without hits."""
        asleep.engine.sleep(2)
        asleep.engine.wake_up()
        asleep.ask(0)
        asleep.engine.rpc("reload_weights")
        asleep.keeper.wait_for(asleep.engine.reset_prefix_cache, "reset of the engine's own cache")
        asleep.expect_hit()
