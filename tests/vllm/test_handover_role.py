"""Parameters of routers on their way to the policy, and the answers to routers. Saves: connector-shim/tests/policy."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import played
import pytest
from played import BLOCK_TOKENS
from vllm.config import ModelConfig

TOKENS = 9 * BLOCK_TOKENS + 5
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
AWAITS = {"do_remote_prefill": True}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler role and its policy."""
    return played.scheduler(monkeypatch)


def _followed(engine: Any, transfer: Any, **more: Any) -> Any:
    """A request that has arrived, its awaited tokens, whether it is handed over, and the tokens for its tail's key."""
    role, policy = engine
    request = played.request("one", TOKENS, kv_transfer_params=transfer, **more)
    role.announced(request)
    [(prompt, reads, awaits, hands_over, _, tokens)] = policy.told("follow_request")
    assert (prompt, reads) == (TOKENS, True)
    return request, awaits, hands_over, tokens


def test_a_prompt_for_another_engine_is_offered_with_what_was_found_in_the_step_that_may_be_its_last(engine: Any) -> None:
    """The answer at its end has the parameters for the decode engine."""
    role, policy = engine
    request, awaits, hands_over, tokens = _followed(engine, TO_DECODE)
    assert (awaits, hands_over, tokens) == (None, True, list(range(TOKENS)))
    policy.answers["end_request"] = (TOKENS, [])
    told = played.finish(role, request)
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "pillion": {"tokens": TOKENS},
    }
    policy.calls.clear()
    awaiting, awaits, hands_over, _ = _followed(engine, told)
    assert (awaits, hands_over) == (TOKENS, False)
    policy.answers["end_request"] = (None, [])
    assert played.finish(role, awaiting) is None


def test_the_default_sampling_is_stated_on_request(engine: Any) -> None:
    """A router goes on with another engine's answer only if nothing counts the answer's tokens."""
    role, policy = engine
    policy.answers["end_request"] = (0, [])
    model: Any = SimpleNamespace(generation_config="vllm", override_generation_config={}, logits_processors=None)
    model.get_diff_sampling_param = lambda: ModelConfig.get_diff_sampling_param(model)
    role._vllm_config.model_config = model

    def stated() -> Any:
        request = played.request("one", 1, kv_transfer_params=TO_DECODE | {"pillion": {"sampling": True}})
        role.announced(request)
        return json.loads(played.finish(role, request)["pillion"]["sampling"])

    assert stated() == {"defaults": {}, "counts": False}
    model.override_generation_config = {"presence_penalty": 0.5, "max_new_tokens": 7}
    assert stated()["defaults"] == {"presence_penalty": 0.5, "max_tokens": 7}
    model.logits_processors = ["a.b:C"]
    assert stated()["counts"] is True
    model.logits_processors, role._vllm_config.watermark_config = None, SimpleNamespace()
    assert stated()["counts"] is True
    model.override_generation_config = None
    assert stated() is None


@pytest.mark.parametrize(
    ("saved", "awaited"), [(None, TOKENS), (TOKENS, TOKENS), (TOKENS + 1, TOKENS), (48, 48), ("all", TOKENS), (0, TOKENS)]
)
def test_who_goes_on_with_a_prompt_has_one_token_to_compute(engine: Any, saved: Any, awaited: int) -> None:
    """The engine waits for all tokens that another engine may save, or for fewer if the parameters have a smaller number; other
    numbers do not matter."""
    said = AWAITS if saved is None else AWAITS | {"pillion": {"tokens": saved}}
    assert _followed(engine, said)[1:] == (awaited, False, list(range(TOKENS)))


@pytest.mark.parametrize(
    ("own", "json"),
    [({"last": True}, '{"last": true}'), ({"hints": [{"action": "pin"}]}, '{"hints": [{"action": "pin"}]}'), ({1, 2}, "")],
)
def test_a_client_s_hints_go_to_the_policy_as_they_are(engine: Any, own: Any, json: str) -> None:
    """A value without a form in JSON is an empty text: the policy refuses it."""
    _, policy = engine
    _followed(engine, {"pillion": own})
    assert [told[1:] for told in policy.told("follow_hints")] == [(json, None)]


@pytest.mark.parametrize("transfer", [None, AWAITS, {"pillion": {}}, {"pillion": None}, {"pillion": False}])
def test_a_request_without_hints_costs_no_call(engine: Any, transfer: Any) -> None:
    """Also with routers' params."""
    _, policy = engine
    _followed(engine, transfer)
    assert not policy.told("follow_hints")


def test_without_a_tail_a_hit_ends_on_a_block_s_boundary(engine: Any) -> None:
    """For a key of more than tokens, the policy gets no tokens."""
    assert _followed(engine, AWAITS, cache_salt="salt")[1:] == (TOKENS, False, None)


def test_who_is_aborted_or_has_saved_nothing_sends_nobody_to_wait(engine: Any) -> None:
    """An aborted request has no answer, also before it was scheduled. Without saved blocks, as without a sidecar, the answer
    asks for no wait."""
    role, policy = engine
    assert played.finish(role, played.request("never", kv_transfer_params=TO_DECODE), "FINISHED_ABORTED") is None
    aborted, alone = (played.request(name, TOKENS, kv_transfer_params=TO_DECODE) for name in ("aborted", "alone"))
    role.announced(aborted)
    policy.answers["end_request"] = (TOKENS, [])
    assert played.finish(role, aborted, "FINISHED_ABORTED") is None
    role.announced(alone)
    policy.answers["end_request"] = (0, [])
    told = played.finish(role, alone, "FINISHED_STOPPED")
    assert (told["do_remote_prefill"], told["pillion"]) == (False, {"tokens": 0})


@pytest.mark.parametrize("transfer", [None, {}, {"do_remote_prefill": "yes", "do_remote_decode": 1}, "do_remote_prefill", [1]])
def test_what_is_no_request_for_a_handover_is_none(engine: Any, transfer: Any) -> None:
    """Other values of a client have no effect."""
    role, _ = engine
    request, awaits, hands_over, _ = _followed(engine, transfer)
    assert (awaits, hands_over) == (None, False)
    assert played.finish(role, request, "FINISHED_STOPPED") is None
