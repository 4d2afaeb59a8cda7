"""Many loads of several cache groups that fail, come late, or come for some groups only: no wrong token, no end of an engine.

FAILED_LOADS=1000 makes so many loads fail, in all tests of the module together.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from stage import (
    RESET,
    SETTLE,
    SLOW_STEPS,
    Act,
    Stage,
    by_load,
    expect_right,
    generate,
    go_on,
    hit_tokens,
    lose_leases,
    metrics,
    prompt_of,
    right_answers,
    spoil,
    stop,
)

from testkit import sidecar

FAILED_LOADS = int(os.environ.get("FAILED_LOADS", "160"))
# Releases and schedulers, and the copying side.
TESTS = 4 * 2
# Three groups, with blocks for every prompt at once: all of a round's loads begin in its first step.
SHAPE: dict[str, Any] = {"kind": "set", "window": 100, "blocks": 256}
LATE_STEPS = 3
OUTPUT_TOKENS = 2
PROMPTS = [prompt_of(tokens, 170 + tokens) for tokens in (70, 130, 200, 260, 330, 400)]
HITS = sum(hit_tokens(len(prompt)) for prompt in PROMPTS)


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_every_load_that_fails_is_computed_again(stage: Stage, copy: str) -> None:
    """Some or all of a round's loads fail, each in one group: its lease ends, or its blocks from one on are missing. In every
    other round the sidecar is also frozen for a while, so its copies come late."""
    chance = random.Random(f"{stage.release} {stage.async_scheduling} {copy}")
    right = right_answers(PROMPTS, OUTPUT_TOKENS)
    acts = [generate(PROMPTS, OUTPUT_TOKENS), SETTLE, SLOW_STEPS]
    failing: list[int] = []
    with sidecar.serving(stage.directory) as keeper:
        while sum(failing) < FAILED_LOADS / TESTS:
            failing.append(chance.randint(1, len(PROMPTS)))
            sleeps: dict[str, list[Act]] = {"0:scheduled": [stop(keeper)], str(LATE_STEPS): [go_on(keeper)]}
            # Copies by the sidecar have no plan to spoil.
            plan = copy == "engine" and chance.random() < 0.5
            fault = spoil(failing[-1], chance.randrange(2)) if plan else lose_leases(failing[-1])
            acts += [RESET, fault, generate(PROMPTS, OUTPUT_TOKENS, at=sleeps if len(failing) % 2 else {}), SETTLE]
        (connector,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        (results,) = stage.play([*acts, RESET, generate(PROMPTS, OUTPUT_TOKENS)], connector, metrics=metrics(keeper), **SHAPE)
    rounds = results[5:-2:4]
    for count, result in zip(failing, rounds, strict=True):
        expect_right(result, right, f"of {count} loads of {len(PROMPTS)} that failed")
        assert (result["hits"], result["failed_requests"], result["failed_blocks"]) == (HITS, count, 0)
    assert sum(result["failed_requests"] for result in rounds) >= FAILED_LOADS / TESTS
    late = [result["late_loads"] for result in rounds]
    if copy == "sidecar":
        assert all(late[::2]), f"loads that came late: {late}"
    expect_right(results[-1], right, "after all of them")
    assert (results[-1]["hits"], results[-1]["failed_requests"]) == (HITS, 0)
