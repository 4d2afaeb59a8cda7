"""vLLM's scheduler with a clock: the time of each schedule() call.

`scheduler_cls` names it, and it runs in vLLM's scheduling process. Every call appends one record to the file
PILLION_TEST_SCHEDULE_TIMES, so a killed engine's times are kept.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from pathlib import Path
from typing import Any

RECORD = struct.Struct("<QQQ")
# Fields of the calling thread: nanoseconds on a core, nanoseconds runnable without one, turns.
SCHEDSTAT = "/proc/thread-self/schedstat"


@dataclasses.dataclass(frozen=True)
class Call:
    """One schedule() call, in nanoseconds of CLOCK_MONOTONIC, the same clock in all processes."""

    start: int
    duration: int
    # The part of the duration in which the thread could have run, but had no core.
    without_core: int


def read(path: Path) -> list[Call]:
    """The calls recorded so far, without an incomplete record."""
    records = path.read_bytes()
    return [Call(*fields) for fields in RECORD.iter_unpack(records[: len(records) // RECORD.size * RECORD.size])]


def __getattr__(name: str) -> Any:
    # The class is made on demand: the tests import this module too, and not vLLM with it.
    if name != "TimedScheduler":
        raise AttributeError(name)
    from vllm.v1.core.sched.scheduler import Scheduler

    class TimedScheduler(Scheduler):
        """Records when each call began, how long it took, and how long it had no core."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._times = os.open(os.environ["PILLION_TEST_SCHEDULE_TIMES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._schedstat = -1

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._schedstat < 0:
                self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY)
            without_core = self._without_core()
            start = time.monotonic_ns()
            output = super().schedule(*args, **kwargs)
            duration = time.monotonic_ns() - start
            os.write(self._times, RECORD.pack(start, duration, self._without_core() - without_core))
            return output

        def _without_core(self) -> int:
            return int(os.pread(self._schedstat, 64, 0).split()[1])

    globals()[name] = TimedScheduler
    return TimedScheduler
