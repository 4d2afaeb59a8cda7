"""The scheduler role of engines one of which goes on with the other's prompts, over a session that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from played import BLOCK_TOKENS, Engine

from pillion.checking import TOKENS

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose session is bound."""
    return Engine(monkeypatch)


def _end(engine: Engine, request: Any, status: str) -> Any:
    request.status = SimpleNamespace(name=status)
    return engine.role.finished(request)


def test_a_prompt_for_another_engine_is_offered_with_what_was_found_in_the_step_that_may_be_its_last(engine: Engine) -> None:
    """In parts; and its end says so."""
    request = engine.arrive(9 * BLOCK_TOKENS + 1, transfer=TO_DECODE)
    engine.compute(request, found=3 * BLOCK_TOKENS)
    assert engine.session.promised == [0] and engine.session.awaited == []
    assert engine.session.saves == [(0, 0, [1, 2, 3]), (0, 3, [4, 5, 6, 7, 8, 9, 10])]
    told = _end(engine, request, "FINISHED_LENGTH_CAPPED")
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "pillion": {"tokens": 9 * BLOCK_TOKENS + 1},
    }
    awaiting = engine.arrive(9 * BLOCK_TOKENS + 1, transfer=told)
    engine.ask(awaiting)
    assert engine.session.awaited == [1] and engine.session.promised == [0]
    assert _end(engine, awaiting, "FINISHED_LENGTH_CAPPED") is None


@pytest.mark.parametrize("mode", ["read_write", "save_only", "load_only"])
def test_who_saves_promises_a_prompt_as_soon_as_it_arrives(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Also where nothing is loaded; where nothing is saved, nobody may wait for it."""
    engine = Engine(monkeypatch, mode=mode)
    request = engine.arrive(9 * BLOCK_TOKENS, transfer=TO_DECODE)
    promised = [] if mode == "load_only" else [0]
    assert engine.session.promised == promised
    engine.arrive(9 * BLOCK_TOKENS)
    assert len(engine.session.logs) == (1 if mode == "save_only" else 2), "keys of other prompts are told to be fetched"
    engine.compute(request)
    assert engine.session.promised == promised


def _handed_over(engine: Engine, tokens: int) -> tuple[Any, Any]:
    """A prompt that this engine has computed for another one, and what a router is told of it."""
    request = engine.arrive(tokens, transfer=TO_DECODE)
    engine.compute(request)
    return request, _end(engine, request, "FINISHED_LENGTH_CAPPED")


@pytest.mark.parametrize("transfer", ["told", {"do_remote_prefill": True}], ids=["p first", "both at once"])
def test_who_goes_on_with_a_prompt_has_one_token_to_compute(engine: Engine, transfer: Any) -> None:
    """The block that is partly full has a key until it is full: then it is saved as any other, by a log of its own."""
    tokens = 9 * BLOCK_TOKENS + 5
    _, told = _handed_over(engine, tokens)
    assert told["pillion"] == {"tokens": tokens}
    assert [save[1:] for save in engine.session.saves] == [(0, list(range(1, 11)))]
    engine.session.saves.clear()
    request = engine.arrive(tokens, transfer=told if transfer == "told" else transfer)
    engine.session.hits = 9
    assert engine.ask(request) == 9 * BLOCK_TOKENS, "without the tail"
    engine.session.hits = 10
    assert engine.ask(request) == tokens - 1
    assert engine.session.tails[1] == engine.session.tails[0]
    engine.compute(request, found=tokens - 1)
    assert engine.role.sources(request, tokens - 1) == {"host": tokens - 1}
    request.block_hashes = [*request.block_hashes, b"full" * 8]
    for _ in range(BLOCK_TOKENS - 5):
        assert len(engine.session.logs) == 2
        engine.decode(request)
        request.num_computed_tokens += 1
        request.num_tokens += 1
    assert (engine.session.closed[-1], engine.session.logs[2:]) == (1, [None])
    assert engine.session.saves[-1][:2] == (2, 9), "the full block, and what was kept before not again"


@pytest.mark.parametrize("mode", ["read_write", "load_only"])
def test_a_tail_is_not_asked_for_as_the_whole_block_after_a_preemption(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Of the block that the request has filled meanwhile, the tail lacks tokens; also where nothing is saved."""
    engine = Engine(monkeypatch, mode=mode)
    request = engine.arrive(9 * BLOCK_TOKENS + 5, transfer={"do_remote_prefill": True})
    engine.session.hits = 10
    engine.compute(request, found=engine.ask(request) or 0)
    tailed = list(engine.session.tails)
    for _ in range(BLOCK_TOKENS):
        request.num_tokens += 1
        request.num_computed_tokens += 1
    request.block_hashes = [*request.block_hashes, b"full" * 8]
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.ask(request) == 10 * BLOCK_TOKENS
    assert engine.session.queries[-1] not in tailed
    assert engine.session.awaited == [0], "another engine computes no block of the answer"


def test_nobody_is_awaited_for_blocks_of_an_answer_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prompt ends on a block's boundary, so that its log goes on."""
    engine = Engine(monkeypatch, on_gpu=True)
    request = engine.arrive(9 * BLOCK_TOKENS, transfer={"do_remote_prefill": True})
    engine.session.hits = -1
    assert engine.ask(request) is None and engine.session.lingered == [0]
    engine.session.hits, engine.session.lingered = 10, []
    engine.compute(request, found=engine.ask(request) or 0)
    request.num_tokens += BLOCK_TOKENS + 1
    request.block_hashes = [*request.block_hashes, b"full" * 8]
    request.num_computed_tokens, request.num_preemptions = 0, 1
    for _ in range(2):
        assert engine.ask(request) == 10 * BLOCK_TOKENS
        assert (engine.session.awaited, engine.session.closed, engine.session.queries[-1]) == ([0], [0], 1)
    # No step waits for another engine either, as an idle one would.
    engine.decode()
    engine.session.hits = -1
    assert engine.ask(request) is None and engine.session.lingered == []


def test_who_goes_on_behind_a_first_token_has_the_same_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that token fills the block."""
    engine = Engine(monkeypatch, on_gpu=True)
    for rest in (1, 5, BLOCK_TOKENS - 1):
        tokens = 9 * BLOCK_TOKENS + rest
        _, told = _handed_over(engine, tokens)
        request = engine.arrive(tokens + 1, transfer=told)
        engine.session.hits = 10
        assert engine.ask(request) == tokens
        ours, theirs = list(engine.session.tails.values())[-2:]
        assert ours == theirs
        metadata = engine.compute(request, found=tokens)
        assert [sync for _, _, sync in metadata.loads] == [True]
        assert metadata.fills_tail, "the step writes into the block in which the hit ends"


def test_a_prompt_of_whole_blocks_is_loaded_but_for_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of such a prompt is full, so it is found by its own key."""
    engine = Engine(monkeypatch, on_gpu=True)
    tokens = 9 * BLOCK_TOKENS
    _, told = _handed_over(engine, tokens)
    request = engine.arrive(tokens, transfer=told)
    engine.session.hits = 9
    assert engine.ask(request) == tokens - 1 and engine.session.tails == {}
    assert engine.compute(request, found=tokens - 1).fills_tail
    whole = engine.arrive(tokens + 1)
    assert engine.ask(whole) == tokens
    assert not engine.compute(whole, found=tokens).fills_tail


@pytest.mark.parametrize("why", ["salt", "short", "sidecar", "fewer", "said", "not awaited"])
def test_without_a_tail_a_hit_ends_on_a_block_s_boundary(engine: Engine, why: str) -> None:
    """Where a key depends on more than tokens, where no whole block is before it, at a sidecar that knows no tails, where less
    was saved, whatever a client says of it, and of a request that nobody hands over."""
    engine.session.hits = 10
    engine.session.knows_tails = why != "sidecar"
    tokens = 5 if why == "short" else 9 * BLOCK_TOKENS + 5
    saved = {"fewer": 9 * BLOCK_TOKENS, "said": "all"}.get(why, tokens)
    request = engine.arrive(tokens, transfer={"do_remote_prefill": why != "not awaited", "pillion": {"tokens": saved}})
    if why == "salt":
        request.cache_salt = "salt"
        engine.role._requests.by_id.clear()
    whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert engine.ask(request) == (tokens - 1 if why == "said" else whole)


def test_a_tail_is_not_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standing check has whole blocks computed that were found, and with them what is behind them."""
    checked = Engine(monkeypatch, check_every=4)
    checked.session.hits = 10
    request = checked.arrive(9 * BLOCK_TOKENS + 5, transfer={"do_remote_prefill": True})
    kept = 9 - max(1, TOKENS // BLOCK_TOKENS)
    assert checked.ask(request) == kept * BLOCK_TOKENS
    checked.compute(request, found=kept * BLOCK_TOKENS)
    assert [save[1] for save in checked.session.checked] == [kept]
    assert len(checked.session.checked[0][2]) == 9 - kept


def test_who_is_aborted_or_has_saved_nothing_sends_nobody_to_wait(engine: Engine) -> None:
    """Also before it was scheduled, and where no sidecar is there."""
    never = engine.arrive(9 * BLOCK_TOKENS, transfer=TO_DECODE)
    engine.role._requests.by_id.clear()
    assert _end(engine, never, "FINISHED_ABORTED") is None
    aborted = engine.arrive(9 * BLOCK_TOKENS, transfer=TO_DECODE)
    engine.compute(aborted)
    assert _end(engine, aborted, "FINISHED_ABORTED") is None
    alone = engine.arrive(9 * BLOCK_TOKENS, transfer=TO_DECODE)
    engine.compute(alone)
    engine.session.connected = False
    told = _end(engine, alone, "FINISHED_STOPPED")
    assert (told["do_remote_prefill"], told["pillion"]) == (False, {"tokens": 0})


@pytest.mark.parametrize("transfer", [None, {}, {"do_remote_prefill": "yes", "do_remote_decode": 1}, "do_remote_prefill", [1]])
def test_what_is_no_request_for_a_handover_is_none(engine: Engine, transfer: Any) -> None:
    """Whatever a client writes."""
    request = engine.arrive(9 * BLOCK_TOKENS, transfer=transfer)
    engine.ask(request)
    engine.compute(request)
    assert engine.session.awaited == engine.session.promised == []
    assert _end(engine, request, "FINISHED_STOPPED") is None
