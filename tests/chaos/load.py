"""A closed loop of requests on one engine after another: `IN_FLIGHT` at a time, every answer checked."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from testkit import engine, prompts
from testkit.waiting import Failed, wait_for

OUTPUT_TOKENS = 24
IN_FLIGHT = 4
# Six prefixes of 6 to 16 blocks, four questions each: at the most 20 blocks with the answer.
PREFIX_BLOCKS = (6, 8, 10, 12, 14, 16)
QUESTION_TOKENS = (5, 40, 70, 100)
# The wait of one look at the engine's answers; a stop is seen that late at most.
PATIENCE_S = 0.05
DRAIN_WATCHDOG_S = 120
# The watchdog of waits for answers and for their effects.
WATCHDOG_S = 300
# In float32, logprobs move by 5e-6 with the shape of the batch (measured: alone, two, four and eight together, prompts whole
# and in chunks, from the engine's own cache and not), and the closest two candidates of an answer are typically 3e-3 apart. So
# tokens do not depend on what else runs, if prompts with closer candidates are left out; and wrong KV anywhere moves logprobs
# by more.
LOGPROB_TOLERANCE = 1e-3


def make_prompts(seed: int, prefix_blocks: Sequence[int]) -> list[list[int]]:
    """Prompts, several for each number of `prefix_blocks`; those of one number share a prefix of so many blocks."""
    asked = []
    for number, blocks in enumerate(prefix_blocks):
        prefix = prompts.prompt(blocks * engine.BLOCK_TOKENS, seed=1_000 * seed + number)
        questions = [prompts.prompt(tokens, seed=1_000 * seed + 100 + tokens) for tokens in QUESTION_TOKENS]
        asked += [prefix + question for question in questions]
    return asked


@dataclasses.dataclass(frozen=True)
class Right:
    """A prompt and the answer of an undisturbed engine."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def ask_alone(running: engine.Engine, prompt: list[int]) -> tuple[Right, float]:
    """The right answer, and the smallest difference between the two best candidates of a token."""
    answer = running.generate([prompt], max_tokens=OUTPUT_TOKENS, logprobs=2)[0]
    best = [sorted(position.values(), reverse=True)[:2] for position in answer["logprobs"]]
    return Right(prompt, answer["tokens"], chosen_logprobs(answer)), min(first - second for first, second in best)


def chosen_logprobs(answer: dict[str, Any]) -> list[float]:
    """The logprob of every token of an answer."""
    return [position[str(token)] for token, position in zip(answer["tokens"], answer["logprobs"], strict=True)]


@dataclasses.dataclass
class Request:
    """One question, from the moment it was first asked."""

    prompt: int
    asked: float
    answered: float = math.nan
    wrong_tokens: int = 0
    wrong_logprobs: int = 0
    # The engine that was to answer it was killed; another one was asked.
    asked_again: bool = False

    def compare(self, answer: dict[str, Any], right: Right) -> None:
        """Count what differs from the right answer."""
        wrong = [got != expected for got, expected in zip(answer["tokens"], right.tokens, strict=True)]
        # After a wrong token the logprobs are of another text.
        same = wrong.index(True) if any(wrong) else len(wrong)
        moved = zip(chosen_logprobs(answer)[:same], right.logprobs[:same], strict=True)
        self.wrong_tokens = sum(wrong)
        self.wrong_logprobs = sum(abs(got - expected) > LOGPROB_TOLERANCE for got, expected in moved)


class Load:
    """The loop. It runs in a thread from `start` to `drain` or `crash`, on the engine given to `start`."""

    def __init__(self, right: list[Right], seed: int) -> None:
        self.answered: list[Request] = []
        # Requests ended by a living engine without an answer.
        self.refused: list[Request] = []
        self._right = right
        self._random = random.Random(seed)
        self._drawn: list[int] = []
        self._open: dict[int, Request] = {}
        self._next = 0
        self._engine: engine.Engine | None = None
        self._thread: threading.Thread | None = None
        self._draining, self._crashing = threading.Event(), threading.Event()
        self._failure: BaseException | None = None

    @property
    def unanswered(self) -> int:
        """The number of requests without an answer, refused ones included."""
        return len(self._open) + len(self.refused)

    def start(self, running: engine.Engine) -> None:
        """Sends requests to this engine; first the requests that the engine before it left unanswered."""
        assert self._thread is None
        self._engine = running
        for event in (self._draining, self._crashing):
            event.clear()
        for number, request in self._open.items():
            request.asked_again = True
            self._post(running, number)
        self._thread = threading.Thread(target=self._run, args=(running,), daemon=True)
        self._thread.start()

    def wait_answered(self, count: int) -> None:
        """Wait until so many requests were answered."""
        assert self._engine is not None

        def enough() -> bool:
            self.check()
            return len(self.answered) >= count

        wait_for(enough, f"{count} answers", WATCHDOG_S, failed=self._engine.failed)

    def drain(self) -> None:
        """Sends no new request, and waits for all answers. Requests without an answer at the watchdog's end stay unanswered."""
        self._draining.set()
        self._end()

    def crash(self, running: engine.Engine) -> None:
        """Kill the engine under its load."""
        self._crashing.set()
        running.crash()
        self._end()

    def check(self) -> None:
        """Raises the loop's error, if it had one."""
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        self.check()

    def _run(self, running: engine.Engine) -> None:
        try:
            while not self._draining.is_set():
                while len(self._open) < IN_FLIGHT:
                    self._open[self._next] = Request(self._draw(), time.monotonic())
                    self._next += 1
                    self._post(running, self._next - 1)
                self._take(running)
            deadline = time.monotonic() + DRAIN_WATCHDOG_S
            while self._open and time.monotonic() < deadline:
                self._take(running)
        except BaseException as error:
            # A killed engine ends the loop, after the last of its answers.
            if not (self._crashing.is_set() and isinstance(error, Failed)):
                self._failure = error

    def _draw(self) -> int:
        """The next prompt; all prompts are drawn before one comes again."""
        if not self._drawn:
            self._drawn = list(range(len(self._right)))
            self._random.shuffle(self._drawn)
        return self._drawn.pop()

    def _post(self, running: engine.Engine, number: int) -> None:
        running.ask(number, self._right[self._open[number].prompt].prompt, OUTPUT_TOKENS)

    def _take(self, running: engine.Engine) -> None:
        for answer in running.answered(PATIENCE_S):
            request = self._open.pop(answer["answered"])
            request.answered = time.monotonic()
            if answer["finish_reason"] != "length":
                self.refused.append(request)
                continue
            request.compare(answer, self._right[request.prompt])
            self.answered.append(request)
