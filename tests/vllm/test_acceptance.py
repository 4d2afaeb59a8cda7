"""Reports of vLLM's accepted outputs to the policy, and of ended loads to vLLM. Their effect on saves:
connector-shim/tests/policy."""

from __future__ import annotations

from typing import Any

import played
import pytest

from pillion._shim import RankLoads
from pillion.metadata import StepOutput


def test_an_output_counts_once_every_rank_has_returned_it() -> None:
    """The order in which vLLM aggregates the outputs does not matter."""
    run = b"r" * 16
    both = StepOutput(run, 5).aggregate(StepOutput(run, 5))
    assert (both.ranks, both.aggregate(StepOutput(run, 5)).ranks) == (2, 3)
    for other in (StepOutput(run, 6), StepOutput(b"s" * 16, 5)):
        assert StepOutput(run, 5).aggregate(other).ranks == 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler role and its policy."""
    return played.scheduler(monkeypatch)


def test_the_sidecar_is_told_of_each_output_that_vllm_takes(engine: Any) -> None:
    """An output without every rank, or of an earlier life of the engine, is not reported."""
    role, policy = engine
    metadata = played.step(role, played.request("one"))
    role.accepts(StepOutput(metadata.run, metadata.step, ranks=0))
    role.accepts(StepOutput(b"another run 0123", metadata.step))
    assert policy.told("accept_step") == []
    role.accepts(StepOutput(metadata.run, metadata.step))
    assert policy.told("accept_step") == [(metadata.step, {})]


def test_a_request_of_a_step_that_is_passed_over_is_in_doubt(engine: Any) -> None:
    """The policy gets the requests of all open steps, ended requests too."""
    role, policy = engine
    first, second, third = (played.request(name) for name in ("one", "two", "three"))
    for request in (first, second, third):
        role.match(request, 0)
    steps = [played.step(role, first), played.step(role, second, third)]
    played.finish(role, second)
    policy.answers["passes_over"] = True
    role.accepts(StepOutput(steps[1].run, steps[1].step))
    assert policy.told("accept_step") == [(steps[1].step, {steps[0].step: [1], steps[1].step: [2, 3]})]


def test_the_end_of_a_load_is_told_until_vllm_has_learned_of_it() -> None:
    """A step may raise before it reports the end. The next step reports the end then."""
    loads = RankLoads(False)
    loads.begin_step(1, ())
    loads.lose_load("one", [7])
    assert (loads.take_ended(), loads.take_failed(), loads.take_failed_blocks()) == ({"one"}, set(), {7})
    loads.begin_step(2, [1])
    loads.begin_step(3, [1])
    assert (loads.take_ended(), loads.take_failed(), loads.take_failed_blocks()) == ({"one"}, set(), {7})
    loads.begin_step(4, [1])
    assert (loads.take_ended(), loads.take_failed(), loads.take_failed_blocks()) == (None, set(), set())
    loads.begin_step(5, [3, 4])
    loads.lose_load("two", [])
    assert loads.take_ended() == {"one", "two"}
