"""What an engine gets of Pillion, in vLLM's own metrics: `vllm:pillion_engine_state`, and `vllm:pillion_stays_out` with why.

vLLM asks the connector for statistics with every step, in the process of the scheduler. Its front end gets them as plain data
and gives them to [PromMetrics][pillion.state.PromMetrics], which it has made there. An idle engine reports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pillion.vllm_compat import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Blocks are found and kept; the sidecar does not know yet what the engine's ranks compute with, or has closed the namespace to
# it; there is no sidecar, or it refuses the engine; the engine cannot be served at all.
State = Literal["serving", "unbound", "away", "out"]
STATES: tuple[State, ...] = get_args(State)
# Characters of a reason that are shown.
REASON_MAX = 200


class EngineState(KVConnectorStats):
    """One report: `state`, and where that is `out` the `reason`."""

    data: dict[str, str]

    @classmethod
    def of(cls, state: State, reason: str) -> EngineState:
        """A report as it travels."""
        return cls(data={"state": state, "reason": reason[:REASON_MAX]})

    def reset(self) -> None:
        """Nothing was reported."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> EngineState:
        """The later one counts."""
        self.data = other.data or self.data
        return self

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log line."""
        return {"pillion": self.data["state"]}

    def is_empty(self) -> bool:
        """Whether nothing was reported."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The gauges, in the process of vLLM's front end.

    `vllm:` begins their names, since vLLM takes metrics of such names out of the registry before it makes them anew.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._states = self._gauge_cls(
            name="vllm:pillion_engine_state",
            documentation="1 for what the engine got of Pillion in its last step; away: start the sidecar, or see the engine's "
            "log for what it refuses; out: see vllm:pillion_stays_out.",
            labelnames=[*labelnames, "state"],
            multiprocess_mode="mostrecent",
        )
        self._reasons = self._gauge_cls(
            name="vllm:pillion_stays_out",
            documentation="1 where the engine cannot be served: its reason names what to change.",
            labelnames=[*labelnames, "reason"],
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Shows a report."""
        values = self.per_engine_labelvalues[engine_idx]
        for state in STATES:
            self._states.labels(*values, state).set(int(state == transfer_stats_data["state"]))
        if transfer_stats_data["reason"]:
            self._reasons.labels(*values, transfer_stats_data["reason"]).set(1)
