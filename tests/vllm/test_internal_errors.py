"""A panic of the policy: the engine goes on alone, every answer is right, and no request waits for a load without an end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from stage import RESET, SETTLE, Act, Stage, by_load, expect_right, generate, metrics, prompt_of, right_answers

from testkit import sidecar

OUTPUT_TOKENS = 3
PROMPTS = [prompt_of(tokens, 70 + tokens) for tokens in (70, 130, 200, 260)]
KINDS: dict[str, dict[str, Any]] = {"full": {}, "set": {"kind": "set", "window": 100, "blocks": 256}}
REQUESTS = ["follow_request", "announce", "matched", "allocated", "load_blocks", "loads_ended", "end_request"]
METHODS = [*REQUESTS, "begin_step", "end_step", "accept_step"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_engine_outlives_its_policy(stage: Stage, load: str, kind: str) -> None:
    """Any call may panic: the first of them, or one in the middle of other loads."""
    chance = random.Random(f"{stage.release} {stage.async_scheduling} {load} {kind}")
    right = right_answers(PROMPTS, OUTPUT_TOKENS)
    with sidecar.serving(stage.directory) as keeper:
        (connector,) = by_load(keeper, load)
        fill = [generate(PROMPTS, OUTPUT_TOKENS), SETTLE, RESET]
        parts: list[tuple[list[Act], dict[str, Any]]] = [(fill, connector)]
        for method in METHODS:
            panic: Act = {"do": "break_policy", "with": {"method": method, "after": chance.choice((0, 0, 1, 2))}}
            parts.append(([panic, generate(PROMPTS, OUTPUT_TOKENS), generate(PROMPTS[::-1], OUTPUT_TOKENS)], connector))
        played = stage.play_each(parts, metrics=metrics(keeper), **KINDS[kind])
    for method, (_, broken, after) in zip(METHODS, played[1:], strict=True):
        # A step counting on its loads reads blocks without them; vLLM computes its tokens again.
        excused = {"wrong": 0} if load == "sync" else {}
        expect_right(broken | excused, right, f"a panic in {method}")
        expect_right(after, right[::-1], f"after a panic in {method}")
