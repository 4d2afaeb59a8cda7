"""Windows beside full attention, in cache groups of their own: a hit needs the blocks of all groups, and fails as a whole."""

from __future__ import annotations

import hashlib
import subprocess
from typing import Any

import pytest
from stage import (
    BLOCK_TOKENS,
    RESET,
    SETTLE,
    SLOW_STEPS,
    TURN,
    Stage,
    by_load,
    expect_right,
    generate,
    go_on,
    hit_tokens,
    metrics,
    play_sets_that_lack_a_group,
    prompt_of,
    right_answers,
    send,
    spoil,
    stop,
)

from testkit import pool_file, sidecar
from testkit.router import GPU, MEMORY, EventLost, Known, Router

# Two groups with windows, of three blocks and a part of a fourth, and one with full attention.
SET: dict[str, Any] = {"kind": "set", "window": 100}
GROUPS = 3
FIRST, SECOND = prompt_of(200, 131), prompt_of(230, 132)
# A pool with room for one of the prompts: blocks of one group belong to another group afterwards.
FEW_BLOCKS: dict[str, Any] = {"blocks": 28, "max_model_len": 288}
SHORT = {"pillion.query_timeout_us": 2000}
# The most engines that send events of the same blocks to one router after another.
TELLERS_MAX = 3


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_blocks_that_another_group_overwrites_are_not_kept(stage: Stage, copy: str) -> None:
    """The sidecar is frozen before the saves of all groups until a request has reused blocks of one group for another one."""
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate([FIRST], 1, at={"0:scheduled": [stop(keeper)]}), generate([SECOND], 1), go_on(keeper), SETTLE]
        (hasty,) = by_load(keeper, "auto", **SHORT, **{"pillion.copy": copy})
        stage.play(acts, hasty, metrics=metrics(keeper), **FEW_BLOCKS, **SET)
        assert keeper.metrics()["pillion_saves_lost_to_reuse_total"] > 0
        # An engine with a long budget hits the kept blocks; the others are computed, and kept then.
        (patient,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        acts = [generate([FIRST], 4), SETTLE, RESET, generate([FIRST], 4)]
        (results,) = stage.play(acts, patient, metrics=metrics(keeper), **FEW_BLOCKS, **SET)
        expect_right(results[0], right_answers([FIRST], 4), "after the reuse of blocks that were being saved")
        expect_right(results[-1], right_answers([FIRST], 4), "beside what was kept then")
        assert results[-1]["hits"] == hit_tokens(len(FIRST))


# Copies by the sidecar have no plan to spoil.
@pytest.mark.parametrize(("copy", "lost"), [("engine", False), ("engine", True), ("sidecar", True)])
def test_a_load_that_one_group_lacks_has_failed(stage: Stage, copy: str, lost: bool) -> None:
    """Each group in turn: its load fails, or its lease ends; the request is computed, and hits again afterwards."""
    play_sets_that_lack_a_group(stage, [prompt_of(300, 140 + group) for group in range(GROUPS)], copy, lost, SET)


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_a_set_that_was_promised_outlives_the_sidecar(stage: Stage, copy: str) -> None:
    """The sidecar is killed before the first rank begins to load; with each result of the groups, the answers are right."""
    prompts = [FIRST, SECOND]
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 1), SETTLE, RESET, generate(prompts, 4, at={"0:scheduled": [send(keeper, "SIGKILL")]})]
        (connector,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **SET)
        expect_right(results[-1], right_answers(prompts, 4), "of a dead sidecar's promise")
        assert results[-1]["hits"] == sum(hit_tokens(len(prompt)) for prompt in prompts)


@pytest.mark.supports("windows")
def test_blocks_of_several_sizes(stage: Stage) -> None:
    """Those with windows are twice as large: hits end where both do, and keys are every second hash."""
    prompts = [prompt_of(300, 135), prompt_of(500, 136)]
    right = right_answers(prompts, 40)
    hits = sum((len(prompt) - 1) // (2 * BLOCK_TOKENS) * 2 * BLOCK_TOKENS for prompt in prompts)
    with sidecar.serving(stage.directory) as keeper:
        acts = [
            generate(prompts, 40),
            SETTLE,
            RESET,
            generate(prompts, 40),
            SETTLE,
            RESET,
            SLOW_STEPS,
            spoil(2),
            generate(prompts, 40),
        ]
        (results,) = stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), larger=2, **SET)
        expect_right(results[3], right, "of blocks of several sizes")
        assert (results[3]["hits"], results[3]["failed_requests"]) == (hits, 0)
        expect_right(results[-1], right, "after loads that failed")
        assert (results[-1]["hits"], results[-1]["failed_requests"]) == (hits, 2)


def _ask_in_turn(prompts: list[list[int]], output_tokens: int) -> list[Any]:
    """Asks each prompt with an empty engine cache."""
    return [act for prompt in prompts for act in (generate([prompt], output_tokens), SETTLE, RESET)]


@pytest.mark.parametrize("larger", [1, 2])
def test_a_conversation_goes_on_from_where_it_was(stage: Stage, larger: int) -> None:
    """A hit ends at the last answer's end; or at the prompt's end, if another answer follows or none. For most of the prompt
    only the blocks of full attention are kept."""
    prompt = prompt_of(600, 133)
    (answer,) = right_answers([prompt], 150)
    turns = [prompt, prompt + answer + prompt_of(90, 134), prompt + prompt_of(300, 138), prompt]
    boundary = BLOCK_TOKENS * larger
    # The last token of an answer is not computed.
    ends = [0, len(prompt + answer) - 1, len(prompt), len(prompt) - 1]
    with sidecar.serving(stage.directory) as keeper:
        (connector,) = by_load(keeper, "auto", **{"pillion.checkpoint_tokens": 0})
        acts = _ask_in_turn(turns, 150)
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), larger=larger, **SET)
        for turn, end, result in zip(turns, ends, results[::3], strict=True):
            expect_right(result, right_answers([turn], 150), "of a conversation that goes on")
            assert result["hits"] == end // boundary * boundary
        kept = [len(blocks) for blocks in _kept(keeper).values()]
        assert max(kept[:-1]) * larger < kept[-1] * 0.8


def test_a_branch_is_served_once_another_one_was_computed(stage: Stage) -> None:
    """A prompt that leaves a kept one is kept with the blocks for a hit at that place: other prompts may leave there too."""
    branches = [FIRST[:130] + prompt_of(100, seed) for seed in (139, 145)]
    with sidecar.serving(stage.directory) as keeper:
        acts = _ask_in_turn([FIRST, *branches], 4)
        (results,) = stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), **SET)
        expect_right(results[3], right_answers(branches[:1], 4), "of the first branch")
        expect_right(results[6], right_answers(branches[1:], 4), "of the second branch")
        assert [results[3]["hits"], results[6]["hits"]] == [0, 130 // BLOCK_TOKENS * BLOCK_TOKENS]


@pytest.mark.parametrize(("window", "checkpoint"), [(100, 256), (33, 640)])
def test_a_prompt_that_was_cut_is_served_from_a_checkpoint(stage: Stage, window: int, checkpoint: int) -> None:
    """It ends far before the end of the kept prompt: few windows above a checkpoint, or many."""
    cut = 2 * checkpoint - 40
    prompt = prompt_of(3 * checkpoint, 146)
    shape = SET | {"window": window, "max_model_len": 2048, "blocks": 256}
    with sidecar.serving(stage.directory) as keeper:
        (connector,) = by_load(keeper, "auto", **{"pillion.checkpoint_tokens": checkpoint})
        acts = _ask_in_turn([prompt, prompt[:cut]], 4)
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **shape)
        expect_right(results[3], right_answers([prompt[:cut]], 4), "of a prompt that was cut")
        assert results[3]["hits"] == checkpoint


def test_what_one_group_has_lost_is_not_served(stage: Stage) -> None:
    """Each group's blocks are a namespace of the sidecar; without those of one group the others serve nothing."""
    right = right_answers([FIRST], 4)
    with sidecar.serving(stage.directory) as keeper:
        (connector,) = by_load(keeper, "auto")
        (results,) = stage.play([generate([FIRST], 4), SETTLE], connector, metrics=metrics(keeper), **SET)
        expect_right(results[0], right, "computed")
        found = [namespace["namespace"] for namespace in keeper.namespaces()]
        assert len(found) == GROUPS
        for namespace in found:
            ctl = [str(sidecar.find_binary()), "ctl", "--socket", str(keeper.socket), "evict", namespace]
            subprocess.run(ctl, check=True, capture_output=True)
            acts = [generate([FIRST], 4), SETTLE, RESET, generate([FIRST], 4)]
            (results,) = stage.play(acts, connector, metrics=metrics(keeper), **SET)
            expect_right(results[0], right, "without a group's blocks")
            assert results[0]["hits"] == 0
            expect_right(results[-1], right, "once they were saved anew")
            assert results[-1]["hits"] == hit_tokens(len(FIRST))


@pytest.mark.supports("events")
def test_a_router_knows_the_blocks_of_each_group(stage: Stage) -> None:
    """The blocks with windows are twice as large. A loss of one group's blocks is announced for that group alone."""
    acts = [SETTLE, TURN, generate([prompt_of(8, 137)], 4)]
    with sidecar.serving(stage.directory) as keeper:
        told = _told(stage, keeper, [generate([FIRST, SECOND], 40), *acts], kept_before=False)
        for group in range(GROUPS):
            # vLLM announces all blocks of a window, and the sidecar keeps those that a continued request reads.
            described = {block: known for block, known in told[GPU, group].items() if block in told[MEMORY, group]}
            assert described and described == {block: told[MEMORY, group][block] for block in described}
        for lost, namespace in enumerate(_namespaces(keeper)):
            keeper.ctl("evict", namespace)
            assert not _told(stage, keeper, acts)[MEMORY, lost]


Told = dict[tuple[str, int], dict[int, Known]]


def _told(stage: Stage, keeper: sidecar.Sidecar, acts: list[Any], kept_before: bool = True) -> Told:
    """The places of blocks by an engine's events, by medium and group: those in memory are the sidecar's kept blocks.

    A router loses vLLM's first events if a busy machine makes its subscription late, and the last ones at the engine's end.
    Then another engine sends events to another router, about the blocks kept before or about none.
    """
    for _ in range(TELLERS_MAX):
        told = _told_once(stage, keeper, acts)
        in_memory = None if told is None else {group: set(told[MEMORY, group]) for group in range(GROUPS)}
        if told is not None and in_memory == _kept(keeper):
            return told
        if not kept_before:
            for namespace in _namespaces(keeper):
                keeper.ctl("evict", namespace)
    raise AssertionError(f"what is told is not what is kept: {in_memory}, {_kept(keeper)}")


def _told_once(stage: Stage, keeper: sidecar.Sidecar, acts: list[Any]) -> Told | None:
    """The same for one engine; None if events were lost."""
    router = Router()
    try:
        stage.play(acts, *by_load(keeper, "auto"), metrics=metrics(keeper), larger=2, events=router.endpoint, **SET)
        router.hear()
        return router.blocks
    except EventLost:
        return None
    finally:
        router.close()


def _namespaces(keeper: sidecar.Sidecar) -> list[str]:
    """The groups' namespaces, in the order of the groups: each group has one layer."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(GROUPS)]
    layers = [f"1 {hashlib.sha256(name.encode()).hexdigest()[:16]}" for name in names]
    found = {namespace["facts"]["layers"]: str(namespace["namespace"]) for namespace in keeper.namespaces()}
    return [found[layer] for layer in layers]


def _kept(keeper: sidecar.Sidecar) -> dict[int, set[int]]:
    """The sidecar's keys of each group, by their names in vLLM's events."""
    kept: dict[int, set[int]] = {group: set() for group in range(GROUPS)}
    groups = {bytes.fromhex(namespace): group for group, namespace in enumerate(_namespaces(keeper))}
    with pool_file.mapped(keeper.pool) as pool:
        for slot in pool_file.committed(pool):
            kept[groups[slot.namespace]].add(int.from_bytes(slot.hash[8:16], "big"))
    return kept
