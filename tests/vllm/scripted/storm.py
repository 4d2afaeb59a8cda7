"""Random arrivals, aborts, resets, faults and frozen sidecars, from a seed; every answer and every kept block is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from typing import TYPE_CHECKING, Any

from scripted.worker import VOCAB, right_answer

if TYPE_CHECKING:
    from scripted.engine import ScriptedEngine

FAMILIES = 3
FAMILY_TOKENS = (40, 200)
TAIL_TOKENS = (1, 60)
OUTPUT_TOKENS = (1, 30)
LIVE_MAX = 6
# A prompt goes on from an earlier answer in one of so many arrivals, if it is short enough.
TURN_OF, TURN_TOKENS_MAX = 4, 200
# Weights of all seeds: now and then those of before come back.
WEIGHTS = 4
# Once all is quiet: prompts asked again, and tokens of each answer.
ASKED_AGAIN, ASKED_TOKENS = 8, 2
FROZEN_STEPS = (1, 6)
# Tokens, of several hits: every other one is checked.
HITS_LEAST = 160
MOMENTS = ("", "scheduled", "executed")
# How a step fails: see `ScriptedWorker.execute`.
FAULTS = ("skip", "raise", "raise_v2", "refuse")
PRIORITIES = 4


@dataclasses.dataclass
class Asked:
    """A request, with its right answer unless it is void."""

    name: str
    prompt: list[int]
    output_tokens: int
    weights: int
    # The weights changed during the request, or vLLM's cache could not be reset: vLLM alone decides its answer.
    void: bool
    aborted: bool = False

    @functools.cached_property
    def right(self) -> list[int]:
        """The right answer."""
        return right_answer(self.prompt, self.output_tokens, self.weights)

    def turn(self) -> list[int]:
        """The prompt and its answer, the beginning of the next turn."""
        return self.prompt + self.right


class Storm:
    """One seed's play on an idle engine."""

    def __init__(self, engine: ScriptedEngine, seed: int, chances: dict[str, float], pid: int) -> None:
        self._engine, self._pid, self._chances = engine, pid, chances
        self._early = engine.worker.copies_too_early
        self._random = random.Random(seed)
        self._families = [self._tokens(*FAMILY_TOKENS) for _ in range(FAMILIES)]
        self._asked: list[Asked] = []
        self._stale = False
        self._thaw_at: int | None = None

    def play(self, steps: int) -> None:
        """Steps, and then the verdict."""
        for _ in range(steps):
            for what in ("arrive", "abort", "reset", "replace_weights", "freeze", "spoil", "fail"):
                if self._random.random() < self._chances.get(what, 0.0):
                    getattr(self, f"_{what}")()
            if self._thaw_at is not None and self._engine.steps >= self._thaw_at:
                self._thaw()
            self._engine.step()
        self._thaw()
        self._engine.forget_events()
        self._engine.finish()
        self._check_answers()
        self._check_kept()

    @property
    def _vllm_errs(self) -> bool:
        """Whether vLLM's own cache may list blocks filled by no step, after a failed step or a preemption by priority, or have
        copied a block before the step that filled it."""
        return "fail" in self._chances or self._engine.worker.copies_too_early > self._early

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(3, VOCAB) for _ in range(self._random.randint(least, most))]

    def _live(self) -> list[Asked]:
        return [asked for asked in self._asked if asked.name in self._engine.scheduler.requests]

    def _arrive(self) -> None:
        if len(self._live()) >= LIVE_MAX:
            return
        family = self._random.choice(self._families)
        turns = [asked for asked in self._asked if len(asked.prompt) + asked.output_tokens <= TURN_TOKENS_MAX]
        if turns and self._random.randrange(TURN_OF) == 0:
            prompt = self._random.choice(turns).turn() + self._tokens(*TAIL_TOKENS)
        else:
            prompt = family[: self._random.randint(len(family) // 2, len(family))] + self._tokens(*TAIL_TOKENS)
        output_tokens = self._random.randint(*OUTPUT_TOKENS)
        name = self._engine.add(prompt, output_tokens, priority=self._random.randrange(PRIORITIES))
        self._asked.append(Asked(name, prompt, output_tokens, self._engine.worker.weights, self._stale))

    def _abort(self) -> None:
        live = self._live()
        if live:
            asked = self._random.choice(live)
            asked.aborted = True
            self._engine.plan(self._random.choice(MOMENTS), {"do": "abort_named", "with": {"name": asked.name}})

    def _reset(self) -> None:
        preempt = self._random.random() < 0.5
        # vLLM refuses, by an exception, where a load or a step in flight holds blocks; the preempted stay so.
        with contextlib.suppress(RuntimeError):
            self._stale &= not self._engine.reset(reset_running_requests=preempt)

    def _replace_weights(self) -> None:
        """Other weights and a reset without dropped requests, as a user does it; vLLM's own reset may fail."""
        self._engine.new_weights(self._random.randrange(WEIGHTS))
        for asked in self._live():
            asked.void = True
        self._stale = not self._engine.reset(reset_connector=self._random.random() < 0.5)

    def _freeze(self) -> None:
        if self._thaw_at is None:
            self._engine.signal(self._pid, "SIGSTOP")
            self._thaw_at = self._engine.steps + self._random.randint(*FROZEN_STEPS)

    def _thaw(self) -> None:
        if self._thaw_at is not None:
            self._engine.signal(self._pid, "SIGCONT")
            self._thaw_at = None

    def _spoil(self) -> None:
        self._engine.spoil_plans(1, self._random.randrange(4))

    def _fail(self) -> None:
        """The next step with tokens fails, and with it every request."""
        self._engine.fail_step(self._random.choice(FAULTS))

    def _check_answers(self) -> None:
        """Loaded bytes are right. Blocks filled by no step and listed by vLLM do not count."""
        wrong = self._engine.worker.wrong_loaded
        assert wrong == 0, f"wrong KV: {wrong} positions that were loaded do not hold their tokens' KV"
        for asked in self._asked:
            if asked.void:
                continue
            answer, right = self._engine.answer(asked.name), asked.right
            wrong = self._engine.worker.wrong[asked.name]
            if wrong and self._vllm_errs:
                continue
            assert wrong == 0, f"wrong KV: {asked.name} read {wrong} positions that do not hold their tokens' KV"
            assert answer == right[: len(answer)], f"wrong KV: {asked.name} answered {answer}, not {right}"
            ended = asked.aborted or asked.name in self._engine.ended_by_faults
            assert ended or len(answer) == len(right), f"lost request: {asked.name} answered {answer}, not {right}"

    def _check_kept(self) -> None:
        """All kept blocks are right: the prompts are asked again with vLLM's own cache empty."""
        assert self._engine.reset(), "vLLM's cache is not free although nothing runs"
        self._engine.settle()
        prompts = [turn for asked in self._asked for turn in (asked.prompt, asked.turn())]
        self._random.shuffle(prompts)
        prompts = prompts[:ASKED_AGAIN]
        before = self._engine.worker.wrong.total()
        # vLLM lists blocks of a request preempted in its own schedule(), though no step filled them. A lone one is safe.
        asked = [[prompt] for prompt in prompts] if self._vllm_errs else [prompts]
        answers = [answer for together in asked for answer in self._engine.generate(together, ASKED_TOKENS)]
        wrong = self._engine.worker.wrong.total() - before
        assert wrong == 0, f"wrong KV: {wrong} positions of what is kept do not hold their tokens' KV"
        weights = self._engine.worker.weights
        right = [right_answer(prompt, ASKED_TOKENS, weights) for prompt in prompts]
        assert answers == right, f"wrong KV: {answers}, not {right}"


def play(
    engine: ScriptedEngine, seeds: list[int], spare: list[int], steps: int, least: int, chances: dict[str, float], pid: int
) -> dict[str, Any]:
    """Plays every seed, so many steps of each, and spare ones until there are preemptions and hits, and the least of all
    steps. The first failed seed is named."""
    for number, seed in enumerate([*seeds, *spare]):
        if number >= len(seeds) and engine.hits >= HITS_LEAST and engine.preemptions and engine.steps >= least:
            break
        try:
            Storm(engine, seed, chances, pid).play(steps)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return {"seeds": len(seeds)}
