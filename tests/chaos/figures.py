"""The figures of a campaign, under the names of its JSON line."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

from chaos.faults import ENGINE_KILL, Fault
from chaos.load import Request
from testkit import timed_scheduler


@dataclasses.dataclass(frozen=True)
class Stalls:
    """Durations of schedule() calls, in milliseconds."""

    all: list[float]
    on_core: list[float]


@dataclasses.dataclass
class Figures:
    """Sums over a campaign.

    `max_added_wait_ms` is the longest wait of a request beyond the median of its prompt in the undisturbed run: same load, same
    shape of engine, no connector. Requests during a freeze or a kill of the engine itself are not in it; they are in
    `max_added_wait_engine_faults_ms`. `max_schedule_stall_ms` is the longest schedule() call without a freeze of the engine;
    `..._on_core` leaves out the time in which the thread could have run, but other processes had the cores. `..._undisturbed`
    is the same of the runs without connector.
    """

    seed: int = 0
    rounds: int = 0
    kills: int = 0
    engine_kills: int = 0
    freezes: int = 0
    drains: int = 0
    requests: int = 0
    asked_again: int = 0
    wrong_tokens: int = 0
    wrong_logprobs: int = 0
    lost: int = 0
    max_added_wait_ms: float = 0.0
    p99_added_wait_ms: float = 0.0
    max_added_wait_undisturbed_ms: float = 0.0
    max_added_wait_engine_faults_ms: float = 0.0
    query_budget_ms: float = 0.0
    max_schedule_stall_ms: float = 0.0
    max_schedule_stall_undisturbed_ms: float = 0.0
    max_schedule_stall_on_core_ms: float = 0.0
    max_schedule_stall_on_core_undisturbed_ms: float = 0.0
    p99_schedule_stall_ms: float = 0.0
    p99_schedule_stall_undisturbed_ms: float = 0.0
    reconnect_ms_p99: float = 0.0
    saves_posted: int = 0
    saves_lost_to_reuse: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0

    def count(self, fault: Fault) -> None:
        """Counts one round."""
        self.rounds += 1
        self.kills += fault.endswith("kill")
        self.engine_kills += fault == ENGINE_KILL
        self.freezes += "freeze" in fault
        self.drains += fault == "sidecar-drain"

    def note_waits(self, added: list[float], engine_faults: list[float], undisturbed: list[float]) -> None:
        """Takes the added waits of requests, in milliseconds, of each kind."""
        self.max_added_wait_ms = max(added, default=0.0)
        self.p99_added_wait_ms = p99(added)
        self.max_added_wait_engine_faults_ms = max(engine_faults, default=0.0)
        self.max_added_wait_undisturbed_ms = max(undisturbed, default=0.0)

    def note_stalls(self, disturbed: list[Stalls], undisturbed: list[Stalls]) -> None:
        """Takes the durations of schedule() calls, with and without a connector."""

        def longest(lists: Iterable[list[float]]) -> float:
            return max((value for values in lists for value in values), default=0.0)

        self.max_schedule_stall_ms = longest(stalls.all for stalls in disturbed)
        self.max_schedule_stall_undisturbed_ms = longest(stalls.all for stalls in undisturbed)
        self.max_schedule_stall_on_core_ms = longest(stalls.on_core for stalls in disturbed)
        self.max_schedule_stall_on_core_undisturbed_ms = longest(stalls.on_core for stalls in undisturbed)
        self.p99_schedule_stall_ms = p99(value for stalls in disturbed for value in stalls.all)
        self.p99_schedule_stall_undisturbed_ms = p99(value for stalls in undisturbed for value in stalls.all)

    def line(self) -> str:
        """One line of JSON."""
        rounded = {name: round(value, 3) for name, value in dataclasses.asdict(self).items()}
        return json.dumps(rounded)


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of CLOCK_MONOTONIC, in seconds."""

    start: float
    end: float

    def overlaps(self, start: float, end: float) -> bool:
        """True if the two have a moment in common."""
        return start <= self.end and self.start <= end


def p99(values: Iterable[float]) -> float:
    """The 99th percentile: the smallest value not exceeded by 99 of 100; 0 without values."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * 0.99) - 1] if ordered else 0.0


def typical_waits(answered: list[Request]) -> dict[int, float]:
    """The median wait of every prompt, in seconds."""
    waits = defaultdict(list)
    for request in answered:
        waits[request.prompt].append(request.answered - request.asked)
    return {prompt: statistics.median(values) for prompt, values in waits.items()}


def added_waits(answered: list[Request], typical: dict[int, float]) -> list[float]:
    """The added wait of every request in milliseconds: its wait less its prompt's typical wait."""
    return [1e3 * (request.answered - request.asked - typical[request.prompt]) for request in answered]


def stalls(calls: list[timed_scheduler.Call], but: list[Span]) -> Stalls:
    """The calls outside all of the spans."""
    counted = [
        call for call in calls if not any(span.overlaps(call.start / 1e9, (call.start + call.duration) / 1e9) for span in but)
    ]
    return Stalls(
        [call.duration / 1e6 for call in counted],
        [max(0, call.duration - call.without_core) / 1e6 for call in counted],
    )
