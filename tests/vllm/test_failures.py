"""The protections of the data path, each in the one interleaving of threads for it.

Each test must fail without its protection: see scripts/mutations.
"""

from __future__ import annotations

from typing import Any

import pytest
from holder import COPIERS, DATA_THREAD, holding
from stage import (
    BLOCK_TOKENS,
    LOADS,
    MEND,
    RESET,
    RESET_ALL,
    SETTLE,
    SLEEP,
    SLOW_STEPS,
    TURN,
    WAIT_RELEASED,
    Stage,
    abort,
    add,
    break_slots,
    by_load,
    call,
    expect_right,
    generate,
    go_on,
    hit_tokens,
    lose_leases,
    metrics,
    new_weights,
    pillion,
    prompt_of,
    right_answers,
    send,
    spoil,
    stop,
    tell,
    wait_filled,
)

from testkit import sidecar

# A pool of the engine with room for one of the tests' prompts: the second one overwrites blocks of the first.
FEW_BLOCKS: dict[str, Any] = {"blocks": 10, "max_model_len": 288}
FIRST, SECOND = prompt_of(200, 101), prompt_of(230, 102)
# The longest delay of a step by a frozen sidecar, as in production.
SHORT = {"pillion.query_timeout_us": 2000}


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_cancel_protects_reused_blocks(stage: Stage, copy: str) -> None:
    """The sidecar is frozen before a save until another request has overwritten the blocks: none of them is kept."""
    with sidecar.serving(stage.directory) as keeper:
        acts = [
            # The save is posted, its step not done.
            generate([FIRST], 1, at={"0:scheduled": [stop(keeper)]}),
            generate([SECOND], 1),
            go_on(keeper),
            SETTLE,
            RESET,
            generate([FIRST], 4),
        ]
        (connector,) = by_load(keeper, "sync", **SHORT, **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        expect_right(results[-1], right_answers([FIRST], 4), "after the reuse of blocks that were being saved")
        expect_right(results[0], right_answers([FIRST], 1), "before")
        expect_right(results[1], right_answers([SECOND], 1), "during")
        assert keeper.metrics()["pillion_saves_lost_to_reuse_total"] > 0


def test_gate_protects_given_away_blocks(stage: Stage) -> None:
    """The copying threads get no core until the engine has loaded by itself and given the blocks to another request."""
    with sidecar.serving(stage.directory) as keeper, holding(keeper.pid, stage.directory) as holder:
        acts = [
            generate([FIRST], 1),
            SETTLE,
            RESET,
            generate(
                [FIRST],
                4,
                at={
                    "0:scheduled": [tell(holder, "hold", COPIERS)],
                    # The load's step has begun: now its copies wait for threads.
                    "1": [TURN],
                },
            ),
            RESET,
            # Behind the prompt: the loaded blocks now have the other request's KV, and every step reads them.
            generate([SECOND], 8, at={"4": [tell(holder, "let", COPIERS), WAIT_RELEASED]}),
        ]
        (connector,) = by_load(keeper, "async", **{"pillion.copy": "sidecar"})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        loaded, _, after = results[3:]
        expect_right(after, right_answers([SECOND], 8), "after blocks of an unfinished load were given away")
        expect_right(loaded, right_answers([FIRST], 4), "of the load that the engine finished")
        assert loaded["hits"] == hit_tokens(len(FIRST))


@pytest.mark.parametrize("load", LOADS)
def test_rescue_fills_promised_blocks(stage: Stage, load: str) -> None:
    """The sidecar freezes between its promise to load blocks and the load: the engine loads them."""
    with sidecar.serving(stage.directory) as keeper:
        promised = generate([FIRST], 4, at={"0:scheduled": [stop(keeper)]})
        acts = [generate([FIRST], 1), SETTLE, RESET, promised, go_on(keeper), SETTLE]
        (connector,) = by_load(keeper, load, **{"pillion.copy": "sidecar"})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        loaded = results[3]
        expect_right(loaded, right_answers([FIRST], 4), "of a load that the engine finished")
        assert (loaded["hits"], loaded["failed_blocks"]) == (hit_tokens(len(FIRST)), 0)


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
@pytest.mark.parametrize("load", LOADS)
def test_promises_outlive_the_sidecar(stage: Stage, load: str, copy: str) -> None:
    """The sidecar is killed after its promise: the leased slots stay as they are."""
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate([FIRST], 1), SETTLE, RESET, generate([FIRST], 4, at={"0:scheduled": [send(keeper, "SIGKILL")]})]
        (connector,) = by_load(keeper, load, **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        expect_right(results[3], right_answers([FIRST], 4), "of a dead sidecar's promise")
        assert (results[3]["hits"], results[3]["failed_blocks"]) == (hit_tokens(len(FIRST)), 0)


def test_rescue_of_a_killed_sidecar(stage: Stage) -> None:
    """The sidecar is killed with the copies of a load begun: the engine copies the rest at once."""
    with sidecar.serving(stage.directory) as keeper, holding(keeper.pid, stage.directory) as holder:
        at = {"0:scheduled": [tell(holder, "hold", COPIERS)], "1": [TURN, send(keeper, "SIGKILL")]}
        acts = [generate([FIRST], 1), SETTLE, RESET, generate([FIRST], 4, at=at)]
        (connector,) = by_load(keeper, "async", **{"pillion.copy": "sidecar"})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        expect_right(results[3], right_answers([FIRST], 4), "of a dead sidecar's promise")
        assert (results[3]["hits"], results[3]["failed_blocks"]) == (hit_tokens(len(FIRST)), 0)


def test_commit_rule_protects_reused_blocks(stage: Stage) -> None:
    """A save is copied after its blocks were overwritten, and its end is known before the CANCEL is read."""
    with sidecar.serving(stage.directory) as keeper, holding(keeper.pid, stage.directory) as holder:
        acts = [
            # The copies of the save wait for threads,
            generate([FIRST], 1, at={"0:scheduled": [tell(holder, "hold", COPIERS)]}),
            TURN,
            # the data thread reads no ring while their sources are overwritten,
            tell(holder, "hold", DATA_THREAD),
            generate([SECOND], 1),
            # and they are made then.
            tell(holder, "let", COPIERS),
            wait_filled(keeper),
            tell(holder, "idle", COPIERS),
            tell(holder, "let", DATA_THREAD),
            SETTLE,
            RESET,
            generate([FIRST], 4),
        ]
        (connector,) = by_load(keeper, "sync", **SHORT)
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **FEW_BLOCKS)
        expect_right(results[-1], right_answers([FIRST], 4), "after a save that was copied too late")
        assert keeper.metrics()["pillion_saves_lost_to_reuse_total"] > 0


# --- failed loads ---


@pytest.mark.parametrize(("copy", "word"), [("engine", "state"), ("engine", "generation"), ("sidecar", "generation")])
def test_slots_that_went_bad_are_recomputed(stage: Stage, copy: str, word: str) -> None:
    """A slot changes after its lease, while the engine copies, or while it finishes copies that the sidecar did not make."""
    prompts = [FIRST, SECOND]
    right = right_answers(prompts, 8)
    blocks = sum(hit_tokens(len(prompt)) for prompt in prompts) // BLOCK_TOKENS
    with sidecar.serving(stage.directory) as keeper, holding(keeper.pid, stage.directory) as holder:
        hold = {"0:scheduled": [tell(holder, "hold", COPIERS)]} if copy == "sidecar" else {}
        acts = [generate(prompts, 1), SETTLE, RESET, break_slots(keeper, word), SLOW_STEPS]
        acts += [generate(prompts, 8, at=hold), MEND, tell(holder, "let", COPIERS), SETTLE, RESET, generate(prompts, 8)]
        for load in LOADS:
            (connector,) = by_load(keeper, load, **{"pillion.copy": copy})
            (results,) = stage.play(acts, connector, metrics=metrics(keeper))
            failed, last = results[5], results[-1]
            assert (failed["hits"], failed["failed_blocks"]) == (blocks * BLOCK_TOKENS, blocks)
            expect_right(last, right, "after a load that failed")
            assert (last["hits"], last["failed_blocks"]) == (blocks * BLOCK_TOKENS, 0)
            assert failed["value"] == right
            if load == "async" or stage.async_scheduling:
                expect_right(failed, right, "of loads that failed")


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_leases_lost_before_the_load(stage: Stage, copy: str) -> None:
    """A lease ends between the answer and the load: nothing is loaded, and the request is computed."""
    prompts = [FIRST, SECOND]
    right = right_answers(prompts, 8)
    blocks = sum(hit_tokens(len(prompt)) for prompt in prompts) // BLOCK_TOKENS
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 1), SETTLE, RESET, SLOW_STEPS, lose_leases(2), generate(prompts, 8)]
        acts += [SETTLE, RESET, generate(prompts, 8)]
        connectors = by_load(keeper, **{"pillion.copy": copy})
        for load, results in zip(LOADS, stage.play(acts, *connectors, metrics=metrics(keeper)), strict=True):
            failed, last = results[5], results[-1]
            assert failed["failed_blocks"] == blocks
            expect_right(last, right, "after leases were lost")
            assert (last["hits"], last["failed_blocks"]) == (blocks * BLOCK_TOKENS, 0)
            assert failed["value"] == right
            if load == "async" or stage.async_scheduling:
                expect_right(failed, right, "of requests whose leases were lost")


@pytest.mark.parametrize("first_block", [0, 9])
def test_requests_beside_a_failed_load(stage: Stage, first_block: int) -> None:
    """vLLM leaves the blocks of a failed synchronous load in its own cache and recomputes them chunk by chunk. Requests that
    find them there in between answer from them (a fault of vLLM); no block that they compute may be kept."""
    common = prompt_of(600, 111)
    prompts = [common + prompt_of(60, 112), common + prompt_of(90, 113), common[:520] + prompt_of(90, 114)]
    right = right_answers(prompts, 8)
    late = [add(prompt, 24) for prompt in prompts[1:]]
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate([common], 1), SETTLE, SLOW_STEPS]
        for arrival in ("1", "2", "3", "5"):
            acts += [RESET, spoil(1, first_block), generate(prompts[:1], 24, at={arrival: late})]
            acts += [SETTLE, RESET, generate(prompts, 8), SETTLE]
        # Chunks leave room in a recomputation's steps for the other requests.
        (connector,) = by_load(keeper, "sync")
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), chunk_tokens=64)
        for failed, last in zip(results[5::7], results[8::7], strict=True):
            assert failed["failed_blocks"] > 0
            expect_right(last, right, "after requests beside a failed load")
            assert last["hits"] > 0


def test_no_block_of_a_failed_load_stays_in_the_prefix_cache(stage: Stage) -> None:
    """Its client leaves before vLLM gets the report of the failure, so no request computes the blocks again."""
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate([FIRST], 1), SETTLE, RESET, SLOW_STEPS, spoil(1)]
        acts += [generate([FIRST], 8, at={"0:scheduled": abort(0)}), generate([FIRST], 8)]
        (results,) = stage.play(acts, pillion(keeper.socket, "auto"), metrics=metrics(keeper))
        assert results[5]["failed_blocks"] > 0
        expect_right(results[6], right_answers([FIRST], 8), "after a load that failed")


# --- changing weights ---


@pytest.mark.parametrize("reset", [RESET, RESET_ALL], ids=["local", "connector"])
@pytest.mark.parametrize("step", ["1", "3", "9"])
def test_new_weights_while_requests_run(stage: Stage, step: str, reset: dict[str, Any]) -> None:
    """vLLM's own reset fails beside running requests, and later ones find old blocks in its cache: none of that is kept."""
    prompts = [FIRST, SECOND]
    later = [FIRST + prompt_of(40, 121), SECOND[:150] + prompt_of(90, 122)]
    with sidecar.serving(stage.directory) as keeper:
        replaced = [new_weights(), reset, *(add(prompt, 24) for prompt in later)]
        acts = [generate(prompts, 1), SETTLE, RESET, generate(prompts, 24, at={step: replaced}), SETTLE, RESET]
        acts += [generate(prompts + later, 8), SETTLE, RESET, generate(prompts + later, 8)]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper)):
            for after in (results[6], results[9]):
                expect_right(after, right_answers(prompts + later, 8, weights=1), "after new weights")
            # Later blocks are kept.
            assert results[9]["hits"] >= sum(hit_tokens(len(prompt)) for prompt in prompts)


def test_weights_that_come_back(stage: Stage) -> None:
    """After each change, by each kind of call, requests hit the blocks kept with the same weights, and no others."""
    prompts = [FIRST, SECOND]
    hit = sum(hit_tokens(len(prompt)) for prompt in prompts)
    with sidecar.serving(stage.directory) as keeper:
        updated = [call("start_weight_update"), call("update_weights", 1), call("finish_weight_update")]
        # These calls do not reset vLLM's own cache: users who want right answers do.
        changes = [
            ([call("new_weights", 1)], 1, 0),
            ([new_weights(0)], 0, hit),
            (updated, 1, hit),
            ([call("new_weights", 0)], 0, hit),
        ]
        acts = [generate(prompts, 8), SETTLE]
        for changed, _, _ in changes:
            acts += [*changed, RESET, generate(prompts, 8), SETTLE]
        for results in stage.play(acts, *by_load(keeper), metrics=metrics(keeper)):
            answers = [result for act, result in zip(acts, results, strict=True) if act["do"] == "generate"]
            expect_right(answers[0], right_answers(prompts, 8), "before")
            for answer, (_, weights, hits) in zip(answers[1:], changes, strict=True):
                expect_right(answer, right_answers(prompts, 8, weights), f"of weights {weights}")
                assert answer["hits"] == hits


@pytest.mark.parametrize("step", ["1", "3", "9"])
def test_nothing_is_kept_of_an_update(stage: Stage, step: str) -> None:
    """Requests that run during a change of weights send no queries, and none of their blocks is kept."""
    prompts = [FIRST, SECOND]
    with sidecar.serving(stage.directory) as keeper:
        begins = [call("start_weight_update"), *(add(prompt, 24) for prompt in prompts)]
        partly = {step: begins, "12": [call("update_weights", 1)], "16": [call("update_weights", 2)]}
        acts = [generate(prompts, 1), SETTLE, RESET, generate(prompts, 24, at=partly), call("finish_weight_update"), RESET]
        acts += [SETTLE]
        for weights in (0, 1, 2):
            acts += [new_weights(weights), RESET, generate(prompts, 8), SETTLE]
        for results in stage.play(acts, *by_load(keeper), metrics=metrics(keeper)):
            for weights, at in enumerate(range(9, len(results), 4)):
                expect_right(results[at], right_answers(prompts, 8, weights), f"of weights {weights}, after an update")


def test_sleep_discards_what_is_being_saved(stage: Stage) -> None:
    """vLLM sleeps, and its KV memory is freed, before the sidecar copies a save from it: another engine finds none of it."""
    with sidecar.serving(stage.directory) as keeper:
        falls_asleep = [generate([FIRST], 1, at={"0:scheduled": [stop(keeper)]}), SLEEP, go_on(keeper), SETTLE]
        (connector,) = by_load(keeper, "sync", **SHORT)
        (patient,) = by_load(keeper, "sync")
        parts = [(falls_asleep, connector), ([generate([FIRST], 4)], patient)]
        _, (answered,) = stage.play_each(parts, metrics=metrics(keeper), **FEW_BLOCKS)
        expect_right(answered, right_answers([FIRST], 4), "after another engine's sleep")


def test_sleep_and_wake(stage: Stage) -> None:
    """An engine that slept, at any moment of its requests, hits its earlier blocks, and nothing of its lost memory."""
    prompts = [FIRST, SECOND]
    right = right_answers(prompts, 8)
    with sidecar.serving(stage.directory) as keeper:
        sleeps = generate(prompts, 8, at={"1": [*abort(0, 1), SLEEP]})
        again = generate(prompts, 8)
        acts = [again, SETTLE, RESET, sleeps, again, SETTLE, RESET, again]
        for results in stage.play(acts, *by_load(keeper), metrics=metrics(keeper)):
            awake, last = results[4], results[7]
            expect_right(awake, right, "after a sleep")
            expect_right(last, right, "of what was kept after a sleep")
            assert awake["hits"] == last["hits"] == sum(hit_tokens(len(prompt)) for prompt in prompts)
