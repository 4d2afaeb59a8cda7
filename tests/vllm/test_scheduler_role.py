"""The scheduler role over a session that is played: where what vLLM computes belongs, and when nobody knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from played import BLOCK_TOKENS, ELSEWHERE, HERE, Engine
from specs import full_attention, kv_cache_config
from vllm.v1.core.block_pool import BlockPool

from pillion import tracked, vllm_compat
from pillion.adapters import NO_CACHE
from pillion.checking import TOKENS
from pillion.config import Config
from pillion.connector import PillionConnector, Served, StaysOut, this_host
from pillion.reports import Reports
from pillion.set_worker import SetWorker
from pillion.worker import Worker


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose session is bound."""
    return Engine(monkeypatch)


# --- what was found ---


def test_what_was_found_is_offered_once_and_nothing_of_the_request_s_own(engine: Engine) -> None:
    """In the step after the first: blocks that the request computed itself would be marked as used by it."""
    request = engine.arrive(9 * BLOCK_TOKENS + 1)
    engine.compute(request, found=3 * BLOCK_TOKENS, most=2 * BLOCK_TOKENS)
    assert engine.session.saves == [(0, 3, [4, 5])]
    engine.go_on(request)
    assert engine.session.saves[1:] == [(0, 0, [1, 2, 3]), (0, 5, [6, 7, 8, 9])]
    engine.decode(request)
    assert len(engine.session.saves) == 3


def test_after_a_load_that_failed_everything_is_saved_anew(engine: Engine) -> None:
    """What was found is among it, once."""
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    engine.compute(request, found=2 * BLOCK_TOKENS, most=BLOCK_TOKENS)
    engine.role.loads_failed(set())
    engine.go_on(request)
    assert engine.session.saves[1:] == [(0, 0, [1, 2, 3, 4])]


def test_a_preempted_request_does_not_count_its_hit_again(engine: Engine) -> None:
    """vLLM counts by sources what requests had when they were first admitted."""
    engine.session.hits = 3
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    for preemptions in range(2):
        request.num_preemptions = preemptions
        assert engine.ask(request) == 3 * BLOCK_TOKENS
        assert engine.ask(request) == 3 * BLOCK_TOKENS, "asked again"
        engine.compute(request, found=3 * BLOCK_TOKENS)
        assert engine.role.sources(request, 3 * BLOCK_TOKENS) == {"host": 3 * BLOCK_TOKENS}
        assert engine.role.sources(request, 4 * BLOCK_TOKENS) == {}
    assert engine.role.take_hit_tokens() == {"host": 3 * BLOCK_TOKENS} and engine.role.take_hit_tokens() == {}


def test_a_request_whose_load_failed_lets_others_pass_it(engine: Engine) -> None:
    """vLLM, which has no room for it, would look at none behind it."""
    request = engine.arrive(9 * BLOCK_TOKENS + 1)
    engine.ask(request)
    engine.role.requests_failed({request.request_id})
    assert [engine.role.match(request, 0) for _ in range(4)] == [(0, False), (None, False)] * 2


# --- drafters ---


@pytest.mark.supports("eagle")
def test_the_block_that_vllm_has_dropped_for_a_drafter_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has it: each request would hit this block alone again. A longer hit is worth its load."""
    drops = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
    engine = Engine(monkeypatch, speculative=drops)
    engine.session.hits = 1
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    assert engine.role.match(request, 2 * BLOCK_TOKENS) == (0, False)
    assert engine.session.released == [0], "nothing stays leased"
    engine.session.hits = 2
    assert engine.role.match(request, 2 * BLOCK_TOKENS)[0] == 2 * BLOCK_TOKENS
    without = Engine(monkeypatch)
    without.session.hits = 1
    assert without.role.match(without.arrive(4 * BLOCK_TOKENS + 1), 2 * BLOCK_TOKENS)[0] == BLOCK_TOKENS


def test_of_which_drafters_vllm_drops_a_block() -> None:
    """By vLLM's own word, and in older releases for each drafter with hidden states."""

    def drops(**speculative: Any) -> bool:
        config: Any = SimpleNamespace(speculative_config=SimpleNamespace(**speculative))
        return vllm_compat.drops_last_block(config)

    assert drops(use_eagle=lambda: True) and drops(use_eagle_block_drop=lambda: True)
    assert not drops(use_eagle=lambda: True, use_eagle_block_drop=lambda: False)
    assert not drops(use_eagle=lambda: False) and not drops()


def test_who_is_not_followed_overwrites_all_the_same(engine: Engine) -> None:
    """Behind what vLLM's own cache had of it."""
    engine.compute(engine.arrive(4 * BLOCK_TOKENS + 1))
    engine.session.read = {1, 2, 3, 4}
    stranger = SimpleNamespace(req_id="stranger", block_ids=[[2, 3, 4]], num_computed_tokens=BLOCK_TOKENS)
    engine._step([stranger], {"stranger": 1})
    assert engine.session.read == {1, 2}


# --- weights that may have changed ---


def test_a_session_that_goes_on_in_a_block_of_before_keeps_nothing_of_it(engine: Engine) -> None:
    """Half of its first block was computed with the old weights."""
    request = engine.arrive(10)
    engine.compute(request)
    engine.role.weights_may_have_changed()
    engine.session.namespace = ELSEWHERE
    engine.decode()
    request.num_tokens = 2 * BLOCK_TOKENS + 1
    request.block_hashes = [bytes([block] * 32) for block in range(2)]
    resumed = SimpleNamespace(req_id=request.request_id, block_ids=[[1, 2, 3]], num_computed_tokens=10)
    engine._step([resumed], {request.request_id: request.num_tokens - 10})
    assert engine.session.saves == []
    other = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(other)
    assert len(engine.session.saves) == 1, "what begins anew is kept"


def test_what_was_computed_before_is_not_kept(engine: Engine) -> None:
    """Not even if it is found in vLLM's own cache; what is computed then is, once the session is bound again."""
    first = engine.arrive(4 * BLOCK_TOKENS + 1)
    engine.compute(first)
    assert engine.session.saves == [(0, 0, [1, 2, 3, 4])]
    engine.role.weights_may_have_changed()
    assert (engine.session.counts, engine.session.voided) == ([1], 1)
    assert engine.decode(first).weights == 1
    engine.session.namespace = ELSEWHERE
    engine.decode(first)
    assert len(engine.session.saves) == 1
    second = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(second)
    assert engine.session.saves[1:] == [(1, 0, [6, 7])]


@pytest.mark.parametrize("anew", [False, True])
def test_an_image_of_before_is_not_kept_with_the_new_weights(engine: Engine, anew: bool) -> None:
    """vLLM keeps what its encoder made, unless that makes it anew; nor is what is computed upon such blocks, found locally."""
    place = SimpleNamespace(offset=2 * BLOCK_TOKENS + 3, length=BLOCK_TOKENS)
    image = [SimpleNamespace(identifier="image", mm_position=place)]
    engine.role.weights_may_have_changed()
    engine.session.namespace = ELSEWHERE
    engine.decode()
    seen = engine.arrive(4 * BLOCK_TOKENS + 1)
    seen.mm_features = image
    if anew:
        engine.encoded = {seen.request_id: [0]}
    engine.compute(seen, most=BLOCK_TOKENS)
    engine.encoded = {}
    engine.go_on(seen)
    saved = [block for *_, blocks in engine.session.saves for block in blocks]
    assert saved == ([1, 2, 3, 4] if anew else [1, 2])
    engine.session.saves.clear()
    again = engine.arrive(5 * BLOCK_TOKENS + 1)
    again.mm_features = image
    found = SimpleNamespace(req_id=again.request_id, block_ids=[[1, 2, 3, 4, 20, 21]], num_computed_tokens=4 * BLOCK_TOKENS)
    again.num_computed_tokens = 4 * BLOCK_TOKENS
    engine._step([found], {again.request_id: BLOCK_TOKENS + 1})
    saved = [block for *_, blocks in engine.session.saves for block in blocks]
    assert saved == ([20] if anew else [])


@pytest.mark.parametrize("namespace", [HERE, ELSEWHERE])
def test_saves_wait_for_the_binding(engine: Engine, namespace: int) -> None:
    """They are not lost, whatever the session is bound to: ranks have looked before they computed."""
    engine.compute(engine.arrive(2 * BLOCK_TOKENS + 1))
    engine.role.weights_may_have_changed()
    request = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(request)
    assert len(engine.session.saves) == 1
    engine.session.namespace = namespace
    engine.decode(request)
    assert engine.session.saves[1:] == [(1, 0, [4, 5])]


def test_the_first_connection_is_bound_later(engine: Engine) -> None:
    """Nothing was computed before it."""
    engine.session.namespace = 0
    request = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(request)
    assert engine.session.saves == [(0, 0, [1, 2])]
    engine.session.namespace = HERE
    engine.decode(request)
    assert engine.session.voided == 0


def test_an_update_that_goes_on(engine: Engine) -> None:
    """Nothing is asked for and nothing saved until it ends, and then nothing of it."""
    engine.session.hits = 2
    engine.role.updating = True
    engine.role.weights_may_have_changed()
    engine.session.namespace = HERE
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    assert engine.ask(request) == 0
    engine.compute(request)
    engine.decode(request)
    engine.role.updating = False
    engine.role.weights_may_have_changed()
    engine.session.namespace = ELSEWHERE
    engine.decode(request)
    assert engine.session.saves == []
    assert engine.ask(engine.arrive(4 * BLOCK_TOKENS + 1)) == 2 * BLOCK_TOKENS


# --- synchronous loads ---


@pytest.mark.parametrize("load", ["auto", "sync"])
@pytest.mark.parametrize(
    ("on_gpu", "copy", "sync"),
    [(True, "sidecar", True), (True, "engine", False), (False, "engine", False), (False, "sidecar", False)],
)
def test_a_load_that_can_fail_is_asynchronous(
    monkeypatch: pytest.MonkeyPatch, load: str, on_gpu: bool, copy: str, sync: bool
) -> None:
    """vLLM's prefix cache would have the blocks of a synchronous one before its end is known."""
    for steps in (1, 2):
        engine = Engine(monkeypatch, steps=steps, on_gpu=on_gpu, copy=copy, load=load)
        engine.session.hits = 2
        assert engine.role.match(engine.arrive(4 * BLOCK_TOKENS + 1), 0) == (2 * BLOCK_TOKENS, not sync)


def test_loads_can_fail_where_ranks_copy_although_the_sidecar_was_to(monkeypatch: pytest.MonkeyPatch, connector: Any) -> None:
    """The handshake tells it before the first request."""
    engine = Engine(monkeypatch, on_gpu=True, copy="auto")
    connector._scheduler = engine.role
    engine.session.hits = 2
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    assert engine.role.match(request, 0) == (2 * BLOCK_TOKENS, False)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Served(this_host()), (0, 1): Served(this_host(), copies=True)})
    assert engine.role.match(request, 0) == (2 * BLOCK_TOKENS, True)


# --- tokens that are taken back ---


@pytest.mark.parametrize("longer", [False, True])
def test_hashes_that_are_taken_back_begin_a_log_anew(engine: Engine, longer: bool) -> None:
    """As between two inputs of a streaming session: the last block's tokens are others, at once or after a while without."""
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    engine.compute(request)
    assert engine.session.saves == [(0, 0, [1, 2, 3, 4])]
    del request.block_hashes[3:]
    if longer:
        request.block_hashes += [bytes([80 + block] * 32) for block in range(2)]
    request.num_computed_tokens = 3 * BLOCK_TOKENS
    request.num_tokens = 5 * BLOCK_TOKENS + 1
    engine.role.announced(request)
    assert engine.session.closed == [0]
    engine.go_on(request)
    assert engine.session.logs == [None, None]


# --- a namespace that changes by itself ---


def test_a_connection_that_is_bound_elsewhere(engine: Engine) -> None:
    """What was computed before belongs to the namespace of before; nothing is saved until it is known which one it is."""
    first = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(first)
    assert len(engine.session.saves) == 1
    engine.session.reconnect(0)
    second = engine.arrive(2 * BLOCK_TOKENS + 1)
    engine.compute(second)
    assert len(engine.session.saves) == 1
    engine.session.namespace = ELSEWHERE
    engine.decode(first, second)
    engine.decode(first, second)
    assert len(engine.session.saves) == 1 and engine.session.voided == 1
    engine.compute(engine.arrive(2 * BLOCK_TOKENS + 1))
    assert len(engine.session.saves) == 2


def test_a_connection_that_is_bound_as_before(engine: Engine) -> None:
    """A restarted sidecar is offered what it missed."""
    engine.compute(engine.arrive(2 * BLOCK_TOKENS + 1))
    engine.session.reconnect(0)
    request = engine.arrive(3 * BLOCK_TOKENS + 1)
    engine.compute(request)
    engine.session.namespace = HERE
    engine.decode(request)
    assert [blocks for _, _, blocks in engine.session.saves] == [[1, 2], [4, 5, 6]]
    assert engine.session.voided == 0


# --- adapters ---


class Adapters:
    """Answers what it is told to."""

    def __init__(self, fold: bytes | None) -> None:
        self.answer = fold

    def look(self, lora: Any) -> None:
        """Not looked at."""

    def fold(self, lora: Any) -> bytes | None:
        """As told."""
        return self.answer


@pytest.fixture
def adapters(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """Adapters of the engine."""
    engine.session.hits = 2
    adapters = Adapters(b"a" * 16)
    monkeypatch.setattr(engine.role._adapters, "look", adapters.look)
    monkeypatch.setattr(engine.role._adapters, "fold", adapters.fold)
    return adapters


def test_requests_of_an_adapter_have_logs_of_its_fold(engine: Engine, adapters: Adapters) -> None:
    """And others have none of any."""
    assert engine.ask(engine.arrive(4 * BLOCK_TOKENS + 1, lora="one")) == 2 * BLOCK_TOKENS
    assert engine.ask(engine.arrive(4 * BLOCK_TOKENS + 1)) == 2 * BLOCK_TOKENS
    assert engine.session.logs == [b"a" * 16, None]


def test_a_log_has_keys_of_one_fold(engine: Engine, adapters: Adapters) -> None:
    """The adapter is replaced while its request runs."""
    request = engine.arrive(4 * BLOCK_TOKENS + 1, lora="one")
    engine.ask(request)
    adapters.answer = b"b" * 16
    engine.ask(request)
    assert (engine.session.logs, engine.session.closed) == ([b"a" * 16, b"b" * 16], [0])


def test_a_digest_is_waited_for_a_moment(engine: Engine, adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the request goes without the cache; what it computes is saved once the digest is there."""
    adapters.answer = None
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(tracked, "time", SimpleNamespace(monotonic=lambda: clock.now))
    request = engine.arrive(4 * BLOCK_TOKENS + 1, lora="one")
    assert engine.ask(request) is None
    clock.now += tracked.ADAPTER_WAIT_S / 2
    assert engine.ask(request) is None
    clock.now += tracked.ADAPTER_WAIT_S / 2
    assert engine.ask(request) == 0
    engine.compute(request)
    assert engine.session.logs == [] == engine.session.saves
    adapters.answer = b"a" * 16
    engine.decode(request)
    assert engine.session.saves == [(0, 0, [1, 2, 3, 4])]


def test_an_adapter_is_looked_at_again_in_the_step_in_which_ranks_load_it(
    engine: Engine, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files changed while the request's blocks were loaded."""
    request = engine.arrive(4 * BLOCK_TOKENS + 1, lora="one")
    assert engine.ask(request) == 2 * BLOCK_TOKENS
    monkeypatch.setattr(engine.role._adapters, "look", lambda _: setattr(adapters, "answer", None))
    engine.compute(request, found=2 * BLOCK_TOKENS)
    assert engine.session.saves == []


def test_an_adapter_without_the_cache(engine: Engine, adapters: Adapters) -> None:
    """At once."""
    adapters.answer = NO_CACHE
    request = engine.arrive(4 * BLOCK_TOKENS + 1, lora="one")
    assert engine.ask(request) == 0
    engine.compute(request)
    engine.decode(request)
    assert engine.session.logs == [] == engine.session.saves


def test_a_replaced_adapter_is_noticed_by_its_files(engine: Engine, tmp_path: Any) -> None:
    """The role's own adapters: what was computed with bytes that ranks gave up is not kept."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"one")
    lora: Any = SimpleNamespace(lora_name="one", lora_int_id=1, lora_path=str(tmp_path), load_inplace=True)
    request = engine.arrive(2 * BLOCK_TOKENS + 1, lora=lora)
    engine.ask(request)
    engine.compute(request)
    assert len(engine.session.saves) == 1
    engine.role.adapter_loads(lora)
    engine.decode(request)
    assert (len(engine.session.saves), engine.session.voided) == (1, 1)
    assert engine.session.groups == b"groups"


# --- the standing check ---

CHECK_BLOCKS = TOKENS // BLOCK_TOKENS


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that checks, and finds 7 blocks of every prompt."""
    engine = Engine(monkeypatch, check_every=100)
    engine.session.hits = 7
    return engine


def test_the_end_of_a_hit_is_computed_and_compared(checking: Engine) -> None:
    """Exactly the blocks that were found and not loaded; what follows is saved as ever."""
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    assert checking.ask(request) == (7 - CHECK_BLOCKS) * BLOCK_TOKENS
    checking.compute(request, found=3 * BLOCK_TOKENS)
    assert checking.session.checked == [(0, 3, [4, 5, 6, 7])]
    assert checking.session.saves == [(0, 7, [8, 9])]
    checking.decode(request)
    assert checking.session.saves[1:] == [(0, 0, [1, 2, 3])], "offered, and so marked as used"
    assert len(checking.session.checked) == 1


def test_a_checked_hit_that_is_computed_in_parts(checking: Engine) -> None:
    """Nothing is saved before all of it can be compared."""
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    assert checking.ask(request) == 3 * BLOCK_TOKENS
    checking.compute(request, found=3 * BLOCK_TOKENS, most=2 * BLOCK_TOKENS)
    assert checking.session.checked == [] == checking.session.saves
    checking.go_on(request)
    assert checking.session.checked == [(0, 3, [4, 5, 6, 7])]
    assert checking.session.saves == [(0, 7, [8, 9])]


def test_a_long_check_computes_the_whole_hit_in_as_many_steps_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the hit are compared, and nothing is loaded."""
    engine = Engine(monkeypatch, check_every=1, check_per_mille=1000)
    engine.session.hits = 7
    first, second, third = (engine.arrive(9 * BLOCK_TOKENS + 1) for _ in range(3))
    assert engine.ask(first) == 3 * BLOCK_TOKENS, "nothing was loaded yet"
    engine.compute(first, found=3 * BLOCK_TOKENS)
    engine.session.compared += 4
    engine.decode(first)
    assert engine.ask(second) == 7 * BLOCK_TOKENS
    engine.compute(second, found=7 * BLOCK_TOKENS)
    del engine.session.checked[:]
    assert engine.ask(third) == 0
    engine.compute(third, most=4 * BLOCK_TOKENS)
    assert engine.session.checked == []
    engine.go_on(third)
    [(_, first_block, blocks)] = engine.session.checked
    assert (first_block, len(blocks)) == (0, 7)


def test_after_a_difference_no_block_of_before_is_found_or_kept(checking: Engine) -> None:
    """Also blocks of the hit in vLLM's own cache: the next request arrives before the next step."""
    pool = BlockPool(16, True, BLOCK_TOKENS)
    [block] = pool.get_new_blocks(1)
    block.set_block_hash(bytes(36), BLOCK_TOKENS)
    checking.role.bind(pool)
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    checking.ask(request)
    checking.compute(request, found=3 * BLOCK_TOKENS)
    checking.session.compared, checking.session.differing = 4, 1
    another = checking.arrive(9 * BLOCK_TOKENS + 1)
    checking.role.announced(another)
    assert block.block_hash is None
    saves = len(checking.session.saves)
    checking.decode(request)
    assert len(checking.session.saves) == saves, "computed upon what was loaded"
    assert checking.ask(another) == 0, "in doubt"


def test_a_short_hit_is_computed_wholly(checking: Engine) -> None:
    """Then nothing is loaded."""
    checking.session.hits = 3
    request = checking.arrive(5 * BLOCK_TOKENS + 1)
    assert checking.ask(request) == 0
    checking.compute(request)
    assert checking.session.checked == [(0, 0, [1, 2, 3])]
    assert checking.session.saves == [(0, 3, [4, 5])]


def test_vllm_may_ask_again(checking: Engine) -> None:
    """It had no blocks for the request."""
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    assert checking.ask(request) == checking.ask(request) == 3 * BLOCK_TOKENS
    assert checking.ask(checking.arrive(9 * BLOCK_TOKENS + 1)) == 7 * BLOCK_TOKENS, "one check at a time"


def test_after_a_verdict_hits_are_whole_until_the_weights_may_have_changed(checking: Engine) -> None:
    """Then what was right may not be."""
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    checking.ask(request)
    checking.compute(request, found=3 * BLOCK_TOKENS)
    checking.session.compared = 4
    checking.decode(request)
    assert checking.ask(checking.arrive(9 * BLOCK_TOKENS + 1)) == 7 * BLOCK_TOKENS
    checking.role.weights_may_have_changed()
    assert checking.ask(checking.arrive(9 * BLOCK_TOKENS + 1)) == 7 * BLOCK_TOKENS, "not bound yet"
    checking.session.namespace = HERE
    assert checking.ask(checking.arrive(9 * BLOCK_TOKENS + 1)) == 3 * BLOCK_TOKENS


def test_what_is_not_compared(checking: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on their way; requests whose load failed, or that are over; and nothing at all unless it is asked for."""
    monkeypatch.setattr(checking.session, "arriving", lambda log: True)
    assert checking.ask(checking.arrive(9 * BLOCK_TOKENS + 1)) == 7 * BLOCK_TOKENS
    monkeypatch.undo()
    request = checking.arrive(9 * BLOCK_TOKENS + 1)
    assert checking.ask(request) == 3 * BLOCK_TOKENS
    checking.compute(request, found=3 * BLOCK_TOKENS, most=BLOCK_TOKENS)
    checking.role.loads_failed({1})
    checking.go_on(request)
    assert checking.session.checked == []


# --- the connector around the role ---


@pytest.fixture
def connector(engine: Engine) -> Any:
    """The engine's, as its scheduler process has it."""
    connector: Any = PillionConnector.__new__(PillionConnector)
    connector._scheduler, connector._worker, connector._out = engine.role, None, ""
    return connector


def test_every_reset_of_vllm_counts(engine: Engine, connector: Any) -> None:
    """Its own alone, and one that reaches the connector."""
    pool = SimpleNamespace(reset_prefix_cache=lambda: False)
    connector.bind_gpu_block_pool(pool)
    assert pool.reset_prefix_cache() is False
    assert connector.reset_cache() is True
    assert engine.session.counts == [1, 2]


def test_a_rank_that_stays_out_turns_the_role_off(engine: Engine, connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is said once, and vLLM runs as if there were no connector."""
    said: list[str] = []
    monkeypatch.setattr("pillion.connector.logger.error", lambda text, *parts: said.append(text % parts))
    engine.session.hits = 2
    request = engine.arrive(4 * BLOCK_TOKENS + 1)
    assert connector.get_num_new_matched_tokens(request, 0) == (2 * BLOCK_TOKENS, True)
    told = {(0, 0): None, (0, 1): StaysOut("no room"), (0, 2): StaysOut("no room either")}
    connector.set_xfer_handshake_metadata_pp_aware(told)
    connector.set_xfer_handshake_metadata_pp_aware(told)
    assert len(said) == 1 and "rank 1: no room." in said[0]
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert engine.session.generation == 0, "the session has ended"
    assert connector.build_connector_meta(None).run == b""
    assert connector.reset_cache() is True


def test_a_rank_on_another_host_turns_the_role_off(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sidecar is another one. Ranks beside the scheduler do not."""
    said: list[str] = []
    monkeypatch.setattr("pillion.connector.logger.error", lambda text, *parts: said.append(text % parts))
    connector.set_xfer_handshake_metadata_pp_aware({(0, rank): Served(this_host()) for rank in range(2)})
    assert connector._scheduler and not said
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Served(this_host()), (0, 1): Served("another")})
    assert connector._scheduler is None
    assert len(said) == 1 and "rank 1 runs on another host" in said[0]


def test_ranks_say_where_they_serve_or_why_not(connector: Any) -> None:
    """Whichever of its parts found it out."""
    assert connector.get_handshake_metadata() is None
    assert this_host()
    for copies in (False, True):
        connector._worker = SimpleNamespace(out_reason="", copies=copies)
        assert connector.get_handshake_metadata() == Served(this_host(), copies)
    connector._worker = SimpleNamespace(out_reason="memory")
    assert connector.get_handshake_metadata() == StaysOut("memory")
    connector._worker, connector._out = None, "windows"
    assert connector.get_handshake_metadata() == StaysOut("windows")


@pytest.mark.parametrize("made", [Worker, SetWorker])
def test_a_rank_without_a_scheduler_role_does_nothing(monkeypatch: pytest.MonkeyPatch, connector: Any, made: Any) -> None:
    """No step of it begins, none ends, and vLLM calls every hook."""
    nothing: Any = None
    monkeypatch.setattr(vllm_compat, "hash_tokens", lambda _: BLOCK_TOKENS)
    groups = kv_cache_config(full_attention())
    groups.kv_cache_groups *= 1 if made is Worker else 2
    connector._worker = made(Config(socket="/s"), nothing, groups)
    connector._scheduler, connector._reports = None, Reports()
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    connector.start_load_kv(nothing)
    connector.wait_for_layer_load("layer")
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
