"""The cost of a query for the engine: from Python, through the native module, to a real sidecar holding a million keys.

A timed query is a new request: open a log, append its keys (Python bytes), query, all hits under a lease. Giving the lease and
the log back is not timed. Then the cost of a second cache group and of KV events; for the cost of peers see peers.py. The last
line is one JSON object; all times in microseconds.

    benches/run query [--binary PILLION]
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benches import harness, peers, rig
from testkit.waiting import wait_for

KEYS = 1_000_000
# Slots of 256-byte blocks take 640 bytes with their headers.
DRAM = "1GiB"
BLOCK_BYTES = 256
BLOCKS = 4096
COUNTS = (1, 16, 64, 256, 512, 1024, 8192)
SAMPLES = 3000
SAMPLES_OF_LARGE = 500
BATCHES = 200
BUSY_SAMPLES = 12_000
ROUND_TRIPS = 20_000
# Before a request of several groups: an engine asks once a step. `settled`: none, once the sidecar has forgotten the last one.
PAUSES_US = {"settled": None, "0": 0, "200": 200, "1000": 1_000, "5000": 5_000}
# Keys of each compared sidecar, and queries in turns of so many.
COMPARED_KEYS = 200_000
TURNS, TURN, ASLEEP_S = 200, 10, 0.005
# Fresh sidecars; their median counts: the place of a sidecar's memory has a larger effect than events.
PAIRS = 5


def clock_us() -> float:
    """Microseconds."""
    return time.perf_counter_ns() / 1000


class Queries:
    """Timed queries over resident keys."""

    def __init__(self, engine: rig.Engine, keys: list[bytes]) -> None:
        self._scheduler = engine.scheduler
        self._keys = keys
        self._random = random.Random(2)

    def keys(self, count: int) -> list[bytes]:
        """Another request's keys."""
        first = self._random.randrange(len(self._keys) - count + 1)
        return self._keys[first : first + count]

    def once(self, keys: list[bytes], look: Callable[[], object] = lambda: ()) -> float:
        """Times one new request, and a look for the sidecar's other messages."""
        scheduler, count = self._scheduler, len(keys)
        began = clock_us()
        log = scheduler.open()
        scheduler.append(log, keys, 0)
        hits = scheduler.query(log, 0, count)
        look()
        spent = clock_us() - began
        self.end(log, hits, count)
        return spent

    def ahead(self, keys: list[bytes], count: int) -> int:
        """Has the sidecar look for the last `count` keys of a new request; the request's log."""
        log = self._scheduler.open()
        self._scheduler.append(log, keys, 0)
        self._scheduler.ask_ahead(log, len(keys) - count, count)
        return log

    def hits(self, log: int, keys: list[bytes], count: int) -> int:
        """The number of the last `count` keys that the sidecar keeps."""
        return self._scheduler.query(log, len(keys) - count, count)

    def end(self, log: int, hits: int, count: int) -> None:
        """Gives the lease and the log back."""
        if hits != count:
            sys.exit(f"{hits} of {count} keys hit: {self._scheduler.stats()} {self._scheduler.take_notices()}")
        self._scheduler.release(log)
        self._scheduler.close(log)
        self._scheduler.end_step()

    def many(self, count: int, samples: int, pause_s: float = 0, look: Callable[[], object] = lambda: ()) -> list[float]:
        """Times new requests one after the other."""
        spent = []
        for _ in range(samples):
            keys = self.keys(count)
            if pause_s:
                time.sleep(pause_s)
            spent.append(self.once(keys, look))
        return spent

    def repeated(self, count: int, samples: int, forget: bool) -> list[float]:
        """Times one request asked again and again. `forget`: its lease is given back, so the sidecar must answer."""
        scheduler, spent = self._scheduler, []
        log = scheduler.open()
        scheduler.append(log, self.keys(count), 0)
        hits = scheduler.query(log, 0, count)
        for _ in range(samples):
            if forget:
                scheduler.release(log)
                scheduler.end_step()
            began = clock_us()
            hits = min(hits, scheduler.query(log, 0, count))
            spent.append(clock_us() - began)
        self.end(log, hits, count)
        return spent

    def batch(self, requests: int, count: int) -> float:
        """Times new requests posted together, until all have their answers."""
        keys = [self.keys(count) for _ in range(requests)]
        began = clock_us()
        logs = [self.ahead(request, count) for request in keys]
        hits = [self.hits(log, request, count) for log, request in zip(logs, keys, strict=True)]
        spent = clock_us() - began
        for log, hit in zip(logs, hits, strict=True):
            self.end(log, hit, count)
        return spent

    def beside_a_busy_thread(self, count: int, samples: int) -> list[float]:
        """Times queries while another Python thread never releases the interpreter by itself."""
        stop = False

        def spin() -> None:
            while not stop:
                pass

        thread = threading.Thread(target=spin)
        thread.start()
        try:
            return self.many(count, samples)
        finally:
            stop = True
            thread.join()


def seqpacket_us() -> float:
    """A round trip of 64 bytes between two Python processes over a UNIX seqpacket socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        while packet := theirs.recv(64):
            theirs.send(packet)
        os._exit(0)
    theirs.close()
    packet, spent = bytes(64), []
    for _ in range(ROUND_TRIPS):
        began = clock_us()
        ours.send(packet)
        ours.recv(64)
        spent.append(clock_us() - began)
    ours.close()
    os.waitpid(child, 0)
    return harness.median(spent)


def fill(engine: rig.Engine, source: random.Random) -> tuple[list[bytes], list[bytes]]:
    """Makes a million keys resident, some of them of 32 bytes, and checks each."""
    long_keys = [source.randbytes(32) for _ in range(BLOCKS * 4)]
    keys = [source.randbytes(16) for _ in range(KEYS - len(long_keys))]
    for part in (long_keys, keys):
        engine.save(part)
    stats = engine.scheduler.stats()
    if stats["blocks_committed"] != KEYS:
        sys.exit(f"{stats['blocks_committed']} of {KEYS} keys were kept: {stats}")
    return keys, long_keys


def check(queries: Queries, keys: list[bytes]) -> None:
    """Ends the benchmark unless every key hits."""
    for first in range(0, len(keys), 8192):
        queries.once(keys[first : first + 8192])


def measure(engine: rig.Engine, keys: list[bytes], long_keys: list[bytes]) -> dict[str, object]:
    """All numbers but those of seqpacket."""
    queries, long_queries = Queries(engine, keys), Queries(engine, long_keys)
    check(queries, keys)
    check(long_queries, long_keys)
    harness.say(f"{KEYS} keys are resident; measuring")
    by_count = {n: queries.many(n, SAMPLES if n < 8192 else SAMPLES_OF_LARGE) for n in COUNTS}
    measure_of: dict[str, Callable[[], float]] = {
        "p50_us_sha256": lambda: harness.median(long_queries.many(512, SAMPLES)),
        "repeat_p50_us": lambda: harness.median(queries.repeated(512, SAMPLES, forget=False)),
        "repeat_asked_p50_us": lambda: harness.median(queries.repeated(512, SAMPLES, forget=True)),
        "rested_p50_us": lambda: harness.median(queries.many(512, SAMPLES // 3, pause_s=0.001)),
        "batch32x512_us": lambda: harness.median([queries.batch(32, 512) for _ in range(BATCHES)]),
        "busy_p99_us": lambda: harness.percentile(queries.beside_a_busy_thread(512, BUSY_SAMPLES), 0.99),
    }
    return {
        "p50_us": {str(n): harness.median(samples) for n, samples in by_count.items()},
        "p99_us": {str(n): harness.percentile(samples, 0.99) for n, samples in by_count.items()},
        **{name: measured() for name, measured in measure_of.items()},
    }


def grouped() -> dict[str, dict[str, float]]:
    """Requests for 512 blocks in turns: of one cache group, and of two, with 64 blocks or all for the second.

    By the pause before each, in microseconds. As the policy asks: both groups ahead.
    """
    source = random.Random(4)
    with rig.sidecar(DRAM) as sidecar, contextlib.ExitStack() as stack:
        groups = []
        for group in range(2):
            engine = rig.Engine(sidecar.socket, BLOCKS, BLOCK_BYTES, f"bench group {group}", {"group": str(group)})
            stack.callback(engine.close)
            groups.append(engine)
        keys = [source.randbytes(32) for _ in range(COMPARED_KEYS)]
        for engine in groups:
            engine.save(keys)
        gc.freeze()
        sides = [Queries(engine, keys) for engine in groups]
        kinds = {"one": (sides[:1], [512]), "window": (sides, [512, 64]), "two": (sides, [512, 512])}
        medians: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        for name, pause_us in PAUSES_US.items():
            spent: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(TURNS // 4):
                for kind, (asked, counts) in kinds.items():
                    spent[kind] += [together(asked, counts, pause_us) for _ in range(TURN // 2)]
            for kind, samples in spent.items():
                medians[kind][name] = harness.median(samples)
    one = medians.pop("one")
    ratios = {
        f"groups_{kind}_ratio": {pause: round(samples[pause] / one[pause], 2) for pause in one}
        for kind, samples in medians.items()
    }
    return {"groups_one_p50_us": one} | ratios


def together(sides: list[Queries], counts: list[int], pause_us: int | None) -> float:
    """Times one new request of 512 blocks to several groups; each needs the last `counts` of its blocks."""
    keys = sides[0].keys(512)
    if pause_us is None:
        for side in sides:
            side.once(side.keys(1))
    elif pause_us:
        time.sleep(pause_us / 1e6)
    began = clock_us()
    logs = [side.ahead(keys, count) for side, count in zip(sides, counts, strict=True)]
    hits = [side.hits(log, keys, count) for side, log, count in zip(sides, logs, counts, strict=True)]
    spent = clock_us() - began
    for side, log, hit, count in zip(sides, logs, hits, counts, strict=True):
        side.end(log, hit, count)
    return spent


def follow(engine: rig.Engine) -> Callable[[], object]:
    """Makes the sidecar announce all kept blocks to an engine, and then changes; the function that takes further changes."""
    scheduler, told = engine.scheduler, 0

    def all_told() -> bool:
        nonlocal told
        told += len(scheduler.take_changes()[0])
        return told >= COMPARED_KEYS

    scheduler.announce()
    wait_for(all_told, "all keys told of", poll_s=rig.POLL_S)
    return scheduler.take_changes


def compared(binary: Path | None) -> dict[str, float]:
    """Queries for 512 keys in turns: plain ones, ones of an engine that follows KV events and takes them after each query, and
    ones of another binary."""
    pairs = [pair(binary) for _ in range(PAIRS)]
    return {name: harness.median((of[name] for of in pairs), 3) for name in pairs[0]}


def pair(binary: Path | None) -> dict[str, float]:
    """Percentiles and ratios of `compared`, for one fresh sidecar of each kind."""
    source = random.Random(3)
    with contextlib.ExitStack() as stack:
        sides: dict[str, tuple[Queries, Callable[[], object]]] = {}
        for kind in ("plain", "events", *(["binary"] if binary else [])):
            running = stack.enter_context(rig.sidecar(DRAM, binary=binary if kind == "binary" else None))
            engine = rig.Engine(running.socket, BLOCKS, BLOCK_BYTES)
            stack.callback(engine.close)
            keys = [source.randbytes(16) for _ in range(COMPARED_KEYS)]
            engine.save(keys)
            look = follow(engine) if kind == "events" else lambda: ()
            sides[kind] = Queries(engine, keys), look
        gc.freeze()
        spent: dict[str, list[float]] = {kind: [] for kind in sides}
        for _ in range(TURNS):
            for kind, (queries, look) in sides.items():
                # The other sidecar sleeps by then, and leaves its core; the first query wakes this one.
                time.sleep(ASLEEP_S)
                spent[kind] += queries.many(512, 1 + TURN, look=look)[1:]
    # On a shared machine a tenth of the queries is still undisturbed.
    return rig.compared("p10", spent, 0.1)


def main() -> None:
    """Fills, checks, measures."""
    binary = rig.binary(__doc__)
    # Measured before there are threads and a large heap to fork.
    round_trip = seqpacket_us()
    with rig.sidecar(DRAM) as sidecar:
        engine = rig.Engine(sidecar.socket, BLOCKS, BLOCK_BYTES)
        harness.say(f"saving {KEYS} keys")
        keys, long_keys = fill(engine, random.Random(1))
        # A million objects: the collector's pauses are the benchmark's own.
        gc.freeze()
        result = measure(engine, keys, long_keys)
        engine.close()
    result |= {**grouped(), **compared(binary), **peers.measure()}
    harness.report(result | {"seqpacket_rtt_us": round_trip, "keys": KEYS})


if __name__ == "__main__":
    main()
