"""One rank of an engine without a model: GPU kernels write and read KV with known right bytes.

Every word of a block is a function of the block's key, the rank and the word's place. Steps are launched ahead of the GPU, as
by vLLM's asynchronous scheduler, and begin with a kernel that only spins: a copy without a wait for the fences is then early.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from pillion import _shim
from pillion.geometry import Geometry, describe_layers

BLOCKS, LAYERS, PAGE_WORDS = 256, 20, 4096
BLOCK_BYTES = LAYERS * PAGE_WORDS * 8
MULTIPLIER = 1_000_003
RANK_MULTIPLIER = 1 << 48
# As in vLLM: the step on the GPU, and the next.
STEPS_AHEAD = 2
# Wrong words are counted apart for so many steps.
COUNTED_STEPS = 4096
# A killed process's memory is free once the sidecar has let go of it.
MEMORY_WATCHDOG_S = 10
WATCHDOG_S = 60


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Blocks saved and loaded together."""

    first_key: int
    blocks: int

    @property
    def keys(self) -> list[int]:
        """One key for each block."""
        return list(range(self.first_key, self.first_key + self.blocks))

    @property
    def hashes(self) -> list[bytes]:
        """The keys' hashes at the sidecar."""
        return [hashlib.sha256(key.to_bytes(8, "little")).digest() for key in self.keys]


@dataclasses.dataclass(frozen=True)
class Load:
    """A planned load."""

    plan: bytes
    blocks: list[int]
    keys: list[int]
    sync: bool
    log: int


@dataclasses.dataclass(frozen=True)
class Order:
    """One step, the same for every rank."""

    step: int
    loads: list[Load]
    written: list[tuple[Prompt, list[int]]]
    # Synchronous loads are waited for cut by cut.
    by_cuts: bool
    spin_cycles: int


@dataclasses.dataclass
class Found:
    """Findings of ranks: numbers of blocks, except for the words."""

    wrong_words: int = 0
    first_wrong_step: int = 0
    loaded_sync: int = 0
    loaded_by_cuts: int = 0
    loaded_async: int = 0
    failed: int = 0

    @property
    def loaded(self) -> int:
        """All loaded blocks."""
        return self.loaded_sync + self.loaded_by_cuts + self.loaded_async


@dataclasses.dataclass(frozen=True)
class Place:
    """The role and the place of a rank."""

    socket: str
    engine: str
    # Engines of one namespace share their blocks.
    namespace: str
    run: bytes
    rank: int
    ranks: int
    device: int
    block_outermost: bool
    # False: another stream stores the fences, without waiting for the work.
    fenced: bool
    # Blocks of KV memory; the engine uses `BLOCKS` of them.
    blocks: int = BLOCKS
    copier: str = "sidecar"


class Memory:
    """KV memory of one rank."""

    def __init__(self, place: Place) -> None:
        blocks = place.blocks
        shape = (blocks, LAYERS, PAGE_WORDS) if place.block_outermost else (LAYERS, blocks, PAGE_WORDS)
        self._memory = _zeros(shape)
        self._blocks = self._memory if place.block_outermost else self._memory.transpose(0, 1)
        places = torch.arange(LAYERS * PAGE_WORDS, device="cuda").view(LAYERS, PAGE_WORDS)
        self._places = places + place.rank * RANK_MULTIPLIER

    def geometry(self) -> Geometry:
        """The places of its blocks."""
        layers = [(f"layer.{layer}", self._blocks[:, layer]) for layer in range(LAYERS)]
        return describe_layers(layers, self._blocks.shape[0])

    def write(self, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        """Gives every block the bytes of its key."""
        self._blocks[blocks] = self._right(keys)

    def wrong(self, blocks: torch.Tensor, keys: torch.Tensor, layers: slice) -> torch.Tensor:
        """The number of words with wrong bytes for their keys."""
        return (self._blocks[blocks][:, layers] != self._right(keys)[:, layers]).sum()

    def _right(self, keys: torch.Tensor) -> torch.Tensor:
        return keys[:, None, None] * MULTIPLIER + self._places


class Rank:
    """A worker's session and its GPU."""

    def __init__(self, place: Place) -> None:
        torch.cuda.set_device(place.device)
        self._run = place.run
        self._memory = Memory(place)
        self._geometry = self._memory.geometry()
        self._stream = torch.cuda.Stream()
        self._fences = self._stream if place.fenced else torch.cuda.Stream()
        self._wrong = torch.zeros(COUNTED_STEPS, dtype=torch.int64, device="cuda")
        self._launched: collections.deque[torch.cuda.Event] = collections.deque()
        self._loading: dict[int, Load] = {}
        self._found = Found()
        self._warm_up()
        self._session = _shim.WorkerSession(
            place.socket,
            place.engine,
            place.ranks,
            place.rank,
            place.rank,
            place.ranks,
            place.blocks,
            self._geometry.regions,
            [],
            place.copier,
            {"engine": place.namespace},
            pointers=[storage.data_ptr() for storage in self._geometry.storages],
            cuts=self._geometry.cuts,
            stream=self._stream.cuda_stream,
        )

    def connected(self) -> bool:
        """True if the rank is connected."""
        self._session.join(self._run)
        return self._session.connected

    def notices(self) -> list[str]:
        """The session's notices."""
        return self._session.take_notices()

    def generation(self) -> int:
        """The number of connections so far."""
        return self._session.generation

    def step(self, order: Order) -> list[int]:
        """Launches a step; the operations of ended asynchronous loads."""
        with torch.cuda.stream(self._stream):
            ended = self._launch(order)
        if len(self._launched) == STEPS_AHEAD:
            self._launched.popleft().synchronize()
        return ended

    def found(self) -> Found:
        """The findings, once the GPU has finished. No copy is queued, and no lock held, while the stream waits for a load."""
        if self._launched:
            self._launched[-1].synchronize()
        with torch.cuda.stream(self._stream):
            wrong = self._wrong.tolist()
        self._found.wrong_words = sum(wrong)
        self._found.first_wrong_step = next((step for step, words in enumerate(wrong) if words), 0)
        return self._found

    def end(self) -> None:
        """Disconnects from the sidecar."""
        self._session.disconnect()

    def _warm_up(self) -> None:
        """A kernel's first launch waits for every stream, so none may be its first behind a wait."""
        with torch.cuda.stream(self._stream):
            blocks, keys = _on_gpu([0]), _on_gpu([0])
            self._memory.write(blocks, keys)
            self._wrong[0] += self._memory.wrong(blocks, keys, slice(0, LAYERS))
            torch.cuda._sleep(1000)
        torch.cuda.synchronize()

    def _launch(self, order: Order) -> list[int]:
        stream = self._stream.cuda_stream
        self._session.join(self._run)
        self._session.start(order.step, self._fences.cuda_stream)
        needed, ended = self._begin_loads(order)
        torch.cuda._sleep(order.spin_cycles)
        first = 0
        for cut, layers in enumerate(self._geometry.cut_layers if order.by_cuts else [LAYERS]):
            if order.by_cuts:
                self._session.wait_cut(cut, stream)
            for load in needed:
                self._check(order.step, load, slice(first, first + layers))
            first += layers
        assert self._session.loading == 0
        for prompt, blocks in order.written:
            self._memory.write(_on_gpu(blocks), _on_gpu(prompt.keys))
        # Before the step ends: from then on loads may write its blocks.
        ended += self._take_finished(order.step)
        self._session.done(order.step, True, self._fences.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._launched.append(event)
        return ended

    def _begin_loads(self, order: Order) -> tuple[list[Load], list[int]]:
        """The loads for this step to read, whole, or with `by_cuts` each cut after its wait; then the asynchronous loads
        without a sidecar, ended at once."""
        needed, ended = [], []
        for load in order.loads:
            failed = self._session.load(load.plan, self._stream.cuda_stream, order.by_cuts and load.sync)
            if failed is None:
                self._loading[_shim.plan_op(load.plan)] = load
                continue
            self._found.failed += len(failed)
            if not load.sync:
                ended.append(_shim.plan_op(load.plan))
            if not failed:
                needed.append(load)
                self._found.loaded_by_cuts += len(load.blocks) * order.by_cuts
                self._found.loaded_sync += len(load.blocks) * (not order.by_cuts)
        return needed, ended

    def _take_finished(self, step: int) -> list[int]:
        """Checks each asynchronous load in the step of its end; their operations."""
        ended = []
        for op, failed in self._session.finished():
            load = self._loading.pop(op)
            self._found.failed += len(failed)
            if not failed:
                self._found.loaded_async += len(load.blocks)
                self._check(step, load, slice(0, LAYERS))
            ended.append(op)
        return ended

    def _check(self, step: int, load: Load, layers: slice) -> None:
        self._wrong[step % COUNTED_STEPS] += self._memory.wrong(_on_gpu(load.blocks), _on_gpu(load.keys), layers)


class RemoteRank:
    """A rank in a process of its own."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, place), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Order) -> None:
        """Calls a method in its process."""
        self._connection.send((name, arguments))

    def answer(self) -> object:
        """The result of the call."""
        assert self._connection.poll(WATCHDOG_S), "a rank does not answer"
        return self._connection.recv()


def _serve(connection: Connection, place: Place) -> None:
    rank = Rank(place)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(rank, name)(*arguments))


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    deadline = time.monotonic() + MEMORY_WATCHDOG_S
    while True:
        try:
            return torch.zeros(shape, dtype=torch.int64, device="cuda")
        except torch.OutOfMemoryError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _on_gpu(values: list[int]) -> torch.Tensor:
    """Without waiting for the stream, unlike a copy from memory that is not page-locked."""
    return torch.tensor(values, pin_memory=True).to("cuda", non_blocking=True)
