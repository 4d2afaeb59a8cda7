"""Engines, a sidecar that is killed, frozen and replaced, and a load of requests whose answers must stay right."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from chaos import faults, figures, load
from testkit import engine, pool_file, prompts, sidecar, threads, timed_scheduler

# Four requests of up to 20 blocks in 47: blocks are reused all the time, and now and then vLLM preempts a request.
KV_BLOCKS = 48
BATCHED_TOKENS = 256
DTYPE_BYTES = 4
# Less than the blocks of all prompts and answers: the sidecar evicts.
DRAM = "8MiB"
# The product's own default.
QUERY_BUDGET_US = 2_000
# The longest delay between a hit and the next strike, the longest absence of a sidecar, and the range of a freeze. An engine
# waits 2 s for a load, so freezes are shorter and longer than its wait.
STRIKE_S, ABSENT_S, FROZEN_S = 0.4, 1.0, (0.05, 4.0)
# Every prompt four times.
UNDISTURBED_ANSWERS = 100


def say(text: str) -> None:
    """Prints progress to standard error, apart from the result."""
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """One shape of engine without a connector, under the same load."""

    waits: dict[int, float]
    added: list[float]
    stalls: figures.Stalls


class Campaign:
    """The current sidecar and engine, the load, and the figures."""

    def __init__(self, directory: Path, model: Path, seed: int, prefix_blocks: Sequence[int] = load.PREFIX_BLOCKS) -> None:
        self._seed = seed
        self._directory = directory
        self._model = model
        self._chance = random.Random(seed)
        self._prompts = load.make_prompts(seed, prefix_blocks)
        self._right: list[load.Right] = []
        self._undisturbed: dict[faults.Shape, Undisturbed] = {}
        self._pool = sidecar.new_pool()
        self._sidecar: sidecar.Sidecar | None = None
        # Counters of the current sidecar, at the last `_count_sidecar`.
        self._counters: dict[str, int] = {}
        self._engines = 0
        self._begin()

    def _begin(self) -> None:
        """Resets all counts."""
        self.figures = figures.Figures(seed=self._seed, query_budget_ms=QUERY_BUDGET_US / 1e3)
        self._added: list[float] = []
        self._added_engine_faults: list[float] = []
        self._stalls: list[figures.Stalls] = []
        self._reconnects: list[float] = []

    # --- what can be run ---

    def run(self, lives: list[faults.Life]) -> figures.Figures:
        """Runs every life, then one without a fault: its engine answers all open requests, and hits the cache."""
        self._begin()
        self._observe_undisturbed([life.shape for life in lives])
        asking = load.Load(self._right, self._chance.randrange(1 << 30))
        with self._sidecars():
            for life in lives:
                self._live(life, asking)
            self._live(dataclasses.replace(lives[-1], shape=lives[0].shape, faults=[]), asking)
            self._count_sidecar()
            self.sidecar.terminate()
        self._sum_up(asking)
        return self.figures

    def run_damaged(self, shape: faults.Shape = "one-process") -> figures.Figures:
        """The negative control: no fault but a damaged pool, until an answer shows it."""
        self._begin()
        self._observe_undisturbed([shape])
        asking = load.Load(self._right, self._chance.randrange(1 << 30))
        life = faults.Life(shape, "auto", "engine", [])
        with self._sidecars(), self._engine(life) as running:
            asking.start(running)
            self._wait_for_hits(asking)
            with pool_file.damaged(self._pool, value_bytes=DTYPE_BYTES) as blocks:
                assert blocks > 0
                self._wait(asking, lambda: any(request.wrong_tokens for request in asking.answered), "wrong token")
            asking.drain()
            self._count_sidecar()
        self._sum_up(asking)
        return self.figures

    # --- without a sidecar ---

    def _observe_undisturbed(self, shapes: list[faults.Shape]) -> None:
        for shape in [shape for shape in dict.fromkeys(shapes) if shape not in self._undisturbed]:
            say(f"undisturbed: {shape}")
            with self._engine(faults.Life(shape, "auto", "engine", []), connected=False) as running:
                self._learn(running)
                asking = load.Load(self._right, self._chance.randrange(1 << 30))
                asking.start(running)
                asking.wait_answered(UNDISTURBED_ANSWERS)
                asking.drain()
                running.exit()
            # All other checks need this: an answer's tokens do not depend on the other requests.
            assert not any(request.wrong_tokens or request.wrong_logprobs for request in asking.answered)
            waits = figures.typical_waits(asking.answered)
            stalls = figures.stalls(timed_scheduler.read(self._times()), [])
            self._undisturbed[shape] = Undisturbed(waits, figures.added_waits(asking.answered, waits), stalls)

    def _learn(self, running: engine.Engine) -> None:
        """Takes the right answers from the first engine; every other shape of engine must give the same."""
        if not self._right:
            known = [load.ask_alone(running, prompt) for prompt in self._prompts]
            self._right = [right for right, margin in known if margin > load.LOGPROB_TOLERANCE]
            assert len(self._right) > len(known) / 2, "too few prompts have a clear answer"
        for right in self._right:
            assert load.ask_alone(running, right.prompt)[0].tokens == right.tokens

    # --- one engine's life ---

    def _live(self, life: faults.Life, asking: load.Load) -> None:
        spans: list[figures.Span] = []
        first = len(asking.answered)
        with self._engine(life) as running:
            asking.start(running)
            self._wait_for_sessions(life, asking)
            for fault in life.faults:
                self._wait_for_hits(asking)
                time.sleep(self._chance.uniform(0, STRIKE_S))
                span = self._strike(fault, life, running, asking)
                spans += [span] if fault.startswith("engine") else []
            # A life without a fault, or with its engine's end outside the rounds played.
            if life.faults[-1:] != [faults.ENGINE_KILL]:
                self._wait_for_hits(asking)
                asking.drain()
                running.exit()
        answered = asking.answered[first:]
        touched = [any(span.overlaps(r.asked, r.answered) for span in spans) or r.asked_again for r in answered]
        added = figures.added_waits(answered, self._undisturbed[life.shape].waits)
        self._added += [wait for wait, engine_fault in zip(added, touched, strict=True) if not engine_fault]
        self._added_engine_faults += [wait for wait, engine_fault in zip(added, touched, strict=True) if engine_fault]
        self._stalls.append(figures.stalls(timed_scheduler.read(self._times()), spans))

    def _strike(self, fault: faults.Fault, life: faults.Life, running: engine.Engine, asking: load.Load) -> figures.Span:
        self._count_sidecar()
        before, start = len(asking.answered), time.monotonic()
        end_sidecar = self.sidecar.terminate if fault == "sidecar-drain" else self.sidecar.kill
        if fault == faults.ENGINE_KILL:
            asking.crash(running)
        elif fault in faults.FREEZES_ENGINE:
            with threads.frozen(self._chance.choice(running.processes())):
                time.sleep(self._chance.uniform(*FROZEN_S))
                if fault in faults.ENDS_SIDECAR:
                    self._replace_sidecar(end_sidecar)
        elif fault in faults.FREEZES_SIDECAR:
            self.sidecar.freeze()
            time.sleep(self._chance.uniform(*FROZEN_S))
            if fault not in faults.ENDS_SIDECAR:
                self.sidecar.thaw()
        if fault in faults.ENDS_SIDECAR and fault not in faults.FREEZES_ENGINE:
            self._replace_sidecar(end_sidecar)
        end = time.monotonic()
        if fault != faults.ENGINE_KILL:
            self._wait_for_sessions(life, asking)
        if fault in faults.ENDS_SIDECAR and fault not in faults.FREEZES_ENGINE:
            self._reconnects.append(1e3 * (time.monotonic() - end))
        self.figures.count(fault)
        answered = asking.answered[before:]
        added = max(figures.added_waits(answered, self._undisturbed[life.shape].waits), default=0)
        took = f"{fault} at {start:.1f} for {end - start:.2f} s"
        say(f"{self.figures.rounds}: {life}: {took}, {len(answered)} answers, {added:.0f} ms longest added wait")
        return figures.Span(start, end)

    @contextlib.contextmanager
    def _engine(self, life: faults.Life, connected: bool = True) -> Iterator[engine.Engine]:
        self._engines += 1
        options = engine.Options(
            model=self._model,
            socket=self._directory / "pillion.sock" if connected else None,
            load=life.load,
            copy=life.copy,
            multiprocess=life.shape != "one-process",
            tensor_parallel=life.ranks,
            blocks=KV_BLOCKS,
            batched_tokens=BATCHED_TOKENS,
            max_requests=load.IN_FLIGHT,
            dtype="float32",
            extra={"pillion.query_timeout_us": QUERY_BUDGET_US},
            schedule_times=self._times(),
        )
        with engine.running(options, self._directory / f"engine-{self._engines}.log") as running:
            # An engine's first steps are slow; no request of the load waits for them.
            warm = [prompts.prompt(tokens, seed=tokens) for tokens in (700, 333, 352, 65)]
            running.generate(warm, max_tokens=load.OUTPUT_TOKENS)
            yield running

    def _times(self) -> Path:
        """The file for the schedule() times of the current engine."""
        return self._directory / f"engine-{self._engines}.times"

    # --- the sidecar ---

    @property
    def sidecar(self) -> sidecar.Sidecar:
        """The current sidecar."""
        assert self._sidecar is not None
        return self._sidecar

    @contextlib.contextmanager
    def _sidecars(self) -> Iterator[None]:
        """One sidecar after another on one socket; none is left at the end."""
        try:
            self._start_sidecar(anonymous=False)
            yield
        finally:
            if self._sidecar is not None:
                self._sidecar.kill()
            self._pool.unlink(missing_ok=True)

    def _start_sidecar(self, anonymous: bool) -> None:
        self._add_counters()
        self._sidecar = sidecar.Sidecar(self._directory, DRAM, self._pool, anonymous)
        self._sidecar.wait_ready()

    def _replace_sidecar(self, end: Callable[[], None]) -> None:
        """Ends the sidecar by `end`, waits, and starts the next one, in the same pool file or in memory of its own."""
        end()
        time.sleep(self._chance.uniform(0, ABSENT_S))
        self._start_sidecar(anonymous=self._chance.random() < 0.5)

    def _wait_for_sessions(self, life: faults.Life, asking: load.Load) -> None:
        """Waits until the scheduler and every rank are connected."""
        wanted = 1 + life.ranks
        self._wait(asking, lambda: self.sidecar.metrics()["pillion_sessions"] == wanted, f"{wanted} sessions")

    def _wait_for_hits(self, asking: load.Load) -> None:
        loaded = self.sidecar.metrics()["pillion_loaded_bytes_total"]
        self._wait(asking, lambda: self.sidecar.metrics()["pillion_loaded_bytes_total"] > loaded, "hit")

    def _wait(self, asking: load.Load, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            asking.check()
            return condition()

        self.sidecar.wait_for(holds, what, load.WATCHDOG_S)

    def _count_sidecar(self) -> None:
        """Reads this sidecar's counters. Counts between this call and the sidecar's death are lost, and no check needs them."""
        self._counters = self.sidecar.metrics()

    def _add_counters(self) -> None:
        found, counters = self.figures, self._counters
        found.saves_posted += counters.get("pillion_saves_posted_blocks_total", 0)
        found.saves_lost_to_reuse += counters.get("pillion_saves_lost_to_reuse_total", 0)
        found.loaded_blocks += counters.get("pillion_loaded_blocks_total", 0)
        found.evicted_blocks += counters.get("pillion_evicted_blocks_total", 0)
        self._counters = {}

    # --- the result ---

    def _sum_up(self, asking: load.Load) -> None:
        self._add_counters()
        found, undisturbed = self.figures, self._undisturbed.values()
        found.requests = len(asking.answered) + asking.unanswered
        found.asked_again = sum(request.asked_again for request in asking.answered)
        found.wrong_tokens = sum(request.wrong_tokens for request in asking.answered)
        found.wrong_logprobs = sum(request.wrong_logprobs for request in asking.answered)
        found.lost = asking.unanswered
        found.note_waits(self._added, self._added_engine_faults, [wait for one in undisturbed for wait in one.added])
        found.note_stalls(self._stalls, [one.stalls for one in undisturbed])
        found.reconnect_ms_p99 = figures.p99(self._reconnects)
