"""vLLM may allocate fewer tokens than the answer: no load fails, and nothing stays leased."""

from __future__ import annotations

from typing import Any

import pytest
from stage import (
    BLOCK_TOKENS,
    RESET,
    SETTLE,
    WAIT_RELEASED,
    Stage,
    expect_right,
    generate,
    hit_tokens,
    metrics,
    pillion,
    prompt_of,
    right_answers,
)

from testkit import sidecar

PROMPT = prompt_of(200, 151)
# Groups with windows then keep the blocks for a request from its end on.
SHORTER = PROMPT[: hit_tokens(len(PROMPT)) - BLOCK_TOKENS + 5]
KINDS: dict[str, dict[str, Any]] = {"full": {"kind": "full"}, "set": {"kind": "set", "window": 100}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_that_vllm_shortens_is_loaded(stage: Stage, kind: str) -> None:
    """It is loaded up to the end that vLLM sets."""
    asked, right = generate([PROMPT], 4), right_answers([PROMPT], 4)
    with sidecar.serving(stage.directory) as keeper:
        rounding = pillion(keeper.socket, "async") | {"kv_connector_module_path": "scripted.rounding_connector"}
        acts = [generate([SHORTER], 1), asked, SETTLE, RESET, asked, WAIT_RELEASED]
        (results,) = stage.play(acts, rounding, metrics=metrics(keeper), **KINDS[kind])
        expect_right(results[4], right, "of a hit that vLLM has shortened")
        assert results[4]["hits"] == hit_tokens(len(PROMPT)) - BLOCK_TOKENS
        assert results[4]["failed_blocks"] == results[4]["failed_requests"] == 0


def test_a_hit_that_vllm_shortens_to_nothing_is_released(stage: Stage) -> None:
    """A prompt of one block."""
    short = PROMPT[: BLOCK_TOKENS + 5]
    with sidecar.serving(stage.directory) as keeper:
        rounding = pillion(keeper.socket, "async") | {"kv_connector_module_path": "scripted.rounding_connector"}
        asked = generate([short], 4)
        (results,) = stage.play([asked, SETTLE, RESET, asked, WAIT_RELEASED], rounding, metrics=metrics(keeper))
        expect_right(results[3], right_answers([short], 4), "of a hit that vLLM did not take")
        assert results[3]["hits"] == 0
