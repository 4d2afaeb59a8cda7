"""Beside another connector (`MultiConnector`): its blocks are never kept, and no block computed upon them.

The other connector of these tests loads wrong KV. Pillion keeps and gives back the KV of the engine itself.
"""

from __future__ import annotations

from typing import Any

import played
import pytest
from stage import (
    RESET,
    SETTLE,
    Stage,
    block_count,
    expect_right,
    generate,
    hit_tokens,
    metrics,
    pillion,
    prompt_of,
    right_answers,
    wait_saved,
)

from testkit import sidecar

PROMPTS = [prompt_of(333, 71), prompt_of(100, 72)]
HITS = sum(hit_tokens(len(prompt)) for prompt in PROMPTS)
OUTPUT_TOKENS = 8
BROUGHT = {"do_remote_prefill": True}
COMPUTED_FOR_ANOTHER = {"do_remote_decode": True}
KINDS: dict[str, dict[str, Any]] = {"full": {"kind": "full"}, "set": {"kind": "set", "window": 50}}


def several(keeper: sidecar.Sidecar, first: bool = True, **remote: Any) -> dict[str, Any]:
    """MultiConnector with the other connector, `first` or last, and Pillion. vLLM reads the failure policy of the outer
    configuration alone."""
    others = {"kv_connector": "RemoteConnector", "kv_connector_module_path": "scripted.remote_connector"}
    children = [others | {"kv_connector_extra_config": remote}, pillion(keeper.socket, "async")]
    children = [child | {"kv_role": "kv_both"} for child in (children if first else children[::-1])]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}


def brought(prompts: list[list[int]]) -> Any:
    """Prompts with KV by the other connector."""
    return generate(prompts, OUTPUT_TOKENS, transfer=dict(BROUGHT))


@pytest.mark.supports("beside-others")
@pytest.mark.parametrize(("kind", "sync"), [("full", True), ("full", False), ("set", False)])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_what_another_connector_loads_is_not_kept(stage: Stage, kind: str, sync: bool, first: bool) -> None:
    """The answers upon it are not kept, either. The engine's own KV of the same prompts is kept later."""
    right, own = right_answers(PROMPTS, OUTPUT_TOKENS), generate(PROMPTS, OUTPUT_TOKENS)
    with sidecar.serving(stage.directory) as keeper:
        acts = [brought(PROMPTS), RESET, brought(PROMPTS), SETTLE, RESET, own, SETTLE, RESET, own]
        (results,) = stage.play(acts, several(keeper, first, sync=sync), metrics=metrics(keeper), **KINDS[kind])
        once, again, cold, warm = results[0], results[2], results[5], results[8]
        for wrong in (once, again):
            assert wrong["wrong"] >= HITS and wrong["hits"] == HITS, "the other connector has brought its wrong KV"
        assert cold["hits"] == 0, "nothing of it was kept"
        expect_right(cold, right, "after what another connector loaded")
        expect_right(warm, right, "of what was kept beside another connector")
        assert warm["hits"] == HITS


@pytest.mark.parametrize("beside_others", [False, True])
def test_words_of_routers_are_for_the_other_connector(monkeypatch: pytest.MonkeyPatch, beside_others: bool) -> None:
    """The other connector loads awaited prompts, and hands over prompts that another engine answers."""
    role, policy = played.scheduler(monkeypatch, beside_others=beside_others)
    for name, words in (("one", BROUGHT), ("two", COMPUTED_FOR_ANOTHER), ("three", None)):
        role.announced(played.request(name, kv_transfer_params=words))
    told = [(reads, awaits is not None, hands_over) for _, reads, awaits, hands_over, *_ in policy.told("follow_request")]
    alone, beside = [(True, True, False), (True, False, True)], [(False, False, False), (True, False, False)]
    assert told == [*(beside if beside_others else alone), (True, False, False)]


@pytest.mark.supports("beside-others")
def test_what_another_connector_fails_to_load_is_computed_and_kept(stage: Stage) -> None:
    """Such a request is served here from then on. vLLM cannot undo a failed synchronous load."""
    right, own = right_answers(PROMPTS, OUTPUT_TOKENS), generate(PROMPTS, OUTPUT_TOKENS)
    with sidecar.serving(stage.directory) as keeper:
        connector = several(keeper, fails=True)
        acts = [brought(PROMPTS), wait_saved(block_count(PROMPTS, OUTPUT_TOKENS)), RESET, own]
        (results,) = stage.play(acts, connector, metrics=metrics(keeper))
        for result in (results[0], results[3]):
            expect_right(result, right, "after loads of another connector that failed")
        assert results[3]["hits"] == HITS


@pytest.mark.supports("beside-others")
def test_the_engine_that_computes_prompts_for_others_keeps_them(stage: Stage) -> None:
    """Params of routers belong to the other connector. Pillion adds no params: vLLM fails at the same key twice."""
    right, own = right_answers(PROMPTS, OUTPUT_TOKENS), generate(PROMPTS, OUTPUT_TOKENS)
    with sidecar.serving(stage.directory) as keeper:
        computed = generate(PROMPTS, OUTPUT_TOKENS, transfer=dict(COMPUTED_FOR_ANOTHER))
        parts = [([computed, wait_saved(block_count(PROMPTS, OUTPUT_TOKENS))], several(keeper)), ([own], several(keeper))]
        (answered, _), (warm,) = stage.play_each(parts, metrics=metrics(keeper))
        expect_right(answered, right, "of an engine that computes for others")
        expect_right(warm, right, "after a restart")
        assert warm["hits"] == HITS
