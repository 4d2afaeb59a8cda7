"""The scheduler role hands vLLM's calls to a played policy, and does in vLLM as the policy answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import played
import pytest
from played import BLOCK_TOKENS
from specs import full_attention, kv_cache_config
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from pillion import vllm_compat
from pillion.connector import PillionConnector, RankState, this_host
from pillion.scheduler import Scheduler
from pillion.worker import Worker
from testkit.engine_config import engine_config

Played = tuple[Scheduler, Any]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Played:
    """A scheduler role and its policy."""
    return played.scheduler(monkeypatch)


def test_of_which_drafters_vllm_drops_a_block() -> None:
    """vLLM's own flag decides, and in older releases every drafter with hidden states counts."""

    def drops(**speculative: Any) -> bool:
        config: Any = SimpleNamespace(speculative_config=SimpleNamespace(**speculative))
        return vllm_compat.drops_last_block(config)

    assert drops(use_eagle=lambda: True) and drops(use_eagle_block_drop=lambda: True)
    assert not drops(use_eagle=lambda: True, use_eagle_block_drop=lambda: False)
    assert not drops(use_eagle=lambda: False) and not drops()


# --- ends ---


@pytest.mark.parametrize(
    ("status", "tokens"), [("FINISHED_STOPPED", [8, 2]), ("FINISHED_LENGTH_CAPPED", []), ("FINISHED_ABORTED", [])]
)
def test_how_an_answer_ended(status: str, tokens: list[int]) -> None:
    """The policy gets vLLM's reason, and the last two tokens if the model ended its answer."""
    request: Any = SimpleNamespace(status=RequestStatus[status], output_token_ids=[4, 8, 2])
    assert vllm_compat.answer_end(request) == (status == "FINISHED_ABORTED", int(RequestStatus[status]), tokens)


# --- loads ---


@pytest.mark.parametrize("load", ["auto", "sync"])
@pytest.mark.parametrize(
    ("on_gpu", "copy", "sync"),
    [(True, "sidecar", True), (True, "engine", False), (False, "engine", False), (False, "sidecar", False)],
)
def test_a_load_that_can_fail_is_asynchronous(
    monkeypatch: pytest.MonkeyPatch, load: str, on_gpu: bool, copy: str, sync: bool
) -> None:
    """vLLM's prefix cache would have the blocks of a synchronous load before its end is known."""
    _, policy = played.scheduler(monkeypatch, on_gpu=on_gpu, copy=copy, load=load)
    assert (policy.facts["waits"], policy.facts["by_engine"]) == (sync, copy == "engine")


def test_loads_can_fail_where_ranks_copy_although_the_sidecar_was_to(engine: Played, connector: Any) -> None:
    """The handshake states it before the first request."""
    _, policy = engine
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankState("", this_host()), (0, 1): RankState("", this_host())})
    assert policy.told("ranks_copy") == []
    connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): RankState("", this_host()), (0, 1): RankState("", this_host(), copies=True)}
    )
    assert policy.told("ranks_copy") == [()]


def test_a_strict_engine_gives_up_what_was_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """If failed loads end their requests."""
    _, policy = played.scheduler(monkeypatch, failures="fail", strict_tokens=32)
    assert (policy.options.strict_tokens, policy.facts["recomputes"]) == (32, False)


# --- adapters ---

# The word for an adapter while its digest is being computed.
UNDIGESTED = b"?"


def _adapter(folder: Any, **more: Any) -> Any:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"one")
    return SimpleNamespace(lora_name="one", lora_int_id=1, lora_path=str(folder), **more)


def test_an_adapter_is_looked_at_again_in_the_step_in_which_ranks_load_it(
    engine: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its files changed while the request's blocks were loaded."""
    role, policy = engine
    request = played.request("one", lora_request=_adapter(tmp_path))
    words = [b"a" * 16]
    adapters = SimpleNamespace(look_at=lambda _: False, word=lambda _: words[0], take_notices=list)
    monkeypatch.setattr(role, "_adapters", adapters)
    role.match(request, 0)
    adapters.look_at = lambda _: words.__setitem__(0, UNDIGESTED)
    played.step(role, request)
    [(_, (_, _, _, asked, _), *_)] = policy.told("matched")
    [([(_, _, _, (_, _, _, begun, _))], *_)] = policy.told("begin_step")
    assert (asked, begun) == (b"a" * 16, UNDIGESTED)


def test_a_replaced_adapter_is_noticed_by_its_files(engine: Played, tmp_path: Any) -> None:
    """The adapters of the role itself: blocks computed with the replaced bytes are not kept."""
    role, policy = engine
    lora = _adapter(tmp_path, load_inplace=True)
    role.match(played.request("one", lora_request=lora), 0)
    assert policy.told("disown") == []
    role.adapter_loads(lora)
    assert policy.told("disown") == [()]


# --- the standing check ---


@pytest.mark.parametrize("step", [False, True], ids=["before the next step", "with a step"])
def test_after_a_difference_no_block_of_before_is_found_or_kept(engine: Played, step: bool) -> None:
    """Blocks of the hit in vLLM's own cache are dropped, too: the next request arrives before the next step."""
    role, policy = engine
    pool = BlockPool(16, True, BLOCK_TOKENS)
    [block] = pool.get_new_blocks(1)
    block.set_block_hash(bytes(36), BLOCK_TOKENS)
    role.bind(pool)
    role.announced(played.request("one"))
    played.step(role)
    assert block.block_hash is not None
    if step:
        policy.answers["begin_step"] = ([], [], True, 0)
        played.step(role)
    else:
        policy.answers["look_for_verdict"] = True
        role.announced(played.request("another"))
    assert block.block_hash is None


# --- blocks reused next ---


def test_the_policy_is_named_the_blocks_that_vllm_reuses_next(engine: Played) -> None:
    """In vLLM's order, and only where the policy asks for them."""
    role, policy = engine
    pool = BlockPool(16, True, BLOCK_TOKENS)
    used = pool.get_new_blocks(12)
    pool.free_blocks(reversed(used[:6]))
    role.bind(pool)
    played.step(role)
    policy.answers["begin_step"] = ([], [], False, 5)
    played.step(role)
    policy.answers["begin_step"] = ([], [], False, 100)
    played.step(role)
    none, some, every = [named for *_, named in policy.told("end_step")]
    assert none == []
    assert some == every[:5]
    assert every == [block.block_id for block in pool.get_new_blocks(9)]


# --- the connector around the role ---


@pytest.fixture
def connector(engine: Played) -> Any:
    """The engine's connector, as in its scheduler process."""
    connector: Any = PillionConnector.__new__(PillionConnector)
    (connector._scheduler, _), connector._worker, connector._out = engine, None, ""
    return connector


def test_every_reset_of_vllm_counts(engine: Played, connector: Any) -> None:
    """A reset of vLLM alone counts, and one that reaches the connector."""
    _, policy = engine
    pool = SimpleNamespace(reset_prefix_cache=lambda: False)
    connector.bind_gpu_block_pool(pool)
    assert pool.reset_prefix_cache() is False
    assert connector.reset_cache() is True
    assert len(policy.told("weights_may_have_changed")) == 2


def test_a_rank_that_stays_out_turns_the_role_off(engine: Played, connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is logged once, and vLLM runs as if there were no connector."""
    _, policy = engine
    said: list[str] = []
    monkeypatch.setattr("pillion.connector.logger.error", lambda text, *parts: said.append(text % parts))
    policy.answers["matched"] = (2 * BLOCK_TOKENS, True)
    request = played.request("one")
    assert connector.get_num_new_matched_tokens(request, 0) == (2 * BLOCK_TOKENS, True)
    told = {(0, 0): None, (0, 1): RankState("no room"), (0, 2): RankState("no room either")}
    connector.set_xfer_handshake_metadata_pp_aware(told)
    connector.set_xfer_handshake_metadata_pp_aware(told)
    assert len(said) == 1 and "rank 1: no room." in said[0]
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert policy.told("disconnect") == [()], "the session has ended"
    assert connector.build_connector_meta(None).run == b""
    assert connector.reset_cache() is True


def test_a_rank_on_another_host_turns_the_role_off(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sidecar is another one. Ranks beside the scheduler do not turn it off."""
    said: list[str] = []
    monkeypatch.setattr("pillion.connector.logger.error", lambda text, *parts: said.append(text % parts))
    connector.set_xfer_handshake_metadata_pp_aware({(0, rank): RankState("", this_host()) for rank in range(2)})
    assert connector._scheduler and not said
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankState("", this_host()), (0, 1): RankState("", "another")})
    assert connector._scheduler is None
    assert len(said) == 1 and "rank 1 runs on another host" in said[0]


def test_ranks_say_where_they_serve_or_why_not(connector: Any) -> None:
    """The report comes from any part of the rank."""
    assert connector.get_handshake_metadata() is None
    assert this_host()
    for copies in (False, True):
        connector._worker = SimpleNamespace(out_reason="", copies=copies)
        assert connector.get_handshake_metadata() == RankState("", this_host(), copies)
    connector._worker = SimpleNamespace(out_reason="memory")
    assert connector.get_handshake_metadata() == RankState("memory")
    connector._worker, connector._out = None, "windows"
    assert connector.get_handshake_metadata() == RankState("windows")


@pytest.mark.parametrize("count", [1, 2])
def test_a_rank_without_a_scheduler_role_does_nothing(monkeypatch: pytest.MonkeyPatch, connector: Any, count: int) -> None:
    """No step begins or ends in it, and vLLM calls every hook."""
    nothing: Any = None
    monkeypatch.setattr(vllm_compat, "hash_tokens", lambda _: BLOCK_TOKENS)
    groups = kv_cache_config(full_attention())
    groups.kv_cache_groups *= count
    connector._scheduler, connector._worker = None, Worker(engine_config(), nothing, groups)
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    connector.start_load_kv(nothing)
    connector.wait_for_layer_load("layer")
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
