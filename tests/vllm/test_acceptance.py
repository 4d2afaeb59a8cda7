"""What vLLM did not stand behind is not kept: steps that it passed over, and blocks that it lists and no step filled."""

from __future__ import annotations

from typing import Any

import pytest
from played import BLOCK_TOKENS, Engine

from pillion.metadata import StepOutput
from pillion.proof import OPEN_STEPS_MAX

PROMPT = 9 * BLOCK_TOKENS
TO_DECODE = {"do_remote_decode": True}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with one request after another."""
    return Engine(monkeypatch)


def _step_of(metadata: Any) -> int:
    step: int = metadata.step
    return step


def test_an_output_counts_once_every_rank_has_returned_it() -> None:
    """In whatever order vLLM puts them together."""
    run = b"r" * 16
    both = StepOutput(run, 5).aggregate(StepOutput(run, 5))
    assert (both.ranks, both.aggregate(StepOutput(run, 5)).ranks) == (2, 3)
    for other in (StepOutput(run, 6), StepOutput(b"s" * 16, 5)):
        assert StepOutput(run, 5).aggregate(other).ranks == 0


def test_the_sidecar_is_told_of_each_output_that_vllm_takes(engine: Engine) -> None:
    """And of none that a rank lacks, or that an earlier life of the engine returned."""
    step = _step_of(engine.compute(engine.arrive(PROMPT)))
    engine.role.accepts(StepOutput(engine.role._run, step, ranks=0))
    engine.role.accepts(StepOutput(b"another run 0123", step))
    assert engine.session.accepted == []
    engine.take(step)
    assert (engine.session.accepted, engine.session.voided) == ([step], 0)


def test_a_step_that_is_passed_over_is_counted(engine: Engine) -> None:
    """The sidecar learns of it by the next one that vLLM takes. Nothing of that is void: it has computed another prompt."""
    engine.take(_step_of(engine.compute(engine.arrive(PROMPT))))
    engine.compute(engine.arrive(PROMPT))
    other = engine.arrive(PROMPT)
    step = _step_of(engine.compute(other))
    engine.take(step)
    assert (engine.session.accepted[-1], engine.session.voided) == (step, 0)
    assert engine.role.take_unkept() == {"unaccepted_steps": 1}
    assert engine.role.take_unkept() == {}
    assert not engine.role._proof.doubts(engine.role._requests.by_id[other.request_id])


def test_a_request_of_a_step_that_is_passed_over_is_in_doubt(engine: Engine) -> None:
    """Where it goes on, all the same: what the next step has saved of it is void."""
    request = engine.arrive(PROMPT)
    engine.compute(request, most=4 * BLOCK_TOKENS)
    step = _step_of(engine.go_on(request))
    engine.take(step)
    assert engine.session.voided == 1
    assert engine.role._proof.doubts(engine.role._requests.by_id[request.request_id])


def _list_again(engine: Engine, request: Any) -> Any:
    """A request that vLLM gives the blocks of another one, which has the same beginning."""
    blocks = engine.role._requests.by_id[request.request_id].blocks
    other = engine.arrive(PROMPT + BLOCK_TOKENS)
    engine.compute(other, found=PROMPT, blocks=[*blocks, 60])
    return other


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "passed over"])
def test_what_is_computed_upon_a_step_is_kept_if_the_step_is_accepted(engine: Engine, taken: bool) -> None:
    """The other request begins on the blocks after the step was passed over."""
    request = engine.arrive(PROMPT)
    step = _step_of(engine.compute(request))
    if taken:
        engine.take(step)
    engine.take(_step_of(engine.compute(engine.arrive(BLOCK_TOKENS))))
    engine.session.saves.clear()
    other = _list_again(engine, request)
    saved = [first for _, first, _ in engine.session.saves]
    assert saved == ([9] if taken else [])
    assert engine.role._proof.doubts(engine.role._requests.by_id[other.request_id]) is not taken
    assert engine.role.take_unkept().get("unproven_blocks", 0) == (0 if taken else 9)


def test_what_began_upon_a_step_in_flight_is_void_with_it(engine: Engine) -> None:
    """A request that began before vLLM passed the step over is in doubt from there on."""
    request = engine.arrive(PROMPT)
    engine.compute(request)
    other = engine.arrive(PROMPT + BLOCK_TOKENS)
    blocks = engine.role._requests.by_id[request.request_id].blocks
    step = _step_of(engine.compute(other, found=PROMPT, blocks=[*blocks, 60]))
    assert [first for _, first, _ in engine.session.saves] == [0, 9]
    engine.take(step)
    assert engine.session.voided == 1
    engine.session.saves.clear()
    other.block_hashes = [*other.block_hashes, b"next" * 8]
    other.num_tokens += BLOCK_TOKENS
    engine.go_on(other)
    assert engine.session.saves == [], "it goes on upon what nobody stood behind"


def test_what_began_upon_blocks_that_left_its_window_is_void_too(engine: Engine) -> None:
    """A request with a window begins on blocks of a step in flight, and slides past them. vLLM then passes over the step."""
    request = engine.arrive(PROMPT)
    engine.compute(request)
    blocks = engine.role._requests.by_id[request.request_id].blocks
    other = engine.arrive(PROMPT + 4 * BLOCK_TOKENS)
    step = _step_of(engine.compute(other, found=PROMPT, most=2 * BLOCK_TOKENS, blocks=[*blocks, 60, 61, 62, 63]))
    tracked = engine.role._requests.by_id[other.request_id]
    tracked.window = BLOCK_TOKENS + 1
    engine.go_on(other)
    assert set(tracked.blocks).isdisjoint(blocks)
    engine.take(step)
    assert engine.session.voided == 1
    assert engine.role._proof.doubts(tracked)


def test_a_block_that_no_step_filled_is_not_kept(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """As one of a request that was preempted in the schedule() that listed its blocks."""
    for _ in range(2):
        request = engine.arrive(PROMPT)
        engine.compute(request, found=4 * BLOCK_TOKENS, proven=False)
        engine.session.saves.clear()
        engine.decode(request)
        assert engine.session.saves == [], "neither the blocks that were found nor what was computed upon them"
    said = [record.getMessage() for record in caplog.records if "no accepted step has filled" in record.getMessage()]
    assert len(said) == 1 and "fcfs" in said[0]
    assert engine.role.take_unkept() == {"unproven_blocks": 8}


def test_a_block_is_proven_under_one_key(engine: Engine) -> None:
    """vLLM lists it under another one, and preempts the request before a step writes the block."""
    first = engine.arrive(PROMPT)
    engine.take(_step_of(engine.compute(first)))
    blocks = engine.role._requests.by_id[first.request_id].blocks
    other = engine.arrive(PROMPT + BLOCK_TOKENS)
    other.block_hashes = [b"%032d" % place for place in range(10)]
    engine.session.saves.clear()
    engine.compute(other, found=PROMPT, proven=False, blocks=[*blocks, 60])
    assert engine.session.saves == []


def test_a_request_that_computes_everything_again_is_kept(engine: Engine) -> None:
    """After a preemption, from the first unproven block on."""
    request = engine.arrive(PROMPT)
    engine.compute(request, found=4 * BLOCK_TOKENS, proven=False)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    engine.session.saves.clear()
    engine.compute(request)
    assert [save[1:] for save in engine.session.saves] == [(0, list(range(10, 19)))]


def test_nothing_is_promised_of_a_request_in_doubt(engine: Engine) -> None:
    """An engine that awaits it computes it at once."""
    request = engine.arrive(PROMPT, transfer=TO_DECODE)
    assert engine.session.promised == [0]
    engine.compute(request, found=4 * BLOCK_TOKENS, proven=False)
    assert engine.session.closed == [0]
    engine.decode(request)
    assert engine.session.promised == [0]
    # Another prompt is promised as before.
    engine.arrive(PROMPT, transfer=TO_DECODE)
    assert len(engine.session.promised) == 2


def test_an_engine_whose_outputs_nobody_takes_keeps_and_promises_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Until vLLM takes one again, which it says once."""
    request = engine.arrive(PROMPT, transfer=TO_DECODE)
    engine.compute(request)
    step = 1
    for _ in range(OPEN_STEPS_MAX + 2):
        step = _step_of(engine.decode(request))
    assert engine.role._proof.stalled and engine.session.voided
    assert engine.session.closed == [0]
    engine.session.saves.clear()
    other = engine.arrive(PROMPT, transfer=TO_DECODE)
    engine.compute(other)
    assert (engine.session.saves, engine.session.promised) == ([], [0])
    assert sum("kv_connector_worker_meta" in record.getMessage() for record in caplog.records) == 1
    engine.take(step)
    engine.take(_step_of(engine.compute(engine.arrive(PROMPT))))
    assert [save[1] for save in engine.session.saves] == [0]
    assert engine.session.accepted[-1] > step
