"""An engine's state and counts in vLLM's own metrics: `vllm:pillion_engine_state`, `vllm:pillion_stays_out` with the reason,
`vllm:pillion_hit_tokens_total`, `vllm:pillion_records_total`, `vllm:pillion_hints_total`, `vllm:pillion_unaccepted_steps_total`
and `vllm:pillion_unproven_blocks_total`.

vLLM asks the connector for statistics with every step, in the process of the scheduler. Its front end gets them as plain data
and gives them to its own [PromMetrics][pillion.state.PromMetrics]. An idle engine reports nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from pillion.numbers import PolicyState
from pillion.vllm_compat import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# serving: blocks are found and kept, unless the sidecar shows the namespace as closed to the engine. unbound: the sidecar does
# not know the facts of all ranks yet. unaccepted: blocks are found, and none are kept, since the connector does not learn of
# taken outputs. away: there is no sidecar, or it refuses the engine. out: no sidecar can serve the engine.
State = PolicyState | Literal["out"]
STATES: tuple[State, ...] = (*get_args(PolicyState), "out")
# Places of hits, by vLLM's names: the sidecar's memory, its disks, another sidecar. In the order of the shim.
Source = Literal["host", "disk", "p2p"]
SOURCES: tuple[Source, ...] = get_args(Source)
# Ends of a kept record: written and, with a receiver, sent; not taken by its receiver; dropped because too many waited for a
# receiver.
RecordEnd = Literal["written", "refused", "dropped"]
RECORD_ENDS: tuple[RecordEnd, ...] = get_args(RecordEnd)
# Results not kept, each a counter of its own, with the help of its metric.
UNKEPT = {
    "unaccepted_steps": "Steps whose output vLLM did not take, because they raised, were skipped or were refused. Nothing "
    "that they computed is kept; the exception is in the engine's log.",
    "unproven_blocks": "Blocks that vLLM's prefix cache gave to a request although no accepted step had filled them. Nothing "
    "computed from them is kept; reset vLLM's prefix cache, and use --scheduling-policy fcfs.",
}
# Outcomes of hints, by action; `hints` stands for refused ones.
HINTS = [f"{action}.{end}" for action in ("retain", "pin", "demote", "prefetch") for end in ("done", "clipped", "missing")]
HINTS.append("hints.refused")
# Counts since the report before, by metric, and there by label or name.
Counts = Mapping[str, Mapping[str, int]]
NO_COUNTS: dict[str, Mapping[str, int]] = {"hit_tokens": {}, "records": {}, "unkept": {}, "hints": {}}
# Characters of a reason in a report.
REASON_MAX = 200


def name_counts(names: Iterable[str], counts: Iterable[int]) -> dict[str, int]:
    """Counts by their names, without zeros."""
    return {name: count for name, count in zip(names, counts, strict=True) if count}


class EngineState(KVConnectorStats):
    """One report: `state`, the `reason` of `out`, and the counts since the report before."""

    data: dict[str, Any]

    @classmethod
    def of(cls, state: State, reason: str, counts: Counts = NO_COUNTS) -> EngineState:
        """A report as it travels."""
        return cls(data={"state": state, "reason": reason[:REASON_MAX], **counts})

    def reset(self) -> None:
        """Nothing was reported."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> EngineState:
        """The later state, and the sum of the counts."""
        if self.data and other.data:
            both = {name: dict(Counter(self.data[name]) + Counter(other.data[name])) for name in NO_COUNTS}
            self.data = other.data | both
        else:
            self.data = other.data or self.data
        return self

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log line."""
        return {"pillion": self.data["state"]}

    def is_empty(self) -> bool:
        """True if nothing was reported."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The gauges, in the process of vLLM's front end.

    Their names begin with `vllm:`, because vLLM removes such metrics from the registry before it makes them again.
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
            documentation="1 for the state of this engine in its last step. serving: loads and saves; unbound: some ranks "
            "have not joined; unaccepted: nothing is kept, since vLLM reports no outputs; away: no sidecar, start it, or look "
            "in the engine's log for a refusal; out: see vllm:pillion_stays_out.",
            labelnames=[*labelnames, "state"],
            multiprocess_mode="mostrecent",
        )
        self._reasons = self._gauge_cls(
            name="vllm:pillion_stays_out",
            documentation="1 if the engine cannot be served; the label reason names what to change.",
            labelnames=[*labelnames, "reason"],
            multiprocess_mode="mostrecent",
        )
        self._hit_tokens = self._counter_cls(
            name="vllm:pillion_hit_tokens",
            documentation="Prompt tokens that were loaded, counted once for each request, by where their blocks were when the "
            "request asked. host: the sidecar's memory; disk: its disks; p2p: another sidecar.",
            labelnames=[*labelnames, "source"],
        )
        self._records = self._counter_cls(
            name="vllm:pillion_records",
            documentation="Records of requests, by outcome. written: in the log, and sent to pillion.record_otlp if that is "
            "set; refused: not sent, the engine's log says why; dropped: neither, because the receiver was too slow.",
            labelnames=[*labelnames, "end"],
        )
        self._hints = self._counter_cls(
            name="vllm:pillion_hints",
            documentation="Hints of clients, by action and outcome. done: carried out; clipped: blocks are beyond a limit; "
            "missing: blocks are nowhere; refused: they break the schema, the engine's log says how.",
            labelnames=[*labelnames, "action", "outcome"],
        )
        self._unkept = {
            name: self._counter_cls(name=f"vllm:pillion_{name}", documentation=text, labelnames=labelnames)
            for name, text in UNKEPT.items()
        }
        for values in per_engine_labelvalues.values():
            for counter in self._unkept.values():
                counter.labels(*values)
            for source in SOURCES:
                self._hit_tokens.labels(*values, source)
            for end in RECORD_ENDS:
                self._records.labels(*values, end)
            for hint in HINTS:
                self._hints.labels(*values, *hint.split("."))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Shows a report."""
        values = self.per_engine_labelvalues[engine_idx]
        for state in STATES:
            self._states.labels(*values, state).set(int(state == transfer_stats_data["state"]))
        for source, tokens in transfer_stats_data["hit_tokens"].items():
            self._hit_tokens.labels(*values, source).inc(tokens)
        for end, records in transfer_stats_data["records"].items():
            self._records.labels(*values, end).inc(records)
        for hint, number in transfer_stats_data["hints"].items():
            self._hints.labels(*values, *hint.split(".")).inc(number)
        for name, number in transfer_stats_data["unkept"].items():
            self._unkept[name].labels(*values).inc(number)
        if transfer_stats_data["reason"]:
            self._reasons.labels(*values, transfer_stats_data["reason"]).set(1)
