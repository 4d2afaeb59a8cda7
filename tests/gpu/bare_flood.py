"""An engine that only loads: the same blocks again and again, with a backlog of a given size.

As a program it imports, reads its options from a JSON line, saves its blocks once, and keeps `queued_bytes` of asynchronous
loads waiting. A further line has it close the gates of all loads behind its session; when its input ends, its loads end and it
exits. It writes a JSON line several times a second. Without a GPU its memory is the host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import select
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from pillion import _shim
from testkit.child import Child, Parent, python
from testkit.sessions import Sessions

# Blocks of 640 KiB, delivered in three cuts as vLLM's would be.
LAYERS, LAYER_BYTES = 20, 32 << 10
BLOCK_BYTES = LAYERS * LAYER_BYTES
CUTS = [LAYER_BYTES * layers for layers in (4, 16, LAYERS)]
MULTIPLIER = 1_000_003
# Loads begun in a step: the backlog is there within some hundred steps.
LOADS_OF_A_STEP = 16
STEP_S = 0.004
# Steps launched ahead of the GPU.
STEPS_AHEAD = 2
TELL_S = 0.25
READY_S, DRAIN_S = 60, 60
# The place of the gates of loads in a session's memory; shm-protocol/PROTOCOL.md, section 2.
GATES, OPERATIONS = 51_974_144, 4096
# Above every operation of the tests.
OPERATION_MAX = 1 << 40
HERE = Path(__file__).resolve().parent


class Flood(Child):
    """One such engine, from the test's side. It imports torch before `start`."""

    def __init__(self, log: Path) -> None:
        super().__init__(python("bare_flood"), log, path=[HERE])
        self.last: dict[str, Any] = {}

    def start(self, **options: Any) -> None:
        """Sends its options: `socket`, `namespace`, `blocks` of a load, `queued_bytes`, and `device`, -1 for host memory."""
        self.tell(options)

    def found(self, watchdog_s: float = READY_S) -> dict[str, Any]:
        """Its next line; no word may have been wrong."""
        self.last = json.loads(self.line(watchdog_s))
        assert self.last["wrong_words"] == 0, f"wrong bytes: {self.last}"
        return self.last

    def news(self) -> dict[str, Any]:
        """The first line written after this call; lines before it are skipped."""
        while self.line_within(0) is not None:
            pass
        self.found()
        return self.found()

    def wait_until(self, condition: Any, what: str, watchdog_s: float = READY_S) -> dict[str, Any]:
        """The first of its lines for which the condition holds."""
        deadline = time.monotonic() + watchdog_s
        while not condition(self.found()):
            if time.monotonic() > deadline:
                raise self.failed(f"no {what} in {watchdog_s} s: {self.last}")
        return self.last

    def close_gates(self) -> None:
        """Has it close the gates of all loads, later ones too, without its session's knowledge."""
        self.tell("close gates")
        self.wait_until(lambda found: found["gates_closed"] > 0, "closed gate")

    def finish(self) -> dict[str, Any]:
        """Has it end its loads and exit; its last line."""
        self.close_input()
        self.wait_until(lambda found: found.get("ended"), "end of its loads", DRAIN_S)
        self.wait_exit()
        return self.last


# === The program ===


class Memory:
    """The blocks, each filled with words computed from its number."""

    def __init__(self, blocks: int, device: int) -> None:
        import torch

        self._torch, self._on_gpu = torch, device >= 0
        # Block 0 is never used; a new session tests its copies on the last one.
        self.blocks, words = blocks + 2, BLOCK_BYTES // 8
        if self._on_gpu:
            torch.cuda.set_device(device)
            self.stream = torch.cuda.Stream()
            self._memory = torch.zeros((self.blocks, words), dtype=torch.int64, device="cuda")
        else:
            self.file = os.memfd_create("flood")
            os.ftruncate(self.file, self.blocks * BLOCK_BYTES)
            mapped = mmap.mmap(self.file, self.blocks * BLOCK_BYTES)
            self._memory = torch.frombuffer(mapped, dtype=torch.int64).view(self.blocks, words)
        self._right = self._torch.arange(self.blocks * words, device=self._memory.device).view(self.blocks, words) * MULTIPLIER
        self._memory.copy_(self._right)
        self._marks: list[Any] = []
        self.wait()

    @property
    def place(self) -> dict[str, Any]:
        """The memory's description for a session."""
        if not self._on_gpu:
            return {"files": [self.file]}
        return {"pointers": [self._memory.data_ptr()], "cuts": CUTS, "stream": self.stream.cuda_stream}

    def wrong_words(self) -> int:
        """The number of wrong words in all blocks. Loads under way write the same words."""
        return int((self._memory[1:-1] != self._right[1:-1]).sum().item())

    def mark_step(self) -> None:
        """Waits while the GPU is too many steps behind."""
        if self._on_gpu:
            event = self._torch.cuda.Event()
            event.record(self.stream)
            self._marks.append(event)
            if len(self._marks) > STEPS_AHEAD:
                self._marks.pop(0).synchronize()

    def wait(self) -> None:
        """Waits until the GPU has finished."""
        if self._on_gpu:
            self._torch.cuda.synchronize()


class Engine(Sessions):
    """Both roles."""

    def __init__(self, socket: str, namespace: str, blocks: int, device: int) -> None:
        self._memory = Memory(blocks, device)
        self._ids = list(range(1, blocks + 1))
        self._hashes = [hashlib.sha256(f"{namespace} {block}".encode()).digest() for block in self._ids]
        regions = [(0, 0, BLOCK_BYTES, BLOCK_BYTES)]
        facts, where = {"engine": namespace}, self._memory.place
        super().__init__(Path(socket), f"flood-{uuid.uuid4()}", self._memory.blocks, regions, facts, **where)
        # Logs of unfinished loads.
        self._loading: dict[int, int] = {}
        self.loaded = self.failed_blocks = self.refused = self.gates_closed = 0
        self.keep(self._hashes, self._ids)
        stats = self.scheduler.stats()
        if stats["blocks_committed"] + stats["blocks_present"] < len(self._ids):
            raise self.failed("the save was not taken")

    @property
    def load_bytes(self) -> int:
        """The bytes of one load."""
        return len(self._ids) * BLOCK_BYTES

    @property
    def queued_bytes(self) -> int:
        """The bytes of unfinished loads."""
        return len(self._loading) * self.load_bytes

    def play(self, queued_bytes: int) -> None:
        """Plays one step, which fills the backlog."""
        plans: list[tuple[int, bytes]] = []
        while self.queued_bytes + len(plans) * self.load_bytes < queued_bytes and len(plans) < LOADS_OF_A_STEP:
            planned = self._plan()
            if planned is None:
                self.refused += 1
                break
            plans.append(planned)
        with self.step():
            for log, plan in plans:
                failed = self.worker.load(plan, self.stream)
                if failed is None:
                    self._loading[_shim.plan_op(plan)] = log
                else:
                    self._end(log, failed)
            for op, failed in self.worker.finished():
                self._end(self._loading.pop(op), failed)
        self._memory.mark_step()

    def found(self) -> dict[str, Any]:
        """The counts for the test."""
        stats = self.worker.stats()
        return {
            "loads": self.loaded,
            "loaded_bytes": self.loaded * self.load_bytes,
            "queued_bytes": self.queued_bytes,
            "failed": self.failed_blocks,
            "refused": self.refused,
            "rescues": stats["rescues"],
            "blocks_by_engine": stats["blocks_by_engine"],
            "connections": max(self.worker.generation, self.scheduler.generation),
            "wrong_words": self._memory.wrong_words(),
            "gates_closed": self.gates_closed,
            "notices": [*self.worker.take_notices(), *self.scheduler.take_notices()],
            "at": time.monotonic(),
        }

    def close_gates(self) -> None:
        """Closes every gate as a rank does to take all loads back; this rank's session does not know."""
        words = b"".join((-(OPERATION_MAX + word) % (1 << 64)).to_bytes(8, "little") for word in range(OPERATIONS))
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[5].startswith("/memfd:pillion-session"):
                (start, end), offset = (int(address, 16) for address in fields[0].split("-")), int(fields[2], 16)
                if offset <= GATES and GATES + len(words) <= offset + end - start:
                    ctypes.memmove(start + GATES - offset, words, len(words))
                    self.gates_closed += OPERATIONS

    def close(self) -> None:
        """Disconnects once the GPU has finished."""
        self._memory.wait()
        super().close()

    def _plan(self) -> tuple[int, bytes] | None:
        log = self.scheduler.open()
        if log < 0:
            return None
        self.scheduler.append(log, self._hashes, 0)
        if self.scheduler.query(log, 0, len(self._ids)) == len(self._ids):
            plans = self.scheduler.load(log, 0, self._ids, self.next_step, False)
            if plans:
                return log, plans[0]
        self.scheduler.close(log)
        return None

    def _end(self, log: int, failed: list[int]) -> None:
        self.loaded += 1
        self.failed_blocks += len(failed)
        self.scheduler.close(log)


def main() -> None:
    """Runs one engine."""
    parent = Parent()
    import torch  # noqa: F401 - seconds, spent before the first line is read

    role = parent.hear()
    if role is None:
        return
    queued_bytes = int(role.pop("queued_bytes"))
    engine = Engine(**role)
    parent.tell(engine.found())
    told, drain_by = time.monotonic(), 0.0
    while not drain_by or (engine.queued_bytes and time.monotonic() < drain_by):
        if not drain_by and select.select([sys.stdin], [], [], 0)[0]:
            if parent.hear() is None:
                queued_bytes, drain_by = 0, time.monotonic() + DRAIN_S
            else:
                engine.close_gates()
        engine.play(queued_bytes)
        time.sleep(STEP_S)
        if time.monotonic() > told + TELL_S:
            parent.tell(engine.found())
            told = time.monotonic()
    parent.tell(engine.found() | {"ended": True})
    engine.close()


if __name__ == "__main__":
    main()
