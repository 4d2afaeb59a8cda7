"""The effect of other engines on a serving engine of the same GPU: of two with 200 GB of loads waiting, and of one with a
fault.

`python3 tests/gpu tests/gpu/test_neighbours.py`. Every part prints a JSON line with its figures; the last line has the longest
added wait. A part that fails prints the reason, and the others are played.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import bare_flood
import gpu_options
import pytest

from testkit import engine, model, prompts, sidecar
from testkit.waiting import Failed, wait_for

# The limit of the whole test: all parts fit into a machine's few minutes.
WATCHDOG_S = 225
PART_S = 60
# The largest ratio of first tokens beside the backlog to those alone. A prompt of 10,240 tokens loads 205 MB, which take a
# third of the link.
COLD, SHORT, LONG = "cold", "warm", "warm_long"
RATIO_MAX = {COLD: 1.3, SHORT: 1.3, LONG: 3.3}
# The largest growth of the 99th percentile of the gaps between tokens.
GAP_MS_MAX = 50.0
FROZEN_S = 3.0


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes and counts of the test."""

    # The GPU of the floods; -1: host memory.
    device: int = 0
    floods: int = 2
    # Bytes of each flood's backlog; in a fault's part of the one flood.
    queued_bytes: int = 100_000_000_000
    fault_bytes: int = 20_000_000_000
    # Blocks of one load, 157 MB.
    flood_blocks: int = 240
    short_tokens: int = 1_024
    long_tokens: int = 10_240
    samples: int = 7
    gaps: int = 500
    dram: str = "4GiB"


class Parts:
    """The figures and the failures so far."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.failures: list[str] = []
        self.added_ms: list[float] = []
        self.told: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Prints progress."""
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)

    def tell(self, part: str, **found: Any) -> None:
        """Prints the figures of a part."""
        self.told[part] = found
        print(json.dumps({"part": part, **found}), flush=True)

    def check(self, holds: bool, what: str) -> None:
        """Notes a condition that does not hold, and goes on."""
        if not holds:
            self.failures.append(what)
            self.say(f"FAILED: {what}")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part: its failure is printed and ends no other part."""
        self.say(f"begin: {name}")
        try:
            yield
        except Overdue:
            self.failures.append(f"{name}: overdue")
            raise
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
            traceback.print_exc()
        self.say(f"end: {name}")

    def line(self) -> str:
        """All figures as one JSON line."""
        longest = max(self.added_ms, default=0.0)
        summary = {"test": "neighbours", "longest_added_wait_ms": round(longest, 1), "failures": self.failures}
        return json.dumps(summary | {"parts": self.told})


class Overdue(BaseException):
    """The watchdog of the whole test."""


class NoHit(Failed):
    """A prompt without a full hit from the sidecar."""


class Neighbour:
    """The serving engine and the current sidecar."""

    def __init__(self, directory: Path, scale: Scale, parts: Parts) -> None:
        self._directory, self._scale, self._parts = directory, scale, parts
        self._pool = sidecar.new_pool()
        self._seed = 1_000
        self._right: dict[tuple[int, ...], list[int]] = {}
        self.keeper = self._new_sidecar()
        self.engine: engine.Engine | None = None
        # Each is asked for once between two resets of the engine's own cache.
        self.short = [prompts.prompt(scale.short_tokens + 1, seed=10 + number) for number in range(scale.samples)]
        self.long = [prompts.prompt(scale.long_tokens + 1, seed=100 + number) for number in range(scale.samples)]

    def restart_sidecar(self) -> bool:
        """Starts another sidecar with the same pool file if the current one has ended; returns whether it had."""
        if not self.keeper.ended():
            return False
        self.keeper.kill()
        self.keeper = self._new_sidecar()
        return True

    def end(self) -> None:
        """Kills the engine and the sidecar."""
        if self.engine is not None:
            self.engine.kill()
        self.keeper.kill()
        self._pool.unlink(missing_ok=True)

    def cold(self) -> float:
        """Milliseconds to the first token of a new prompt."""
        self._seed += 1
        prompt = prompts.prompt(self._scale.short_tokens + 1, seed=self._seed)
        return self._ms(self._ask(prompt, 1))

    def warm(self, prompt: list[int]) -> float:
        """The same for a prompt with blocks in the sidecar; its tokens must be those of the first time."""
        answer = self._ask(prompt, 8)
        cached, expected = answer["cached_tokens"], prompts.hit_tokens(len(prompt))
        if cached != expected:
            raise NoHit(f"{cached} of {expected} tokens came from the sidecar")
        right = self._right.setdefault(tuple(prompt), answer["tokens"])
        if answer["tokens"] != right:
            raise Failed(f"wrong bytes: {answer['tokens']}, not {right}")
        return self._ms(answer)

    def keep(self) -> None:
        """Asks every prompt until the sidecar gives all of its blocks."""

        def kept() -> bool:
            self.forget()
            with contextlib.suppress(NoHit):
                return all(self.warm(prompt) > 0 for prompt in (*self.short, *self.long))
            return False

        for prompt in (*self.short, *self.long):
            self._ask(prompt, 1)
        wait_for(kept, "hits of the whole prompts", PART_S, 0.2)

    def forget(self) -> None:
        """Empties the engine's own cache; the ranks have stated their weights again by the next request."""
        wait_for(self._engine().reset_prefix_cache, "reset of the engine's own cache", PART_S)
        self.cold()

    def first_tokens(self) -> dict[str, list[float]]:
        """Milliseconds to first tokens, in turns; every warm prompt is loaded from the sidecar."""
        self.forget()
        hits = self._engine().metrics()["external_hits"]
        found: dict[str, list[float]] = {COLD: [], SHORT: [], LONG: []}
        for short, long in zip(self.short, self.long, strict=True):
            found[COLD].append(self.cold())
            found[SHORT].append(self.warm(short))
            found[LONG].append(self.warm(long))
        hits = self._engine().metrics()["external_hits"] - hits
        expected = sum(prompts.hit_tokens(len(prompt)) for prompt in (*self.short, *self.long))
        if hits != expected:
            raise Failed(f"{hits} of {expected} tokens came from the sidecar")
        return found

    def begin_decode(self) -> None:
        """Begins a request that decodes token by token."""
        self._engine().ask(1, prompts.prompt(33, seed=3), self._scale.gaps + 1)

    def end_decode(self) -> tuple[list[float], list[int]]:
        """Milliseconds between its tokens, and the tokens."""
        deadline = time.monotonic() + PART_S
        while time.monotonic() < deadline:
            for answer in self._engine().answered(1.0):
                times = answer["token_s"]
                return [1000 * (after - before) for before, after in itertools.pairwise(times)], answer["tokens"]
        raise self._engine().failed(f"a request was not answered in {PART_S} s")

    def _engine(self) -> engine.Engine:
        assert self.engine is not None, "the engine has not started"
        return self.engine

    def _ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return self._engine().generate([prompt], max_tokens=max_tokens, logprobs=0)[0]

    @staticmethod
    def _ms(answer: dict[str, Any]) -> float:
        return 1000.0 * float(answer["ttft_s"])

    def _new_sidecar(self) -> sidecar.Sidecar:
        keeper = sidecar.Sidecar(self._directory, self._scale.dram, self._pool, gpu=self._scale.device >= 0)
        try:
            keeper.wait_ready()
            if self._scale.device >= 0:
                keeper.wait_for(lambda: pinned(keeper), "locked pool", PART_S)
        except BaseException:
            keeper.kill()
            raise
        return keeper


def pinned(keeper: sidecar.Sidecar) -> bool:
    """True if GPUs reach all of the pool."""
    metrics = keeper.metrics()
    return metrics["pillion_pool_pinned_bytes"] >= metrics["pillion_pool_bytes"]


def p99(values: list[float]) -> float:
    """The 99th percentile: one value in a hundred is above it."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The values rounded for a line."""
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}


class Play:
    """The parts, in their order."""

    def __init__(self, directory: Path, scale: Scale, parts: Parts) -> None:
        self._directory, self._scale, self._parts = directory, scale, parts
        self._floods: list[bare_flood.Flood] = []
        self._alone: dict[str, list[float]] = {}
        self._gaps: list[float] = []
        self._tokens: list[int] = []
        self._side = Neighbour(directory, scale, parts)

    def run(self, options: Callable[[Path], engine.Options]) -> None:
        """Plays all parts."""
        # The floods import torch while the engine starts.
        for _ in range(self._scale.floods + len(FAULTS)):
            self._floods.append(bare_flood.Flood(self._directory / f"flood-{len(self._floods)}.log"))
        self._parts.say("the engine starts")
        started = engine.Engine(options(self._side.keeper.socket), self._directory / "engine.log")
        self._side.engine = started
        started.wait_started()
        with self._parts.part("alone"):
            self._measure_alone()
        if not self._alone or not self._gaps:
            return
        with self._parts.part("backlog"):
            self._backlog(self._floods[: self._scale.floods])
        for flood, fault in zip(self._floods[self._scale.floods :], FAULTS, strict=True):
            with self._parts.part(fault):
                self._fault(fault, flood)
            flood.kill()
        self._parts.check(not self._side.keeper.ended(), "the sidecar has ended")

    def end(self) -> None:
        """Ends the floods and the engine."""
        for flood in self._floods:
            flood.close()
        self._side.end()

    def _measure_alone(self) -> None:
        self._side.keep()
        self._alone = self._side.first_tokens()
        # The first one waits for kernels to be compiled.
        for _ in range(2):
            self._side.begin_decode()
            self._gaps, self._tokens = self._side.end_decode()
        first = {name: statistics.median(values) for name, values in self._alone.items()}
        gaps = {"gap_p99_ms": p99(self._gaps), "gap_max_ms": max(self._gaps), "gaps": len(self._gaps)}
        self._parts.tell("alone", first_token_ms=rounded(first), **rounded(gaps))

    def _start(self, flood: bare_flood.Flood, namespace: str, queued_bytes: int) -> None:
        # A namespace of its own: its blocks never hit for the engine.
        role = {"socket": str(self._side.keeper.socket), "namespace": namespace, "device": self._scale.device}
        flood.start(**role, blocks=self._scale.flood_blocks, queued_bytes=queued_bytes)

    def _backlog(self, floods: list[bare_flood.Flood]) -> None:
        for number, flood in enumerate(floods):
            self._start(flood, f"flood-{number}", self._scale.queued_bytes)
        enough = 0.9 * self._scale.queued_bytes
        for flood in floods:
            flood.wait_until(lambda found: found["queued_bytes"] > enough and found["loads"] > 0, "backlog", PART_S)
        before = [flood.news() for flood in floods]
        self._parts.say(f"{sum(found['queued_bytes'] for found in before) / 1e9:.0f} GB are waiting")
        beside = self._side.first_tokens()
        after = [flood.news() for flood in floods]
        rates = [_rate(old, new) for old, new in zip(before, after, strict=True)]
        ratios: dict[str, Any] = {}
        for name, alone in self._alone.items():
            usual = statistics.median(alone)
            self._parts.added_ms.append(max(beside[name]) - usual)
            ratios[name] = statistics.median(beside[name]) / usual
        first = {name: statistics.median(values) for name, values in beside.items()}
        queued = [found["queued_bytes"] for found in after]
        ended = [flood.finish() for flood in floods]
        self._parts.tell(
            "backlog",
            first_token_ms=rounded(first),
            ratio=rounded(ratios),
            longest_ms=rounded({name: max(values) for name, values in beside.items()}),
            flood_bytes_per_s=[round(rate) for rate in rates],
            queued_bytes=queued,
            floods=ended,
        )
        check = self._parts.check
        check(not self._side.keeper.ended(), "backlog: the sidecar has ended")
        for found in ended:
            check(found["connections"] == 1, f"backlog: a connection was lost: {found}")
            check(found["rescues"] == found["failed"] == found["blocks_by_engine"] == 0, f"backlog: loads taken back: {found}")
        check(min(queued) > enough, f"backlog: it was not kept up: {queued}")
        for name, ratio in ratios.items():
            check(ratio <= RATIO_MAX[name], f"backlog: first token of {name} {ratio:.2f} times of alone")

    def _fault(self, fault: str, flood: bare_flood.Flood) -> None:
        """The fault strikes a flood while the serving engine decodes."""
        self._start(flood, fault, self._scale.fault_bytes)
        flood.wait_until(lambda found: found["loads"] > 3, "loads", PART_S)
        self._side.begin_decode()
        time.sleep(sum(self._gaps) / 1000 / 4)
        try:
            FAULTS[fault](flood)
            gaps, tokens = self._side.end_decode()
        finally:
            flood.signal(signal.SIGCONT)
        if fault == "gate":
            # The gate was closed: the flood's rank finished its loads itself.
            flood.wait_until(lambda found: found["rescues"] > 0, "rescue", PART_S)
        warm_ms, ended = self._warm_again()
        if fault == "frozen" and not ended:
            loads = flood.news()["loads"]
            flood.wait_until(lambda found: found["loads"] > loads, "load after the freeze", PART_S)
        moved = p99(gaps) - p99(self._gaps)
        self._parts.added_ms.append(max(gaps) - statistics.median(self._gaps))
        found = {"gap_p99_ms": p99(gaps), "gap_max_ms": max(gaps), "p99_moved_ms": moved, "warm_ms": warm_ms}
        if fault == "gate" and self._scale.device >= 0 and not ended:
            # The flood's rank stays parked, without service, until its process ends.
            self._parked(1)
            flood.kill()
            self._parked(0)
        self._parts.tell(fault, sidecar_ended=ended, gaps=len(gaps), **rounded(found), flood=flood.last)
        self._parts.check(not ended, f"{fault}: the sidecar has ended")
        self._parts.check(tokens == self._tokens, f"{fault}: the neighbour's tokens are others")
        self._parts.check(moved < GAP_MS_MAX, f"{fault}: the 99th percentile of its gaps moved by {moved:.0f} ms")

    def _parked(self, ranks: int) -> None:
        keeper = self._side.keeper
        keeper.wait_for(lambda: keeper.metrics()["pillion_parked_ranks"] == ranks, f"{ranks} parked ranks", PART_S)

    def _warm_again(self) -> tuple[float, bool]:
        """Milliseconds to the first token of a warm prompt, once the engine has a sidecar again, and whether that is another
        one."""
        found: list[float] = []
        restarts: list[bool] = []

        def hit() -> bool:
            restarts.append(self._side.restart_sidecar())
            self._side.forget()
            with contextlib.suppress(NoHit):
                found.append(self._side.warm(self._side.short[0]))
            return bool(found)

        wait_for(hit, "hit after the fault", PART_S, 0.2)
        return found[-1], any(restarts)


def _freeze(flood: bare_flood.Flood) -> None:
    flood.signal(signal.SIGSTOP)
    time.sleep(FROZEN_S)


# The faults of one flood.
FAULTS: dict[str, Callable[[bare_flood.Flood], None]] = {
    "gate": bare_flood.Flood.close_gates,
    "frozen": _freeze,
    "killed": bare_flood.Flood.kill,
}


def _rate(old: dict[str, Any], new: dict[str, Any]) -> float:
    return float(new["loaded_bytes"] - old["loaded_bytes"]) / max(0.001, float(new["at"] - old["at"]))


@contextlib.contextmanager
def watchdog(seconds: int) -> Iterator[None]:
    """Ends the block with an error after so many seconds."""

    def overdue(number: int, frame: FrameType | None) -> None:
        raise Overdue(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, overdue)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def play(directory: Path, scale: Scale, options: Callable[[Path], engine.Options]) -> Parts:
    """Plays all parts until one cannot go on."""
    parts = Parts()
    played: list[Play] = []
    try:
        with watchdog(WATCHDOG_S):
            played.append(Play(directory, scale, parts))
            played[0].run(options)
    except (Exception, Overdue) as error:
        parts.failures.append(f"{type(error).__name__}: {str(error)[:2000]}")
        traceback.print_exc()
    finally:
        for one in played:
            one.end()
    print(parts.line(), flush=True)
    return parts


def test_neighbours_notice_little(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No process dies, no load is taken back while bytes move, all bytes are right, and waits stay within the limits above."""
    shape = dataclasses.replace(gpu_options.SHAPE, max_position=16_384)
    written = model.write(tmp_path / "model", shape)
    mode = gpu_options.Mode(request.config.getoption("--runner"), request.config.getoption("--graphs"))
    more = {"kv_bytes": 1 << 30, "max_requests": 8, "batched_tokens": 2048}
    parts = play(tmp_path, Scale(), lambda socket: gpu_options.options(written, mode, socket, **more))
    assert not parts.failures


def test_percentiles() -> None:
    """With five of 500 gaps longer, the 99th percentile is still short."""
    assert p99([1.0] * 495 + [9.0] * 5) == 9.0
    assert p99([1.0] * 496 + [9.0] * 4) == 1.0
