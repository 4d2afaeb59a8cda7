"""An engine without a model: vLLM's scheduler role, with random writes, saves and loads, and the engine's ranks."""

from __future__ import annotations

import collections
import dataclasses
import random
import time
import uuid
from pathlib import Path
from typing import Any

from bare_rank import BLOCKS, WATCHDOG_S, Found, Load, Order, Place, Prompt, Rank, RemoteRank

from pillion import _shim
from testkit.waiting import Failed, wait_for

# A kernel of 50 to 400 us on a GPU of 1 to 2 GHz.
SPIN_CYCLES = (100_000, 400_000)
PROMPT_BLOCKS = 8
# The number of prompts that may be asked again; older ones are mostly evicted.
REMEMBERED = 120
LOADS_IN_FLIGHT = 4
QUERY_BUDGET_US = 1_000_000
# Steps without anything new until every load has ended: 10 ms each.
QUIET_STEPS = 2000


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an engine."""

    socket: Path
    seed: int = 1
    block_outermost: bool = True
    fenced: bool = True
    # The GPU of each rank; the first rank is in this process.
    devices: tuple[int, ...] = (0,)
    namespace: str = "bare"
    # Blocks of KV memory; the engine uses `BLOCKS` of them.
    blocks: int = BLOCKS
    # The copying process, and the average time of a step. Without loads to wait for, steps of a bare engine fill blocks a
    # hundred times as fast as a model: the engine's own copies cannot follow.
    copier: str = "sidecar"
    step_s: float = 0.0
    # The blocks of one part of a load whose other blocks are still arriving; 0: a load waits until all blocks are kept.
    part_blocks: int = 0
    # Prompts saved by an earlier engine of the namespace, and the first unused key.
    prompts: tuple[Prompt, ...] = ()
    next_key: int = 1
    # Cycles that a step's kernel spins before it writes, at least and at most.
    spin_cycles: tuple[int, int] = SPIN_CYCLES


class Engine:
    """Both roles of an engine."""

    def __init__(self, options: Options) -> None:
        self._random = random.Random(options.seed)
        self._step_s, self._spin_cycles = options.step_s, options.spin_cycles
        self._step, self._next_key = 0, options.next_key
        self._first_key = options.next_key
        # Loaded blocks from an earlier engine.
        self.inherited = 0
        self.prompts: collections.deque[Prompt] = collections.deque(options.prompts, maxlen=REMEMBERED)
        self._free = set(range(1, BLOCKS))
        # Blocks written by the last step: reused soon, while they are saved.
        self._fresh: list[int] = []
        # Asynchronous loads, and the number of ranks still loading.
        self._loading: dict[int, tuple[Load, int]] = {}
        self._run = uuid.uuid4().bytes
        engine, ranks = f"bare-{uuid.uuid4()}", len(options.devices)
        places = [
            Place(
                str(options.socket),
                engine,
                options.namespace,
                self._run,
                rank,
                ranks,
                device,
                options.block_outermost,
                options.fenced,
                options.blocks,
                options.copier,
            )
            for rank, device in enumerate(options.devices)
        ]
        self._others = [RemoteRank(place) for place in places[1:]]
        self._rank = Rank(places[0])
        self._scheduler = _shim.SchedulerSession(
            options.socket, engine, ranks, self._run, QUERY_BUDGET_US, False, True, part_blocks=options.part_blocks
        )
        self.wait_connected()

    def wait_connected(self) -> None:
        """Waits until both roles and every rank are connected, and the scheduler is bound to the ranks' memory."""
        notices: list[Any] = []

        def connected() -> bool:
            if all(self._all("connected")) and self._scheduler.connected and self._scheduler.namespace:
                return True
            notices[:] = [*self._all("notices"), self._scheduler.take_notices()]
            self._scheduler.end_step()
            return False

        wait_for(connected, "connection", WATCHDOG_S, 0.01, lambda reason: Failed(f"{reason}: {notices}"))

    @property
    def next_key(self) -> int:
        """The first unused key."""
        return self._next_key

    def run(self, rounds: int) -> Found:
        """Plays `rounds` rounds, and waits for the end of every load. No connection may be lost meanwhile."""
        self.play(rounds)
        found = self.rest()
        assert {*self._all("generation"), self._scheduler.generation} == {1}, "the connection was lost on the way"
        return found

    def play(self, rounds: int) -> None:
        """Plays `rounds` rounds; loads go on."""
        for _ in range(rounds):
            # Every other step follows at once: a block may be reused while it is saved.
            time.sleep(self._random.choice((0, 2 * self._step_s)))
            self._one_step(quiet=False)

    def rest(self) -> Found:
        """Plays steps without new work until every load has ended."""
        for _ in range(QUIET_STEPS):
            if not self._loading:
                return self.found()
            self._one_step(quiet=True)
            time.sleep(0.01)
        raise AssertionError("asynchronous loads that never ended")

    def found(self) -> Found:
        """The findings of all ranks, once the GPU has finished its work."""
        sums: collections.Counter[str] = collections.Counter()
        for found in self._all("found"):
            sums.update(dataclasses.asdict(found))
        return Found(**sums)

    def end(self) -> None:
        """Disconnects from the sidecar."""
        self._scheduler.disconnect()
        self._all("end")

    def _all(self, name: str, *arguments: Order) -> list[Any]:
        """Calls the same method of every rank; their answers."""
        for rank in self._others:
            rank.tell(name, *arguments)
        mine = getattr(self._rank, name)(*arguments)
        return [mine, *(rank.answer() for rank in self._others)]

    # --- one step ---

    def _one_step(self, quiet: bool) -> None:
        self._step += 1
        loads = [] if quiet else self._plan_loads()
        written = [] if quiet else self._plan_writes()
        self._scheduler.overwrite([block for _, ids in written for block in ids])
        for prompt, blocks in written:
            self._save(prompt, blocks)
        self._scheduler.end_step()
        for load in loads:
            if not load.sync:
                self._loading[_shim.plan_op(load.plan)] = (load, 1 + len(self._others))
        by_cuts = self._random.random() < 0.5
        order = Order(self._step, loads, written, by_cuts, self._random.randint(*self._spin_cycles))
        for ended in self._all("step", order):
            for op in ended:
                self._rank_ended(op)
        self._scheduler.accept(self._step)
        for load in loads:
            if load.sync:
                self._give_back(load)
        self._free.update(block for _, blocks in written for block in blocks)
        self._fresh = [block for _, blocks in written for block in blocks]

    def _rank_ended(self, op: int) -> None:
        load, ranks = self._loading.pop(op)
        if ranks > 1:
            self._loading[op] = (load, ranks - 1)
        else:
            self._give_back(load)

    def _give_back(self, load: Load) -> None:
        self._free.update(load.blocks)
        self._scheduler.close(load.log)

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
            self.prompts.append(prompt)
        self._scheduler.close(log)

    def _plan_loads(self) -> list[Load]:
        loads = []
        for _ in range(self._random.randrange(3)):
            load = self._plan_load() if self.prompts and len(self._loading) < LOADS_IN_FLIGHT else None
            if load is not None:
                loads.append(load)
        return loads

    def _plan_load(self) -> Load | None:
        prompt = self._random.choice(self.prompts)
        log = self._scheduler.open()
        if log < 0:
            return None
        self._scheduler.append(log, prompt.hashes, 0)
        hits = self._scheduler.query(log, 0, prompt.blocks)
        if hits > 0:
            blocks, sync = self._take(hits), self._random.random() < 0.6
            # Before the load, which may begin when the step before this one ends.
            self._scheduler.overwrite(blocks)
            plans = self._scheduler.load(log, 0, blocks, self._step, sync)
            if plans:
                self.inherited += hits * (prompt.first_key < self._first_key)
                return Load(plans[0], blocks, prompt.keys[:hits], sync, log)
            self._free.update(blocks)
        self._scheduler.close(log)
        return None
