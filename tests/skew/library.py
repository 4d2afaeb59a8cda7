"""The C library of any release, by ctypes: the calls of an engine of one rank in host memory. docs/c-api.md has the order."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
from ctypes import POINTER, byref, c_bool, c_char_p, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

OK, REFUSED = 0, 2
BLOCK_BYTES = 4096
# For tests alone: a serving engine gives up after 2 ms.
QUERY_BUDGET_US = 10_000_000


def _items(kind: Any) -> Any:
    """PillionItems of this kind."""

    class Items(ctypes.Structure):
        _fields_ = [("items", POINTER(kind)), ("count", c_size_t)]

        @classmethod
        def of(cls, values: list[Any]) -> Items:
            return cls((kind * len(values))(*values), len(values))

    return Items


class Region(ctypes.Structure):
    """PillionRegion."""

    _fields_ = [("memory", c_uint32), ("offset", c_uint64), ("stride", c_uint64), ("bytes", c_uint64)]


class Fact(ctypes.Structure):
    """PillionFact."""

    _fields_ = [("name", c_char_p), ("value", c_char_p)]


Run = c_uint8 * 16
Hash = c_uint8 * 32
Bytes, Words, WideWords, Numbers = _items(c_uint8), _items(c_uint32), _items(c_uint64), _items(ctypes.c_int32)
Hashes, Regions, Facts = _items(Hash), _items(Region), _items(Fact)


class SchedulerOptions(ctypes.Structure):
    """PillionSchedulerOptions."""

    _fields_ = [
        ("socket", c_char_p),
        ("engine", c_char_p),
        ("world_size", c_uint32),
        ("run", Run),
        ("query_budget_us", c_uint64),
        ("sidecar_copies", c_bool),
        ("early_loads", c_bool),
        ("miss_wait_ms", c_uint32),
        ("groups", Bytes),
    ]


class SchedulerState(ctypes.Structure):
    """PillionSchedulerState."""

    _fields_ = [
        ("generation", c_uint64),
        ("saving", c_uint64),
        ("connected", c_bool),
        ("notice", c_char_p),
        ("namespace_word", c_uint64),
        ("blocks_checked", c_uint64),
        ("blocks_differing", c_uint64),
        ("blocks_unproven", c_uint64),
        ("blocks_unaccepted", c_uint64),
    ]


class WorkerOptions(ctypes.Structure):
    """PillionWorkerOptions."""

    _fields_ = [
        ("socket", c_char_p),
        ("engine", c_char_p),
        ("world_size", c_uint32),
        ("rank", c_uint32),
        ("shard", c_uint32),
        ("shards", c_uint32),
        ("blocks", c_uint32),
        ("sidecar_copies", c_bool),
        ("regions", Regions),
        ("facts", Facts),
        ("expects", c_char_p),
        ("live_weights", Bytes),
        ("descriptors", Numbers),
        ("pointers", WideWords),
        ("cuts", WideWords),
        ("stream", c_uint64),
        ("groups", Bytes),
    ]


class Loaded(ctypes.Structure):
    """PillionLoaded."""

    _fields_ = [("ended", c_bool), ("op", c_uint64), ("failed", Words)]


SIGNATURES: dict[str, list[Any]] = {
    "worker_connect": [POINTER(WorkerOptions), POINTER(c_void_p)],
    "worker_start": [c_void_p, POINTER(Run), c_uint64, c_uint64],
    "worker_load": [c_void_p, Bytes, c_uint64, c_bool, POINTER(Loaded)],
    "worker_done": [c_void_p, c_uint64, c_bool, c_uint64],
    "worker_free": [c_void_p],
    "scheduler_connect": [POINTER(SchedulerOptions), POINTER(c_void_p)],
    "scheduler_open": [c_void_p, POINTER(c_int64)],
    "scheduler_append": [c_void_p, c_int64, c_uint32, Hashes, POINTER(c_uint32)],
    "scheduler_query": [c_void_p, c_int64, c_uint32, c_uint32, POINTER(c_int64)],
    "scheduler_load": [c_void_p, c_int64, c_uint32, Words, c_uint64, c_bool, POINTER(Bytes)],
    "scheduler_save": [c_void_p, c_int64, c_uint32, Words, c_uint64, POINTER(c_bool)],
    "scheduler_accept": [c_void_p, c_uint64],
    "scheduler_close": [c_void_p, c_int64],
    "scheduler_end_step": [c_void_p, POINTER(SchedulerState)],
    "scheduler_free": [c_void_p],
}


class Library:
    """One release's libpillion.so. Two of them work in one process without sharing symbols."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.pillion_version.restype = self._library.pillion_error_text.restype = c_char_p
        for name, arguments in SIGNATURES.items():
            if self.has(name):
                getattr(self._library, f"pillion_{name}").argtypes = arguments

    def has(self, name: str) -> bool:
        """True if its release has this call."""
        return hasattr(self._library, f"pillion_{name}")

    @property
    def version(self) -> str:
        """Its release."""
        return bytes(self._library.pillion_version()).decode()

    def attempt(self, name: str, *arguments: Any) -> tuple[int, str]:
        """A call that may fail: its status, and the error."""
        status = int(getattr(self._library, f"pillion_{name}")(*arguments))
        return status, "" if status == OK else bytes(self._library.pillion_error_text()).decode()

    def call(self, name: str, *arguments: Any) -> None:
        """A call that must succeed."""
        status, text = self.attempt(name, *arguments)
        assert status == OK, f"pillion_{name}: {text}"

    def free(self, name: str, handle: c_void_p) -> None:
        """Frees a handle, or nothing if it is null."""
        getattr(self._library, f"pillion_{name}_free")(handle)


@dataclasses.dataclass(frozen=True)
class Release:
    """The sidecar and the engine's library of one release."""

    binary: Path
    library: Library


class Engine:
    """Scheduler and worker in one, with blocks 1 to `blocks` of host memory. Block 0 is never saved."""

    def __init__(self, library: Library, socket: Path, blocks: int, facts: dict[str, str]) -> None:
        self.library = library
        self.scheduler, self.worker = c_void_p(), c_void_p()
        self._run = Run(*os.urandom(16))
        self._step = 0
        descriptor = os.memfd_create("kv")
        os.ftruncate(descriptor, (1 + blocks) * BLOCK_BYTES)
        self._memory = mmap.mmap(descriptor, 0)
        worker = WorkerOptions(socket=bytes(socket), engine=b"skew", world_size=1, shards=1, blocks=1 + blocks)
        worker.regions = Regions.of([Region(0, 0, BLOCK_BYTES, BLOCK_BYTES)])
        worker.facts = Facts.of([Fact(name.encode(), value.encode()) for name, value in facts.items()])
        worker.descriptors = Numbers.of([descriptor])
        # The sidecar's answer to the rank: a status and a text.
        self.refusal = library.attempt("worker_connect", byref(worker), byref(self.worker))
        os.close(descriptor)
        options = SchedulerOptions(socket=bytes(socket), engine=b"skew", world_size=1, run=self._run)
        options.query_budget_us = QUERY_BUDGET_US
        library.call("scheduler_connect", byref(options), byref(self.scheduler))

    def close(self) -> None:
        """Disconnects from the sidecar."""
        self.library.free("scheduler", self.scheduler)
        self.library.free("worker", self.worker)

    def block(self, number: int) -> bytes:
        """The bytes of a block."""
        return self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def put(self, number: int, content: bytes) -> None:
        """Writes a block, as if it were computed."""
        self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = content

    def state(self) -> SchedulerState:
        """Ends an empty step; the scheduler's state."""
        state = SchedulerState()
        self.library.call("scheduler_end_step", self.scheduler, byref(state))
        return state

    def open(self, hashes: list[bytes]) -> int:
        """A log of these blocks; -1 without a sidecar."""
        log, length = c_int64(), c_uint32()
        self.library.call("scheduler_open", self.scheduler, byref(log))
        if log.value >= 0:
            keys = Hashes.of([Hash(*one) for one in hashes])
            self.library.call("scheduler_append", self.scheduler, log, 0, keys, byref(length))
            assert length.value == len(hashes)
        return log.value

    def close_log(self, log: int) -> None:
        """Closes the log, as at a request's end."""
        self.library.call("scheduler_close", self.scheduler, log)

    def query(self, log: int, count: int) -> int:
        """The number of kept blocks from the first on; -1 while the sidecar has not answered."""
        hits = c_int64()
        self.library.call("scheduler_query", self.scheduler, log, 0, count, byref(hits))
        return hits.value

    def load(self, log: int, count: int) -> list[int]:
        """Loads the first blocks of a log, after a query hit them; the failed ones."""
        plan, loaded = Bytes(), Loaded()
        self._step += 1
        ids = Words.of(list(range(1, 1 + count)))
        self.library.call("scheduler_load", self.scheduler, log, 0, ids, self._step, True, byref(plan))
        # Valid until the scheduler's next call.
        travelling = Bytes.of(plan.items[: plan.count])
        self.library.call("scheduler_end_step", self.scheduler, None)
        self._turn(lambda: self.library.call("worker_load", self.worker, travelling, 0, False, byref(loaded)))
        assert loaded.ended
        return list(loaded.failed.items[: loaded.failed.count])

    def save(self, log: int, count: int) -> bool:
        """Posts a save of the first blocks of a log, and accepts its step; false if the save is dropped."""
        posted = c_bool()
        self._step += 1
        ids = Words.of(list(range(1, 1 + count)))
        self.library.call("scheduler_save", self.scheduler, log, 0, ids, self._step, byref(posted))
        self.library.call("scheduler_end_step", self.scheduler, None)
        if self.worker:
            self._turn(lambda: None)
        # 0.2.0 accepts nothing.
        if self.library.has("scheduler_accept"):
            self.library.call("scheduler_accept", self.scheduler, self._step)
        return posted.value

    def idle(self) -> None:
        """Plays an empty step, in which ranks join."""
        self._step += 1
        self.library.call("scheduler_end_step", self.scheduler, None)
        self._turn(lambda: None)

    def _turn(self, work: Any) -> None:
        """The workers' part of a step."""
        self.library.call("worker_start", self.worker, byref(self._run), self._step, 0)
        work()
        self.library.call("worker_done", self.worker, self._step, True, 0)
