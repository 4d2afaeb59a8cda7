"""The engine's state at Pillion reaches vLLM's metrics and its log, through vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import played as roles
import pytest
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from pillion.connector import PillionConnector, RankState
from pillion.state import NO_COUNTS, RECORD_ENDS, SOURCES, STATES, UNKEPT, EngineState
from pillion.vllm_compat import KVConnectorRole

LABELS = {"model_name": "tiny", "engine": "1"}


class Played:
    """A connector over a played policy, and vLLM's front end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        role, self.policy = roles.scheduler(monkeypatch)
        self.connector: Any = PillionConnector.__new__(PillionConnector)
        self.connector._role = KVConnectorRole.SCHEDULER
        self.connector._scheduler, self.connector._worker, self.connector._out = role, None, ""
        transfer = KVTransferConfig(
            kv_connector="PillionConnector", kv_connector_module_path="pillion.connector", kv_role="kv_both"
        )
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        self.prom = KVConnectorProm(config, list(LABELS), {0: ["tiny", "0"], 1: ["tiny", "1"]})
        self.logging = KVConnectorLogging(transfer)

    def step(self, state: str = "serving", **counted: tuple[int, ...]) -> bool:
        """Plays the end of a step, as vLLM's scheduler and front end do; true if anything was reported. `counted` are the
        policy's counts since the step before."""
        self.policy.state, self.policy.answers = state, roles.ANSWERS | counted
        report = self.connector.get_kv_connector_stats()
        if report is None or report.is_empty():
            return False
        self.prom.observe(report.to_dict(), 1)
        self.logging.observe(report.to_dict())
        return True

    def shown(self) -> list[str]:
        """The states with a gauge of 1."""
        value = {state: REGISTRY.get_sample_value("vllm:pillion_engine_state", {**LABELS, "state": state}) for state in STATES}
        return [state for state in STATES if value[state] == 1]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A played engine without metrics of earlier tests, as in a new vLLM."""
    unregister_vllm_metrics()
    yield Played(monkeypatch)
    unregister_vllm_metrics()


def test_a_sidecar_that_comes_and_goes_is_seen_in_the_engines_metrics(played: Played) -> None:
    """Each change is reported once, and only the last state counts."""
    for state in ("away", "unbound", "serving", "away"):
        assert played.step(state) and played.shown() == [state]
        assert not played.step(state), "nothing has changed"


def test_an_engine_that_stays_out_says_why(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is in the metrics and in the line that vLLM logs of its connectors."""
    monkeypatch.setattr("pillion.connector.logger.error", lambda text, *parts: None)
    assert played.step()
    played.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankState("no room in /dev/shm: raise --shm-size")})
    assert played.step() and played.shown() == ["out"]
    reason = {**LABELS, "reason": "rank 0: no room in /dev/shm: raise --shm-size"}
    assert REGISTRY.get_sample_value("vllm:pillion_stays_out", reason) == 1
    logged: list[str] = []
    played.logging.log(lambda text, *parts: logged.append(text % parts))
    assert logged == ["KV Transfer metrics: pillion=out"]


def counted(*counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Counts of a report."""
    return dict(zip(NO_COUNTS, counts, strict=True))


def test_the_later_state_counts_and_what_both_counted() -> None:
    """As where vLLM puts several reports together."""
    both = EngineState.of("away", "", counted({"host": 1, "disk": 2}, {"written": 1}, {"unaccepted_steps": 1}, {"pin.done": 1}))
    later = counted({"host": 4}, {"written": 2, "refused": 1}, {"unproven_blocks": 7}, {"pin.done": 2})
    both.aggregate(EngineState.of("serving", "", later))
    both.aggregate(EngineState(data={}))
    unkept = {"unaccepted_steps": 1, "unproven_blocks": 7}
    counts = counted({"host": 5, "disk": 2}, {"written": 3, "refused": 1}, unkept, {"pin.done": 3})
    assert both.to_dict() == {"state": "serving", "reason": ""} | counts and not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_tokens_of_hits_are_counted_once(played: Played) -> None:
    """They are counted by source; and from the start, so a rate includes the first of them."""

    def shown(source: str) -> float | None:
        return REGISTRY.get_sample_value("vllm:pillion_hit_tokens_total", {**LABELS, "source": source})

    assert played.step() and [shown(source) for source in SOURCES] == [0, 0, 0]
    assert played.step(take_hit_tokens=(0, 32, 64)) and not played.step()
    assert [shown(source) for source in SOURCES] == [0, 32, 64] and played.shown() == ["serving"]


def test_what_becomes_of_records_is_counted(played: Played) -> None:
    """They are counted from the start, too."""

    def shown(end: str) -> float | None:
        return REGISTRY.get_sample_value("vllm:pillion_records_total", {**LABELS, "end": end})

    assert played.step() and [shown(end) for end in RECORD_ENDS] == [0, 0, 0]
    played.connector._scheduler._records = SimpleNamespace(take_ends=lambda: {"refused": 2}, take_hints=dict)
    assert played.step() and [shown(end) for end in RECORD_ENDS] == [0, 2, 0]


def test_outcomes_of_hints_are_counted(played: Played) -> None:
    """By action; refused ones have none."""

    def shown(action: str, outcome: str) -> float | None:
        return REGISTRY.get_sample_value("vllm:pillion_hints_total", {**LABELS, "action": action, "outcome": outcome})

    assert played.step() and shown("pin", "clipped") == shown("hints", "refused") == 0
    played.connector._scheduler._records.end_hints(7, [("pin", "clipped"), ("hints", "refused")])
    assert played.step() and shown("pin", "clipped") == shown("hints", "refused") == 1


def test_ranks_report_nothing(played: Played) -> None:
    """The scheduler role reports for its engine."""
    played.connector._role, played.connector._scheduler = KVConnectorRole.WORKER, None
    assert not played.step()


@pytest.mark.parametrize("name", UNKEPT)
def test_what_is_not_kept_is_counted(played: Played, name: str) -> None:
    """They are counted from the start, so a rate includes the first of them."""
    metric = f"vllm:pillion_{name}_total"
    assert REGISTRY.get_sample_value(metric, LABELS) == 0
    for number in (3, 2):
        assert played.step(take_unkept=tuple(number * (name == each) for each in UNKEPT))
    assert REGISTRY.get_sample_value(metric, LABELS) == 5


def test_an_engine_whose_outputs_nobody_takes_says_so(played: Played) -> None:
    """Blocks are found, and none are kept."""
    assert played.step() and played.step("unaccepted")
    assert REGISTRY.get_sample_value("vllm:pillion_engine_state", {**LABELS, "state": "unaccepted"}) == 1
