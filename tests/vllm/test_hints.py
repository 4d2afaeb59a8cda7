"""Hints of clients, from a request's params to the blocks in the sidecar, the request's record and the metrics.

The schema: shm-protocol/src/hints.rs. Limits and ends: tiers/src/dram/tests/hinted.rs.
"""

from __future__ import annotations

from typing import Any

import played
import pytest
from stage import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    RESET,
    SETTLE,
    Stage,
    block_count,
    expect_right,
    generate,
    metrics,
    pillion,
    prompt_of,
    right_answers,
)

from testkit import collector, sidecar

FIRST, KEPT, OTHER, WRONG = (prompt_of(tokens, tokens) for tokens in (70, 200, 150, 140))


def hints(*hinted: dict[str, Any]) -> dict[str, Any]:
    """A client's params."""
    return {"pillion": {"hints": list(hinted)}}


@pytest.mark.parametrize("stage", ["scheduler"], indirect=True)
def test_a_pin_reaches_the_sidecar_and_its_outcome_the_record(stage: Stage) -> None:
    """A prefetch tells what is nowhere, and a wrong hint is refused. Every request is answered."""
    acts = [
        # The ranks join in their first step.
        generate([FIRST], 2),
        SETTLE,
        generate([KEPT], 4, transfer=hints({"action": "pin", "seconds": 600}, {"action": "prefetch"})),
        RESET,
        generate([OTHER], 2, transfer=hints({"action": "demote"})),
        generate([WRONG], 2, transfer=hints({"action": "keep"})),
        SETTLE,
        generate([KEPT], 2),
        SETTLE,
    ]
    with collector.collecting() as receiver, sidecar.serving(stage.directory, anonymous=True) as keeper:
        told = {"pillion.record_otlp": receiver.url, "pillion.record_every": 1}
        [results] = stage.play(acts, pillion(keeper.socket, "async", **told), metrics=metrics(keeper))
        records = receiver.records()
        done = keeper.sample('pillion_hint_blocks_total{action="pin",outcome="done"}')
        assert done == block_count([KEPT], 4)
        assert keeper.sample('pillion_hint_blocks_total{action="prefetch",outcome="missing"}') > 0
    for at, (prompt, tokens) in {2: (KEPT, 4), 4: (OTHER, 2), 5: (WRONG, 2), 7: (KEPT, 2)}.items():
        expect_right(results[at], right_answers([prompt], tokens), str(at))
    pinned, demoted, wrong, plain = (records[f"request-{number}"] for number in range(1, 5))
    assert (pinned["pillion.hints.pin"], pinned["pillion.hints.prefetch"]) == ("done", "missing")
    assert demoted["pillion.hints.demote"] == "done" and wrong["pillion.hints.hints"] == "refused"
    assert not any(name.startswith("pillion.hints") for name in plain)


@pytest.mark.parametrize("stage", ["scheduler"], indirect=True)
def test_pins_end_with_their_engine(stage: Stage) -> None:
    """Its blocks stay until others need the room."""
    with sidecar.serving(stage.directory, anonymous=True) as keeper:
        acts = [generate([FIRST], 2), SETTLE, generate([KEPT], 4, transfer=hints({"action": "pin"})), SETTLE]
        stage.play(acts, pillion(keeper.socket, "async"), metrics=metrics(keeper))
        blocks = block_count([FIRST], 2) + block_count([KEPT], 4)
        assert keeper.sample('pillion_hint_blocks_total{action="pin",outcome="done"}') == block_count([KEPT], 4)
        assert keeper.metrics()["pillion_pool_used_bytes"] == blocks * BLOCK_BYTES
        keeper.wait_for(lambda: keeper.metrics()["pillion_hint_pinned_bytes"] == 0, "the end of the engine's pins")


def test_vllms_envelope_goes_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, beside the params."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    role, policy = played.scheduler(monkeypatch)
    action = KvHintAction(action_id="a", action_type="pillion.pin", action_version="1", payload={"seconds": 60})
    envelope = KvHintsEnvelope(protocol_version="1", message_id="m", actions=[action])
    role.announced(played.request("one", kv_hints=envelope))
    strange = KvHintsEnvelope(protocol_version="1", message_id="m", actions=[KvHintAction("a", "x", "1", {"x": object()})])
    role.announced(played.request("two", kv_hints=strange))
    [[number, params, told]] = policy.told("follow_hints")[:1]
    assert policy.told("follow_hints")[1][1:] == ("", None), "it has no form in JSON"
    assert params is None and '"action_type": "pillion.pin"' in told and '"payload": {"seconds": 60}' in told
    policy.answers["take_notices"] = ([], [], [], [(number, [("pin", "clipped")])])
    played.step(role)
    assert role.take_counts()["hints"] == {"pin.clipped": 1} and role.take_counts()["hints"] == {}


@pytest.mark.parametrize("stage", ["scheduler", "async-scheduler"], indirect=True)
def test_all_computed_blocks_of_short_requests_are_pinned(stage: Stage) -> None:
    """An asynchronous engine schedules the last step before it knows the key of the block that the step fills."""
    asked = [(prompt_of(tokens, tokens), 3 * BLOCK_TOKENS + 1 - tokens) for tokens in range(91, 97)]
    answers = [right_answers([prompt], tokens)[0] for prompt, tokens in asked]
    pinned = [generate([prompt], tokens, transfer=hints({"action": "pin"})) for prompt, tokens in asked]
    longer = [[*prompt, *answer, 7] for (prompt, _), answer in zip(asked, answers, strict=True)]
    with sidecar.serving(stage.directory, anonymous=True) as keeper:
        acts = [generate([FIRST], 2), SETTLE, *pinned, SETTLE, RESET, generate(longer, 4)]
        [results] = stage.play(acts, pillion(keeper.socket, "async"), metrics=metrics(keeper))
        blocks = sum(block_count([prompt], tokens) for prompt, tokens in asked)
        assert keeper.sample('pillion_hint_blocks_total{action="pin",outcome="done"}') == blocks
        assert results[-1]["hits"] == blocks * BLOCK_TOKENS
    expect_right(results[-1], right_answers(longer, 4), "behind the pinned blocks")
