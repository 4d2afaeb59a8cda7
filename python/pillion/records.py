"""Kept records of requests: a thread writes each as a line of the engine's log and sends it as a span (docs/decisions/0036).

Kept by `connector-shim/src/core/records.rs`, a part of the policy in Rust.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pillion import vllm_compat
from pillion.config import Config
from pillion.numbers import PolicyRecord
from pillion.state import SOURCES, RecordEnd

if TYPE_CHECKING:
    from pillion.spans import Spans

# The parts of a request's wait. query: the cache's answer; producer: the answer, put off for another engine's computation of
# the prompt; waiting: room in the engine; copy: the blocks; ready: the step with the request.
Part = Literal["query", "producer", "waiting", "copy", "ready"]
PARTS: tuple[Part, ...] = get_args(Part)
# The most records before the thread: with more, a receiver is too slow for them.
QUEUE_MAX = 256
# The longest wait of an engine's end for unwritten records.
CLOSE_S = 1.0
logger = vllm_compat.init_logger("vllm.pillion")


class Kept(NamedTuple):
    """A record: the fields of its log line and span, times in milliseconds; the request's trace; seconds since 1970."""

    told: dict[str, Any]
    headers: Mapping[str, str] | None
    begun_s: float
    ended_s: float


class Records:
    """The kept records before they are written and sent."""

    def __init__(self, config: Config, engine_id: str) -> None:
        self._kept: SimpleQueue[Kept | None] = SimpleQueue()
        self._ends: Counter[str] = Counter()
        # Records of requests whose hints have no outcome yet, by number; and outcomes of hints, as action.outcome.
        self._hinted: dict[int, Kept] = {}
        self._hints: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._spans = _spans(config.record_otlp, engine_id) if config.record_otlp is not None else None
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, req_id: str, headers: Mapping[str, str] | None, record: PolicyRecord) -> None:
        """Keeps the record of a computed or ended request."""
        if self._kept.qsize() >= QUEUE_MAX:
            self._note("dropped")
            return
        number, (tokens, computed, hit), found, load, aborted, times, hinted = record
        told = {"request": req_id, "tokens": tokens, "computed_tokens": computed, "hit_tokens": hit}
        told["found"] = {source: each for source, each in zip(SOURCES, found, strict=True) if each}
        told |= {"load": load, "end": "aborted" if aborted else "computed", "whole_ms": round(sum(times) * 1e3, 3)}
        told |= {f"{part}_ms": round(seconds * 1e3, 3) for part, seconds in zip(PARTS, times, strict=True)}
        ended_s = time.time()
        kept = Kept(told, headers, ended_s - sum(times), ended_s)
        if hinted and number not in self._hinted:
            self._hinted[number] = kept
        else:
            self._put(kept)

    def end_hints(self, number: int, ends: list[tuple[str, str]]) -> None:
        """Notes the outcomes of an ended request's hints: its record has them."""
        self._hints.update(f"{action}.{end}" for action, end in ends)
        if kept := self._hinted.pop(number, None):
            kept.told["hints"] = dict(ends)
            self._put(kept)

    def take_hints(self) -> dict[str, int]:
        """Counts of outcomes of hints since the last call."""
        taken, self._hints = dict(self._hints), Counter()
        return taken

    def _put(self, kept: Kept) -> None:
        self._kept.put(kept)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="pillion-records", daemon=True)
            self._thread.start()

    def take_ends(self) -> dict[str, int]:
        """Counts of records written, refused or dropped since the last call."""
        with self._lock:
            taken = dict(self._ends)
            self._ends.clear()
        return taken

    def close(self) -> None:
        """Stops the thread. Records not taken by the receiver until then are lost."""
        if self._thread is not None:
            self._kept.put(None)
            self._thread.join(CLOSE_S)
        self._closed = True

    def _note(self, end: RecordEnd) -> None:
        with self._lock:
            self._ends[end] += 1

    def _write(self) -> None:
        while (record := self._kept.get()) and not self._closed:
            logger.info("pillion request %s", json.dumps(record.told))
            taken = self._spans is None or self._spans.send(*record)
            self._note("written" if taken else "refused")


def _spans(url: str, engine_id: str) -> Spans | None:
    try:
        # vLLM has these libraries; without `pillion.record_otlp` they are not read.
        from pillion.spans import Spans

        return Spans(url, engine_id)
    except ImportError as error:
        remedy = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        logger.error("pillion: pillion.record_otlp has no effect: %s; %s", error, remedy)
        return None
