"""One record a request: how long a request that asked the cache waited until it was computed, and for what.

The scheduler role tells what happens; that costs a look at the clock. Kept are one of so many records and all slow ones. A
thread writes each as a line of the engine's log and sends it as a span (docs/decisions/0036).
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, get_args

from pillion import handover, vllm_compat
from pillion.config import Config
from pillion.state import RecordEnd, Source

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pillion.spans import Spans

# What a request waits for. query: the cache's answer; producer: that answer, once it was put off because another engine
# computes the prompt; waiting: room in the engine; copy: the blocks; ready: the step that computes the request.
Part = Literal["query", "producer", "waiting", "copy", "ready"]
PARTS: tuple[Part, ...] = get_args(Part)
# Records that wait for the thread: with more, a receiver is too slow for them.
QUEUE_MAX = 256
# How long an engine's end waits for records that are still to be written.
CLOSE_S = 1.0
logger = vllm_compat.init_logger("vllm.pillion")


def _no_times() -> dict[Part, float]:
    return dict.fromkeys(PARTS, 0.0)


@dataclass(slots=True, eq=False)
class Record:
    """One request. Its parts follow each other, so they add up to the whole."""

    request: Request
    # Of the prompt, and of what a preempted request had answered.
    tokens: int
    # Tokens of the prompt whose KV was in the cache of vLLM.
    computed_tokens: int
    part: Part = "query"
    since_s: float = field(default_factory=time.monotonic)
    times_s: dict[Part, float] = field(default_factory=_no_times)
    is_async: bool = False
    hit_tokens: int = 0
    found: dict[Source, int] = field(default_factory=dict)
    load: Literal["none", "sync", "async", "failed"] = "none"
    end: Literal["computed", "aborted"] = "computed"
    # Seconds since 1970.
    ended_s: float = 0.0

    def enter(self, part: Part) -> None:
        """From now on the request waits for this."""
        now = time.monotonic()
        self.times_s[self.part] += now - self.since_s
        self.part, self.since_s = part, now

    @property
    def whole_s(self) -> float:
        """How long it has waited up to the last `enter`."""
        return sum(self.times_s.values())

    def told(self) -> dict[str, Any]:
        """The fields of the log line and of the span; times are in milliseconds."""
        names = ("tokens", "computed_tokens", "hit_tokens", "found", "load", "end")
        told = {"request": vllm_compat.request_id(self.request)} | {name: getattr(self, name) for name in names}
        told["whole_ms"] = round(self.whole_s * 1e3, 3)
        return told | {f"{part}_ms": round(seconds * 1e3, 3) for part, seconds in self.times_s.items()}


class Records:
    """The records of requests that are not computed yet, and what becomes of those that are kept."""

    def __init__(self, config: Config, engine_id: str, steps_in_flight: int) -> None:
        self._every, self._slow_s = config.record_every, config.record_slow_ms / 1e3
        self._steps_in_flight = steps_in_flight
        self._open: dict[str, Record] = {}
        # Requests whose blocks a step loads while it computes, with the step at whose schedule that has ended.
        self._loading: deque[tuple[int, Record]] = deque()
        self._count = 0
        self._kept: SimpleQueue[Record | None] = SimpleQueue()
        self._ends: Counter[RecordEnd] = Counter()
        self._lock = threading.Lock()
        self._spans = _spans(config.record_otlp, engine_id)
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- what happens to a request ---

    def asks(self, request: Request, computed_tokens: int) -> None:
        """The cache is about to be asked, most likely not for the first time."""
        name = vllm_compat.request_id(request)
        if name not in self._open:
            self._open[name] = Record(request, vllm_compat.token_count(request), computed_tokens)

    def asked(self, request: Request, answered: bool, is_async: bool) -> None:
        """The cache has answered, or has put that off; a load of what it has found is one beside the steps or not."""
        record = self._open[vllm_compat.request_id(request)]
        pending: Part = "producer" if handover.awaits(request) and not vllm_compat.was_preempted(request) else "query"
        record.enter("waiting" if answered else pending)
        record.is_async = is_async

    def loads(self, request: Request, tokens: int, found: dict[Source, int]) -> None:
        """A load of `tokens` tokens into blocks that vLLM has allocated has been planned."""
        if record := self._open.get(vllm_compat.request_id(request)):
            record.enter("copy")
            record.hit_tokens, record.found, record.load = tokens, found, "async" if record.is_async else "sync"

    def received(self, request_ids: set[str]) -> None:
        """Every rank has said that the load has ended."""
        for request_id in request_ids:
            if record := self._open.get(request_id):
                record.enter("ready")

    def failed(self, is_refused: Callable[[Request], bool]) -> None:
        """Loads have failed, those of requests that are refused the cache from now on."""
        for record in self._open.values():
            if is_refused(record.request):
                record.load = "failed"

    def scheduled(self, output: SchedulerOutput, step: int) -> None:
        """A step computes what it names, beginning with requests that are new in it."""
        for request_id in vllm_compat.begun_ids(output):
            record = self._open.get(request_id)
            if record and record.load == "sync":
                self._loading.append((step + self._steps_in_flight, record))
            elif record:
                self._end(record)
        while self._loading and self._loading[0][0] <= step:
            _, record = self._loading.popleft()
            if self._open.get(vllm_compat.request_id(record.request)) is record:
                self._end(record)

    def finished(self, request: Request) -> None:
        """The request is over, perhaps before it was computed."""
        if record := self._open.get(vllm_compat.request_id(request)):
            record.end = "computed" if vllm_compat.answered(request) else "aborted"
            self._end(record)

    def _end(self, record: Record) -> None:
        del self._open[vllm_compat.request_id(record.request)]
        record.enter("ready")
        self._count += 1
        chosen = self._every > 0 and self._count % self._every == 0
        if not chosen and record.whole_s < self._slow_s:
            return
        record.ended_s = time.time()
        if self._kept.qsize() >= QUEUE_MAX:
            self._note("dropped")
            return
        self._kept.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="pillion-records", daemon=True)
            self._thread.start()

    # --- what is kept ---

    def take_ends(self) -> dict[RecordEnd, int]:
        """How many records were written, refused or dropped since the last call."""
        with self._lock:
            taken = dict(self._ends)
            self._ends.clear()
        return taken

    def close(self) -> None:
        """Nothing is told any more. What a receiver does not take by then is lost."""
        if self._thread is not None:
            self._kept.put(None)
            self._thread.join(CLOSE_S)
        self._closed = True

    def _note(self, end: RecordEnd) -> None:
        with self._lock:
            self._ends[end] += 1

    def _write(self) -> None:
        while (record := self._kept.get()) and not self._closed:
            told = record.told()
            logger.info("pillion request %s", json.dumps(told))
            self._note("written" if self._send(record, told) else "refused")

    def _send(self, record: Record, told: dict[str, Any]) -> bool:
        if self._spans is None:
            return True
        return self._spans.send(
            told, vllm_compat.trace_headers(record.request), record.ended_s - record.whole_s, record.ended_s
        )


def _spans(url: str | None, engine_id: str) -> Spans | None:
    if url is None:
        return None
    try:
        # vLLM has these libraries; without `pillion.record_otlp` they are not read.
        from pillion.spans import Spans

        return Spans(url, engine_id)
    except ImportError as error:
        remedy = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        logger.error("pillion: pillion.record_otlp has no effect: %s; %s", error, remedy)
        return None
