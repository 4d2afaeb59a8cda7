"""Standing checks of right KV: an engine asks for kept prompts in ever other batches and steps."""

from __future__ import annotations

import random
import re

from testkit import engine, sidecar

BATCH_MAX = 8
ANSWER_TOKENS_MAX = 8
# As many long checks as their tokens were loaded; without, every check is a short one.
SHORT = {"pillion.check_every": 1, "pillion.check_per_mille": 0}
LONG = SHORT | {"pillion.check_per_mille": 1000}
LARGEST = re.compile(r"^pillion_check_difference_max\S* (\S+)$", re.MULTILINE)


def ask_all(running: engine.Engine, keeper: sidecar.Sidecar, asked: list[list[int]], chance: random.Random) -> int:
    """Every prompt once, with nothing in the engine's own cache: alone or together. How many were computed as a whole."""
    keeper.wait_for(running.reset_prefix_cache, "reset of the engine's own cache")
    left, whole = chance.sample(asked, len(asked)), 0
    while left:
        several = chance.randint(1, BATCH_MAX)
        answers = running.generate(left[:several], max_tokens=chance.randint(1, ANSWER_TOKENS_MAX))
        whole += sum(answer["cached_tokens"] == 0 for answer in answers)
        del left[:several]
    return whole


def largest(keeper: sidecar.Sidecar) -> float:
    """The largest difference of a check that passed, as a part of its limit."""
    return max(map(float, LARGEST.findall(keeper.get("/metrics") or "")))
