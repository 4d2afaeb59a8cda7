"""States beside full attention, windows and scratch, in cache groups of their own, under vLLM's own schedulers."""

from __future__ import annotations

from typing import Any

import pytest
from stage import (
    BLOCK_TOKENS,
    RESET,
    SETTLE,
    Act,
    Stage,
    by_load,
    expect_right,
    generate,
    hit_tokens,
    metrics,
    play_sets_that_lack_a_group,
    prompt_of,
    right_answers,
)

from testkit import sidecar

# Two groups with states and one with full attention; and scratch, a state, a window and full attention.
MIXED: dict[str, Any] = {"kind": "mixed", "window": 100}
# The same, with hits at the ends of a few tokens.
UNIT_TOKENS = 8
WITHIN = MIXED | {"match_tokens": UNIT_TOKENS}
KINDS: dict[str, dict[str, Any]] = {"states": {"kind": "states"}, "mixed": MIXED}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
PROMPTS = [prompt_of(500, 201), prompt_of(300, 202)]
HITS = sum(hit_tokens(len(prompt)) for prompt in PROMPTS)


# A drafter with KV in the blocks of full attention: vLLM takes a block from its own hits, and a prompt's last state is there.
MTP = {"drafts": 3, "drafter": "mtp"}


@EACH
@pytest.mark.supports("states-drafts")
def test_hits_beside_a_drafter_are_those_of_vllm(stage: Stage, kind: dict[str, Any]) -> None:
    """After a restart, too; and no request loads the block that vLLM has taken from its own hit."""
    right = right_answers(PROMPTS, 4)
    with sidecar.serving(stage.directory) as keeper:
        ask = generate(PROMPTS, 4)
        (results,) = stage.play(
            [ask, SETTLE, ask, RESET, ask, ask], *by_load(keeper, "auto"), metrics=metrics(keeper), **kind, **MTP
        )
        cold, _, own, _, warm, again = results
        for result in (cold, own, warm, again):
            expect_right(result, right, "beside a drafter")
        hits = HITS - BLOCK_TOKENS * len(PROMPTS)
        assert [result["hits"] for result in (cold, own, warm, again)] == [0, 0, hits, 0]


@EACH
@pytest.mark.supports("states")
@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_a_kept_prefix_is_found_and_every_byte_is_right(stage: Stage, kind: dict[str, Any], copy: str) -> None:
    """Wrong bytes in the pool are noticed."""
    right = right_answers(PROMPTS, 40)
    with sidecar.serving(stage.directory) as keeper:
        damage: Act = {"do": "damage_pool", "with": {"path": str(keeper.pool)}}
        acts = [generate(PROMPTS, 40), SETTLE, RESET, generate(PROMPTS, 40), RESET, damage, generate(PROMPTS, 1)]
        (connector,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **kind)
        cold, _, _, warm, _, damaged, spoiled = results
        assert (cold["value"], cold["wrong"], cold["hits"]) == (right, 0, 0)
        assert (warm["value"], warm["wrong"], warm["hits"]) == (right, 0, HITS)
        assert damaged["value"] > 0 and spoiled["hits"] == HITS and spoiled["wrong"] > 0


@pytest.mark.supports("states")
@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_a_hit_ends_within_a_block(stage: Stage, copy: str) -> None:
    """Also in a prompt shorter than a block. Wrong bytes in the pool are noticed."""
    prompts = [prompt_of(BLOCK_TOKENS - 3, 220), prompt_of(5 * BLOCK_TOKENS + 2 * UNIT_TOKENS + 3, 221)]
    right, hits = right_answers(prompts, 40), sum(len(prompt) // UNIT_TOKENS * UNIT_TOKENS for prompt in prompts)
    with sidecar.serving(stage.directory) as keeper:
        damage: Act = {"do": "damage_pool", "with": {"path": str(keeper.pool)}}
        acts = [generate(prompts, 40), SETTLE, RESET, generate(prompts, 40), RESET, damage, generate(prompts, 1)]
        (connector,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **WITHIN)
        cold, _, _, warm, _, damaged, spoiled = results
        assert (cold["value"], cold["wrong"], cold["hits"]) == (right, 0, 0)
        assert (warm["value"], warm["wrong"], warm["hits"]) == (right, 0, hits)
        assert damaged["value"] > 0 and spoiled["hits"] == hits and spoiled["wrong_loaded"] > 0


@pytest.mark.supports("failed-steps", "states")
@pytest.mark.parametrize("fault", ["skip", "refuse"])
def test_a_step_that_fills_a_partly_loaded_block_fails(stage: Stage, fault: str) -> None:
    """vLLM lists the block as full, and the next request reads it and goes on. Nothing of that is kept."""
    prompt = prompt_of(2 * BLOCK_TOKENS + 2 * UNIT_TOKENS + 1, 222)
    longer = prompt + prompt_of(2 * BLOCK_TOKENS, 223)
    hit, right = len(prompt) // UNIT_TOKENS * UNIT_TOKENS, right_answers([longer], 40)
    fail = {"do": "fail_step", "with": {"fault": fault}}
    with sidecar.serving(stage.directory) as keeper:
        before = [generate([prompt], 1), SETTLE, RESET, fail, generate([longer], 40)]
        acts = [*before, generate([longer], 40), SETTLE, RESET, generate([longer], 40), SETTLE, RESET, generate([longer], 40)]
        (results,) = stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), **WITHIN)
        *_, failed, wrong, _, _, computed, _, _, last = results
        assert (failed["failed_steps"], failed["hits"], failed["value"]) == (1, hit, [[]])
        # The load ended before the bytes without a writer.
        assert wrong["wrong"] > 0 and wrong["wrong_loaded"] == 0
        expect_right(computed, right, "behind a step that failed")
        assert computed["hits"] == hit
        expect_right(last, right, "of what is kept")
        assert last["hits"] == len(longer) // UNIT_TOKENS * UNIT_TOKENS


def test_a_conversation_goes_on_from_where_it_was(stage: Stage) -> None:
    """A hit ends at the last answer's end: every boundary of an answer has a state."""
    prompt = prompt_of(600, 203)
    (answer,) = right_answers([prompt], 150)
    turns = [prompt, prompt + answer + prompt_of(90, 204)]
    with sidecar.serving(stage.directory) as keeper:
        acts = [act for turn in turns for act in (generate([turn], 150), SETTLE, RESET)]
        (results,) = stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), **MIXED)
        expect_right(results[3], right_answers(turns[1:], 150), "of a conversation that goes on")
        # The last token of an answer is not computed.
        assert results[3]["hits"] == (len(prompt + answer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(("drafter", "dropped"), [({}, 0), (MTP, BLOCK_TOKENS)], ids=["plain", "mtp"])
def test_a_shared_prefix_is_served_from_its_third_request_on(stage: Stage, drafter: dict[str, Any], dropped: int) -> None:
    """A restarted engine knows no shared prefix. The second request finds its blocks of full attention and no state at its end,
    so a state is made there."""
    shared = prompt_of(650, 205)
    prompts = [shared + prompt_of(90, 206 + number) for number in range(3)]
    with sidecar.serving(stage.directory) as keeper:
        acts = [act for prompt in prompts for act in (generate([prompt], 4), SETTLE, RESET)]
        (results,) = stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), **MIXED, **drafter)
        for prompt, result in zip(prompts, results[::3], strict=True):
            expect_right(result, right_answers([prompt], 4), "of a shared prefix")
        assert results[6]["hits"] == len(shared) // BLOCK_TOKENS * BLOCK_TOKENS - dropped


@pytest.mark.parametrize(("copy", "lost"), [("engine", False), ("engine", True), ("sidecar", True)])
def test_a_load_that_one_group_lacks_has_failed(stage: Stage, copy: str, lost: bool) -> None:
    """Another group each time; the request is computed, and hits again afterwards."""
    play_sets_that_lack_a_group(stage, [prompt_of(300, 210 + group) for group in range(3)], copy, lost, MIXED)
