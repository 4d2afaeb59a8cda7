"""Sidecar and engine killed and frozen in the middle of transfers: every token stays right, no request is lost.

`--rounds 20 --first 1` plays rounds 1 to 20 of the seed: 21 to 40 are `--first 21`. Ten rounds, or `--life`, are one engine's
life, and the last is its death. With vLLM's batch-invariant kernels an answer does not depend on other requests, so every
answer under faults is compared with the undisturbed one.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_options
import pytest

from chaos import campaign, faults, figures, load
from testkit import engine, prompts, sidecar
from testkit.waiting import POLL_S

# Fewer than four requests need, so blocks are reused all the time; vLLM's limit with the model's 4,096 positions.
KV_BLOCKS = 130
BATCHED_TOKENS = 2048
# The prompts and their answers have 370 blocks, 230 MiB: the sidecar evicts.
DRAM = "192MiB"
# 15 to 40 MiB a load: at every fault some are being copied.
PREFIX_BLOCKS = (24, 32, 40, 48, 56, 64)
# Prompts with differing answers without a fault are left out, in so many tries.
STEADY_TRIES = 4
SHAPE: faults.Shape = "processes"
# A thawed sidecar with a permanently stuck batch ends itself within a second.
THAWED_S = 1.5


def plan(first: int, rounds: int, seed: int, of_a_life: int = faults.ROUNDS_OF_A_LIFE) -> list[faults.Life]:
    """Lives of so many rounds, each drawn from its own number, so each can be played alone."""
    lives = []
    last = first + rounds - 1
    for number in range((first - 1) // of_a_life, (last - 1) // of_a_life + 1):
        chance = random.Random(f"{seed} {number}")
        strikes = [*chance.sample(faults.DECK, of_a_life - 1), faults.ENGINE_KILL]
        begin = number * of_a_life + 1
        strikes = strikes[max(0, first - begin) : last - begin + 1]
        lives.append(faults.Life(SHAPE, chance.choice(faults.LOADS), "sidecar", strikes))
    return lives


class GpuCampaign(campaign.Campaign):
    """The campaign of the CPU engines, on a GPU."""

    def __init__(self, directory: Path, model: Path, seed: int, mode: gpu_options.Mode) -> None:
        self._mode = mode
        self._thawed = False
        super().__init__(directory, model, seed, PREFIX_BLOCKS)

    @contextlib.contextmanager
    def _engine(self, life: faults.Life, connected: bool = True) -> Iterator[engine.Engine]:
        self._engines += 1
        options = gpu_options.options(
            self._model,
            self._mode,
            self._directory / "pillion.sock" if connected else None,
            load=life.load,
            blocks=KV_BLOCKS,
            batched_tokens=BATCHED_TOKENS,
            max_requests=load.IN_FLIGHT,
            extra={"pillion.query_timeout_us": campaign.QUERY_BUDGET_US},
            # Read where vLLM is imported, too early for the engine's own settings.
            prefix=("env", "VLLM_BATCH_INVARIANT=1"),
        )
        # A scheduler with a clock would not be the asynchronous one.
        self._times().touch()
        with engine.running(options, self._directory / f"engine-{self._engines}.log") as running:
            warm = [prompts.prompt(tokens, seed=tokens) for tokens in (2500, 700, 333, 65)]
            running.generate(warm, max_tokens=load.OUTPUT_TOKENS)
            yield running

    def _start_sidecar(self, anonymous: bool) -> None:
        self._add_counters()
        self._sidecar = sidecar.Sidecar(self._directory, DRAM, self._pool, anonymous)
        self._sidecar.wait_ready()

    def _strike(self, fault: faults.Fault, life: faults.Life, running: engine.Engine, asking: load.Load) -> figures.Span:
        self._thawed = fault == "sidecar-freeze"
        span = super()._strike(fault, life, running, asking)
        # A run that is cut off has then shown results, too.
        wrong = sum(request.wrong_tokens + request.wrong_logprobs for request in asking.answered)
        campaign.say(f"{len(asking.answered)} answers compared so far, {wrong} wrong tokens and logprobs")
        return span

    def _wait_for_sessions(self, life: faults.Life, asking: load.Load) -> None:
        deadline = time.monotonic() + THAWED_S
        while self._thawed and time.monotonic() < deadline:
            if self.sidecar.ended():
                campaign.say("the sidecar ended itself after its thaw, and is started again")
                self._start_sidecar(anonymous=False)
                break
            time.sleep(POLL_S)
        super()._wait_for_sessions(life, asking)

    def _observe_undisturbed(self, shapes: list[faults.Shape]) -> None:
        if self._undisturbed:
            return
        with self._engine(faults.Life(SHAPE, "auto", "sidecar", []), connected=False) as running:
            self._right = [load.ask_alone(running, prompt)[0] for prompt in self._prompts]
            asking = self._steady(running)
            running.exit()
        waits = figures.typical_waits(asking.answered)
        added = figures.added_waits(asking.answered, waits)
        self._undisturbed[SHAPE] = campaign.Undisturbed(waits, added, figures.Stalls([], []))

    def _steady(self, running: engine.Engine) -> load.Load:
        """A load without faults and without a differing answer."""
        for _ in range(STEADY_TRIES):
            asking = load.Load(self._right, self._chance.randrange(1 << 30))
            asking.start(running)
            asking.wait_answered(campaign.UNDISTURBED_ANSWERS)
            asking.drain()
            unsteady = {request.prompt for request in asking.answered if request.wrong_tokens or request.wrong_logprobs}
            if not unsteady:
                return asking
            campaign.say(f"{len(unsteady)} of {len(self._right)} prompts have no steady answer and are left out")
            self._right = [right for number, right in enumerate(self._right) if number not in unsteady]
            assert len(self._right) >= len(self._prompts) // 3, "too few prompts have a steady answer to see a wrong one"
        raise AssertionError(f"no steady answers in {STEADY_TRIES} runs without faults")


@pytest.fixture(scope="module")
def chaos(request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GpuCampaign:
    """The right answers are asked for once."""
    mode = gpu_options.Mode(request.config.getoption("--runner"), request.config.getoption("--graphs"))
    return GpuCampaign(tmp_path_factory.mktemp("chaos"), gpu_model, request.config.getoption("--seed"), mode)


def test_no_fault_is_noticed(chaos: GpuCampaign, request: pytest.FixtureRequest) -> None:
    """Every token as without faults and without connector, every request answered, and hits at the end."""
    first, rounds = request.config.getoption("--first"), request.config.getoption("--rounds")
    found = chaos.run(plan(first, rounds, request.config.getoption("--seed"), request.config.getoption("--life")))
    print(
        f"rounds {first} to {first + rounds - 1}, longest added wait {found.max_added_wait_ms:.0f} ms\n{found.line()}",
        flush=True,
    )
    assert found.rounds == rounds
    assert found.requests > 0
    assert found.wrong_tokens == found.wrong_logprobs == found.lost == 0
    assert found.loaded_blocks > 0


def test_damage_is_noticed(chaos: GpuCampaign) -> None:
    """The negative control: one wrong K value in every kept block changes tokens."""
    assert chaos.run_damaged(SHAPE).wrong_tokens > 0


def test_rounds_can_be_played_in_parts() -> None:
    """A round's fault does not depend on the first round of a run."""
    whole = [fault for life in plan(1, 40, 7) for fault in life.faults]
    parts = [fault for first in (1, 8, 15, 22, 29, 36) for life in plan(first, min(7, 41 - first), 7) for fault in life.faults]
    assert len(whole) == 40
    assert parts == whole
