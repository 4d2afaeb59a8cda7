"""An engine without a model: GPU kernels write and read KV whose right bytes are known, vLLM's two roles in one process.

Every word of a block is a function of the block's key and the word's place. Steps are launched ahead of the GPU, as vLLM's
asynchronous scheduler does, and begin with a kernel that only takes time: whoever reads or writes a block without asking
the fences is then early.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
import time
import uuid
from pathlib import Path

import torch

from pillion import _shim
from pillion.geometry import Geometry, describe

BLOCKS, LAYERS, PAGE_WORDS = 256, 20, 4096
BLOCK_BYTES = LAYERS * PAGE_WORDS * 8
MULTIPLIER = 1_000_003
# As vLLM: the step that the GPU computes, and the next.
STEPS_AHEAD = 2
# A kernel of 50 to 400 us on a GPU of 1 to 2 GHz.
SPIN_CYCLES = (100_000, 400_000)
PROMPT_BLOCKS = 8
# Prompts that may be asked for again; older ones are mostly evicted.
REMEMBERED = 120
LOADS_IN_FLIGHT = 4
QUERY_BUDGET_US = 1_000_000
WATCHDOG_S = 60


class Memory:
    """KV memory of one rank."""

    def __init__(self, block_outermost: bool) -> None:
        shape = (BLOCKS, LAYERS, PAGE_WORDS) if block_outermost else (LAYERS, BLOCKS, PAGE_WORDS)
        self._memory = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self._blocks = self._memory if block_outermost else self._memory.transpose(0, 1)
        self._places = torch.arange(LAYERS * PAGE_WORDS, device="cuda").view(LAYERS, PAGE_WORDS)

    def geometry(self) -> Geometry:
        """Where its blocks lie."""
        return describe([(f"layer.{layer}", self._blocks[:, layer]) for layer in range(LAYERS)], BLOCKS)

    def write(self, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        """Every block gets the bytes of its key."""
        self._blocks[blocks] = self._right(keys)

    def wrong(self, blocks: torch.Tensor, keys: torch.Tensor, layers: slice) -> torch.Tensor:
        """Words that are not their key's."""
        return (self._blocks[blocks][:, layers] != self._right(keys)[:, layers]).sum()

    def _right(self, keys: torch.Tensor) -> torch.Tensor:
        return keys[:, None, None] * MULTIPLIER + self._places


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Blocks that are always saved and loaded together."""

    first_key: int
    blocks: int

    @property
    def keys(self) -> list[int]:
        """One for each block."""
        return list(range(self.first_key, self.first_key + self.blocks))

    @property
    def hashes(self) -> list[bytes]:
        """What the sidecar knows the keys by."""
        return [hashlib.sha256(key.to_bytes(8, "little")).digest() for key in self.keys]


@dataclasses.dataclass(frozen=True)
class Load:
    """A load that was planned."""

    plan: bytes
    blocks: list[int]
    keys: list[int]
    sync: bool
    log: int


@dataclasses.dataclass
class Found:
    """What a run came across."""

    wrong_words: int = 0
    first_wrong_step: int = 0
    loaded_sync: int = 0
    loaded_overlapped: int = 0
    loaded_async: int = 0
    failed: int = 0


class Engine:
    """Both roles, and the GPU that they drive."""

    def __init__(self, socket: Path, block_outermost: bool, seed: int, fenced: bool, rounds: int) -> None:
        """Not `fenced`: the fences are stored aside, by a stream that waits for none of the work."""
        self.found = Found()
        self._random = random.Random(seed)
        self._rounds = rounds
        self._memory = Memory(block_outermost)
        self._geometry = self._memory.geometry()
        self._stream = torch.cuda.Stream()
        self._fences = self._stream if fenced else torch.cuda.Stream()
        # Room for the steps after the last round, in which loads end.
        self._wrong = torch.zeros(2 * rounds, dtype=torch.int64, device="cuda")
        self._step, self._next_key = 0, 1
        self._launched: collections.deque[torch.cuda.Event] = collections.deque()
        self._prompts: collections.deque[Prompt] = collections.deque(maxlen=REMEMBERED)
        self._free = set(range(1, BLOCKS))
        # Blocks that the last step wrote: reused soon, while they are saved.
        self._fresh: list[int] = []
        self._loading: dict[int, Load] = {}
        self._run = uuid.uuid4().bytes
        torch.cuda.synchronize()
        self._connect(socket)

    def _connect(self, socket: Path) -> None:
        pointers = [storage.data_ptr() for storage in self._geometry.storages]
        engine = f"bare-{uuid.uuid4()}"
        self._worker = _shim.WorkerSession(
            socket,
            engine,
            1,
            0,
            0,
            1,
            BLOCKS,
            self._geometry.regions,
            [],
            "sidecar",
            {"engine": engine},
            pointers=pointers,
            cuts=self._geometry.cuts,
            stream=self._stream.cuda_stream,
        )
        self._scheduler = _shim.SchedulerSession(socket, engine, 1, self._run, QUERY_BUDGET_US, False, True)
        deadline = time.monotonic() + WATCHDOG_S
        while not (self._worker.connected and self._scheduler.connected):
            assert time.monotonic() < deadline, self._worker.take_notices() + self._scheduler.take_notices()
            self._worker.join(self._run)
            self._scheduler.end_step()
            time.sleep(0.01)

    def run(self) -> Found:
        """All rounds, and the end of every load."""
        with torch.cuda.stream(self._stream):
            self._warm_up()
            for _ in range(self._rounds):
                self._one_step(quiet=False)
            while self._loading and self._step < 2 * self._rounds - 1:
                self._one_step(quiet=True)
                time.sleep(0.01)
        torch.cuda.synchronize()
        assert not self._loading, "asynchronous loads that never ended"
        wrong = self._wrong.tolist()
        self.found.wrong_words = sum(wrong)
        self.found.first_wrong_step = next((step for step, words in enumerate(wrong) if words), 0)
        assert self._worker.generation == self._scheduler.generation == 1, "the connection was lost on the way"
        return self.found

    def end(self) -> None:
        """Leaves the sidecar."""
        self._scheduler.disconnect()
        self._worker.disconnect()

    def _warm_up(self) -> None:
        """A kernel's first launch waits for every stream, so none may be its first behind a wait."""
        blocks, keys = _on_gpu([0]), _on_gpu([0])
        self._memory.write(blocks, keys)
        self._wrong[0] += self._memory.wrong(blocks, keys, slice(0, LAYERS))
        torch.cuda._sleep(SPIN_CYCLES[0])
        torch.cuda.synchronize()

    # --- one step ---

    def _one_step(self, quiet: bool) -> None:
        self._step += 1
        if len(self._launched) == STEPS_AHEAD:
            self._launched.popleft().synchronize()
        loads = [] if quiet else self._plan_loads()
        written = [] if quiet else self._plan_writes()
        self._scheduler.overwrite([block for _, ids in written for block in ids])
        for prompt, blocks in written:
            self._save(prompt, blocks)
        self._scheduler.end_step()
        self._launch(loads, written)
        for load in loads:
            if load.sync:
                self._free.update(load.blocks)
                self._scheduler.close(load.log)
        self._free.update(block for _, blocks in written for block in blocks)
        self._fresh = [block for _, blocks in written for block in blocks]

    def _launch(self, loads: list[Load], written: list[tuple[Prompt, list[int]]]) -> None:
        stream = self._stream.cuda_stream
        self._worker.join(self._run)
        self._worker.start(self._step, self._fences.cuda_stream)
        overlap = self._random.random() < 0.5
        needed = self._begin_loads(loads, overlap)
        torch.cuda._sleep(self._random.randint(*SPIN_CYCLES))
        first = 0
        for cut, layers in enumerate(self._geometry.cut_layers if overlap else [LAYERS]):
            if overlap:
                self._worker.wait_group(cut, stream)
            for load in needed:
                self._check(load, slice(first, first + layers))
            first += layers
        assert self._worker.loading == 0
        for prompt, blocks in written:
            self._memory.write(_on_gpu(blocks), _on_gpu(prompt.keys))
        self._worker.done(self._step, True, self._fences.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._launched.append(event)
        self._take_finished()

    def _begin_loads(self, loads: list[Load], overlap: bool) -> list[Load]:
        """Loads that this step reads: at once, or with `overlap` each cut when it was waited for."""
        needed = []
        for load in loads:
            failed = self._worker.load(load.plan, load.sync, self._stream.cuda_stream, overlap and load.sync)
            if failed is None:
                self._loading[_shim.plan_op(load.plan)] = load
                continue
            self.found.failed += len(failed)
            if not failed:
                needed.append(load)
                self.found.loaded_overlapped += len(load.blocks) * overlap
                self.found.loaded_sync += len(load.blocks) * (not overlap)
        return needed

    def _take_finished(self) -> None:
        """Asynchronous loads are checked behind the step that saw their end."""
        for op, failed in self._worker.finished():
            load = self._loading.pop(op)
            self.found.failed += len(failed)
            if not failed:
                self.found.loaded_async += len(load.blocks)
                self._check(load, slice(0, LAYERS))
            self._free.update(load.blocks)
            self._scheduler.close(load.log)

    def _check(self, load: Load, layers: slice) -> None:
        self._wrong[self._step] += self._memory.wrong(_on_gpu(load.blocks), _on_gpu(load.keys), layers)

    # --- what a step does ---

    def _plan_writes(self) -> list[tuple[Prompt, list[int]]]:
        written = []
        for _ in range(self._random.randrange(3)):
            prompt = Prompt(self._next_key, self._random.randint(1, PROMPT_BLOCKS))
            self._next_key += prompt.blocks
            written.append((prompt, self._take(prompt.blocks)))
        return written

    def _take(self, count: int) -> list[int]:
        """Free blocks, often those of the last step."""
        hot = [block for block in self._fresh if block in self._free] if self._random.random() < 0.3 else []
        cold = self._random.sample(sorted(self._free - set(hot)), count)
        blocks = (hot + cold)[:count]
        self._free.difference_update(blocks)
        return blocks

    def _save(self, prompt: Prompt, blocks: list[int]) -> None:
        log = self._scheduler.open()
        if log < 0 or self._scheduler.append(log, prompt.hashes, 0) < prompt.blocks:
            return
        if self._scheduler.save(log, 0, blocks, self._step):
            self._prompts.append(prompt)
        self._scheduler.close(log)

    def _plan_loads(self) -> list[Load]:
        loads = []
        for _ in range(self._random.randrange(3)):
            load = self._plan_load() if self._prompts and len(self._loading) < LOADS_IN_FLIGHT else None
            if load is not None:
                loads.append(load)
        return loads

    def _plan_load(self) -> Load | None:
        prompt = self._random.choice(self._prompts)
        log = self._scheduler.open()
        if log < 0:
            return None
        self._scheduler.append(log, prompt.hashes, 0)
        hits = self._scheduler.query(log, 0, prompt.blocks)
        if hits > 0:
            blocks, sync = self._take(hits), self._random.random() < 0.6
            # Before the load, which may begin when the step before this one is done.
            self._scheduler.overwrite(blocks)
            plan = self._scheduler.load(log, 0, blocks, self._step, sync)
            if plan is not None:
                return Load(plan, blocks, prompt.keys[:hits], sync, log)
            self._free.update(blocks)
        self._scheduler.close(log)
        return None


def _on_gpu(values: list[int]) -> torch.Tensor:
    """Without waiting for the stream, as a copy from memory that is not page-locked would."""
    return torch.tensor(values, pin_memory=True).to("cuda", non_blocking=True)
