"""vLLM's own schedulers, 0.33's too, drive the connector; the KV of the scripted worker is checked byte by byte.

Real CPU engines have no asynchronous scheduling, with one step in flight; these engines do.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from stage import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    EVERY_LOAD,
    LOADS,
    RESET,
    RESET_ALL,
    SETTLE,
    SLOW_STEPS,
    Stage,
    block_count,
    by_load,
    generate,
    go_on,
    hit_tokens,
    metrics,
    new_weights,
    pillion,
    prompt_of,
    right_answers,
    spoil,
    stop,
    wait_saved,
)

from testkit import model, sidecar


def test_hook_order_of_a_step(stage: Stage) -> None:
    """The scripted engine calls the hooks as vLLM does: the connector's tests rely on that."""
    log = stage.directory / "hooks.log"
    logging = {"kv_connector": "LoggingConnector", "kv_connector_module_path": "scripted.logging_connector"}
    (results,) = stage.play(
        [generate([prompt_of(40, 1)], 1), RESET_ALL], logging | {"kv_connector_extra_config": {"hook_log": str(log)}}
    )
    assert results[0]["value"] == right_answers([prompt_of(40, 1)], 1)
    assert results[1]["value"] is True
    hooks = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
    layers = [("worker", "wait_for_layer_load"), ("worker", "save_kv_layer")] * model.TINY.layers
    first_step = [
        ("worker", "register_kv_caches"),
        ("scheduler", "get_num_new_matched_tokens"),
        ("scheduler", "update_state_after_alloc"),
        ("scheduler", "build_connector_meta"),
        ("worker", "handle_preemptions"),
        ("worker", "bind_connector_metadata"),
        *layers,
        ("worker", "start_load_kv"),
        ("worker", "wait_for_save"),
        ("worker", "get_finished"),
        ("worker", "clear_connector_metadata"),
    ]
    assert hooks[: len(first_step)] == first_step
    assert hooks[-1] == ("scheduler", "reset_cache")
    assert ("scheduler", "request_finished_all_groups") in hooks


@pytest.mark.supports("full", "vllm", "loads", "async-scheduling")
def test_blocks_come_back_byte_exact(stage: Stage) -> None:
    """Saved, dropped locally, loaded: every KV position that attention reads is right, with each way to load."""
    prompts = [prompt_of(700, 11), prompt_of(333, 12), prompt_of(65, 13)]
    stored, hit = block_count(prompts, 8), sum(hit_tokens(len(prompt)) for prompt in prompts)
    right = right_answers(prompts, 8)
    with sidecar.serving(stage.directory) as keeper:
        acts = [
            generate(prompts, 8),
            wait_saved(stored),
            RESET,
            generate(prompts, 8),
            RESET_ALL,
            generate(prompts, 8),
            SETTLE,
        ]
        # Each has a namespace, so the first answers of every engine are cold.
        loads = ["sync", "async", "auto"]
        connectors = by_load(keeper, *loads)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper)):
            cold, _, reset, warm, reset_all, after_reset, _ = results
            assert cold["value"] == warm["value"] == after_reset["value"] == right
            assert reset["value"] is reset_all["value"] is True
            # Equal weights hit their kept blocks after each reset of vLLM.
            assert (cold["hits"], warm["hits"], after_reset["hits"]) == (0, hit, hit)
            assert sum(act["wrong"] for act in results) == 0
        assert keeper.metrics()["pillion_loaded_bytes_total"] == 2 * len(loads) * hit // BLOCK_TOKENS * BLOCK_BYTES
        assert keeper.metrics()["pillion_leases"] == 0


def test_the_oracle_sees_wrong_bytes(stage: Stage) -> None:
    """One wrong value in each block of the pool: every loaded block is noticed, and the answer is wrong."""
    prompts = [prompt_of(200, 41), prompt_of(100, 42)]
    hit = sum(hit_tokens(len(prompt)) for prompt in prompts)
    right = right_answers(prompts, 4)
    with sidecar.serving(stage.directory) as keeper:
        acts = [
            generate(prompts, 4),
            wait_saved(block_count(prompts, 4)),
            RESET,
            {"do": "damage_pool", "with": {"path": str(keeper.pool)}},
            generate(prompts, 4),
        ]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper)):
            cold, *_, damaged = results
            assert (cold["value"], cold["wrong"]) == (right, 0)
            assert damaged["hits"] == hit
            assert damaged["wrong"] >= hit // BLOCK_TOKENS
            assert all(answer != wanted for answer, wanted in zip(damaged["value"], right, strict=True))


def test_a_block_whose_load_failed_counts_as_not_loaded(stage: Stage) -> None:
    """vLLM schedules a step to compute the block again, and lists the block. The step is skipped, and the next request reads a
    block without any writer."""
    prompt = prompt_of(200, 43)
    skip = {"do": "fail_step", "with": {"fault": "skip"}}
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate([prompt], 1), SETTLE, RESET, spoil(1, 1), skip, generate([prompt], 1), generate([prompt], 1)]
        (results,) = stage.play(acts, *by_load(keeper, "async"), metrics=metrics(keeper))
        *_, failed, last = results
        assert (failed["failed_steps"], failed["value"]) == (1, [[]])
        assert failed["failed_blocks"] > 0
        assert last["wrong"] > 0
        assert last["wrong_loaded"] == 0


def test_few_blocks_and_aborts(stage: Stage) -> None:
    """Blocks are reused at once, by preemption and by aborts: a late save or load would change bytes."""
    prompts = [prompt_of(200, seed) for seed in range(21, 29)]
    right, right_short = right_answers(prompts, 64), right_answers(prompts, 16)
    with sidecar.serving(stage.directory) as keeper:
        acts: list[dict[str, Any]] = [generate(prompts, 64)]
        for step in range(6):
            aborts = [{"do": "abort", "with": {"index": index}} for index in range(0, len(prompts), 2)]
            acts += [RESET, generate(prompts, 16, at={str(step): aborts})]
        acts += [generate(prompts, 64)]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper), blocks=24, max_model_len=704):
            first, *middle, last = results
            assert first["value"] == last["value"] == right
            assert first["preemptions"] > 0 and last["preemptions"] > 0
            for act in middle[1::2]:
                assert act["value"][1::2] == right_short[1::2]
            assert sum(act["wrong"] for act in results) == 0
            assert sum(act["hits"] for act in results) > 0
        assert keeper.metrics()["pillion_load_failures_total"] == 0


def test_failed_load_is_recomputed_and_never_kept(stage: Stage) -> None:
    """Blocks computed on top of missing blocks are never served, from each place in the prompt on."""
    prompts = [prompt_of(500, 51), prompt_of(300, 52)]
    right = right_answers(prompts, 40)
    with sidecar.serving(stage.directory) as keeper:
        # Half of the prompt is kept, so the step of the failed load fills blocks on top of it.
        halves = [prompt[:257] for prompt in prompts]
        acts = [generate(halves, 1), wait_saved(block_count(halves, 1)), RESET, SLOW_STEPS]
        for first in (0, 3, 7):
            acts += [spoil(2, first), generate(prompts, 40), RESET, generate(prompts, 40), RESET]
        connectors = by_load(keeper)
        for load, results in zip(LOADS, stage.play(acts, *connectors, metrics=metrics(keeper)), strict=True):
            for spoiled, failed, _, warm, _ in (results[4 + at : 9 + at] for at in range(0, 15, 5)):
                assert spoiled["value"] is None
                assert failed["failed_blocks"] > 0
                assert warm["failed_blocks"] == 0 and warm["hits"] > 0
                assert (warm["value"], warm["wrong"]) == (right, 0)
                assert failed["value"] == right
                # A synchronous load's step has read the missing blocks, and its token is taken back.
                if load == "async" or stage.async_scheduling:
                    assert failed["wrong"] == 0


def test_loads_that_fail_in_two_steps_running(stage: Stage) -> None:
    """With a step in flight, the second load has failed before the first failure is reported, so the report does not cover
    it."""
    prompts = [prompt_of(65, 55), prompt_of(700, 56)]
    right = right_answers(prompts, 4)
    with sidecar.serving(stage.directory) as keeper:
        kept = [prompts[0], prompts[1][:257]]
        late = {"do": "add", "with": {"prompt": prompts[1], "output_tokens": 4}}
        acts = [
            generate(kept, 1),
            wait_saved(block_count(kept, 1)),
            RESET,
            SLOW_STEPS,
            spoil(2),
            generate(prompts[:1], 4, at={"1": [late]}),
            RESET,
            generate(prompts, 4),
        ]
        (results,) = stage.play(acts, pillion(keeper.socket, "sync"), metrics=metrics(keeper))
        *_, failed, _, warm = results
        assert failed["failed_blocks"] == sum(hit_tokens(len(prompt)) for prompt in kept) // BLOCK_TOKENS
        assert warm["hits"] > 0
        assert (warm["value"], warm["wrong"]) == (right, 0)


def test_loads_that_always_fail(stage: Stage) -> None:
    """A request with a failed load sends no second query: it would wait for ever."""
    prompts = [prompt_of(200, 57), prompt_of(100, 58)]
    right = right_answers(prompts, 4)
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 4), wait_saved(block_count(prompts, 4)), RESET, spoil(EVERY_LOAD), generate(prompts, 4)]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper)):
            failed = results[-1]
            assert failed["failed_blocks"] == sum(hit_tokens(len(prompt)) for prompt in prompts) // BLOCK_TOKENS
            assert failed["value"] == right


def test_saves_of_a_frozen_sidecar_are_given_up(stage: Stage) -> None:
    """Blocks are reused while the sidecar is frozen before their saves: the blocks that it keeps after the thaw are right."""
    prompts = [prompt_of(200, seed) for seed in range(61, 65)]
    with sidecar.serving(stage.directory) as keeper:
        # The first two requests end, and leave their blocks to the other two, about step 25. Those miss after 200 ms.
        slow, fast = ({"do": "slow_steps", "with": {"seconds": seconds}} for seconds in (0.03, 0))
        plays = [
            generate(prompts, 24, at={str(frozen): [stop(keeper)], "25": [slow], str(thawed): [go_on(keeper), fast]})
            for frozen, thawed in ((0, 60), (1, 36), (2, 37), (24, 39))
        ]
        # Other weights each time, without hits of earlier blocks.
        acts = [act for one in plays for act in (one, RESET, generate(prompts, 24), new_weights(), RESET)]
        settings = {"pillion.query_timeout_us": 2000}
        connectors = by_load(keeper, **settings)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper), blocks=16, max_model_len=480):
            for weights, at in enumerate(range(0, len(results), 5)):
                cold, _, warm, *_ = results[at : at + 5]
                assert cold["value"] == warm["value"] == right_answers(prompts, 24, weights)
                assert cold["wrong"] == warm["wrong"] == 0
            assert sum(act["hits"] for act in results) > 0
        assert keeper.metrics()["pillion_saves_lost_to_reuse_total"] > 0


def test_aborts_with_loads_in_flight(stage: Stage) -> None:
    """A client leaves while its blocks are being loaded; the next request gets blocks that no copy writes any more."""
    prompts = [prompt_of(300, seed) for seed in range(71, 75)]
    right = right_answers(prompts, 8)
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 8), wait_saved(block_count(prompts, 8))]
        everyone = [{"do": "abort", "with": {"index": index}} for index in range(len(prompts))]
        for step in ("1", "2", "3"):
            again = [{"do": "add", "with": {"prompt": prompt, "output_tokens": 8}} for prompt in prompts]
            acts += [RESET, generate(prompts, 8, at={step: everyone + again})]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper), blocks=48):
            for act in results[3::2]:
                assert act["value"][len(prompts) :] == right
                assert act["hits"] > 0 and act["wrong"] == 0
        keeper.wait_for(lambda: keeper.metrics()["pillion_leases"] == 0, "end of all leases")


@pytest.mark.parametrize("reset", [RESET, RESET_ALL], ids=["local", "connector"])
def test_reset_between_steps(stage: Stage, reset: dict[str, Any]) -> None:
    """A reset while requests run, with the same weights afterwards: nothing is wrong, and everything is found."""
    prompts = [prompt_of(400, 81), prompt_of(150, 82)]
    right = right_answers(prompts, 40)
    with sidecar.serving(stage.directory) as keeper:
        acts: list[dict[str, Any]] = []
        # From step 2 on both requests have begun.
        for step in ("2", "3", "20"):
            acts += [generate(prompts, 40, at={step: [reset]}), RESET, generate(prompts, 40)]
            acts += [wait_saved(block_count(prompts, 40)), RESET, generate(prompts, 40)]
        connectors = by_load(keeper)
        for results in stage.play(acts, *connectors, metrics=metrics(keeper)):
            for during, _, after, _, _, warm in (results[at : at + 6] for at in range(0, len(results), 6)):
                assert during["value"] == after["value"] == warm["value"] == right
                assert during["wrong"] == after["wrong"] == warm["wrong"] == 0
                assert warm["hits"] == sum(hit_tokens(len(prompt)) for prompt in prompts)


def test_one_prefix_twice_in_a_step(stage: Stage) -> None:
    """Two requests of one step share a prefix, cold, warm, and when the load for both fails."""
    common = prompt_of(200, 91)
    prompts = [common + prompt_of(300, 92), common + prompt_of(60, 93), common + prompt_of(60, 93)]
    right = right_answers(prompts, 12)
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 12), SETTLE, RESET, generate(prompts, 12), RESET]
        acts += [spoil(), generate(prompts, 12), RESET, generate(prompts, 12)]
        connectors = by_load(keeper)
        for load, results in zip(LOADS, stage.play(acts, *connectors, metrics=metrics(keeper)), strict=True):
            cold, _, _, warm, _, _, failed, _, last = results
            for act in (cold, warm, last):
                assert (act["value"], act["wrong"], act["failed_blocks"]) == (right, 0, 0)
            assert warm["hits"] > 0 and failed["failed_blocks"] > 0 and last["hits"] > 0
            if load == "async":
                assert (failed["value"], failed["wrong"]) == (right, 0)
