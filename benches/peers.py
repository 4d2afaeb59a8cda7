"""The cost of a mesh for a query: the time until the sidecar's first answer, while the engine's scheduler waits.

Three sidecars, each with blocks of its own: one in no mesh, one in a mesh, and its peer there. The first answer to a query for
the peer's blocks is that they are on their way.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time

from benches import harness, rig
from testkit.ports import free_port
from testkit.waiting import wait_for

KEYS = 200_000
COUNT = 640
# The peer's keys are asked for once each.
ROUNDS = KEYS // COUNT
# Queries for one key that no sidecar keeps.
STRANGERS = 200_000
DRAM = "512MiB"
BLOCK_BYTES = 256
BLOCKS = 4096
# The time until fetched blocks are announced, and the machine is quiet again.
QUIET_S = 0.1
# Queries to wake up a sidecar, and to fill caches.
AWAKE = 10


class Side:
    """A sidecar, an engine beside it, and the engine's saved keys."""

    def __init__(self, stack: contextlib.ExitStack, source: random.Random, more: tuple[str, ...] = ()) -> None:
        self._sidecar = stack.enter_context(rig.sidecar(DRAM, more))
        self._engine = rig.Engine(self._sidecar.socket, BLOCKS, BLOCK_BYTES)
        self._scheduler = self._engine.scheduler
        stack.callback(self._engine.close)
        self.keys = [source.randbytes(16) for _ in range(KEYS)]
        self._engine.save(self.keys)

    def metric(self, name: str) -> int:
        """The sum of its samples. They are up to 0.1 s old."""
        time.sleep(2 * QUIET_S)
        return self._sidecar.metrics()[name]

    def ask(self, keys: list[bytes]) -> tuple[float, int, int]:
        """Sends a new request: microseconds until its first answer, and the first and the last answer."""
        scheduler = self._scheduler
        began = time.perf_counter_ns()
        log = scheduler.open()
        scheduler.append(log, keys, 0)
        first = hits = scheduler.query(log, 0, len(keys))
        spent = (time.perf_counter_ns() - began) / 1000
        while hits < 0:
            scheduler.end_step()
            hits = scheduler.query(log, 0, len(keys))
        scheduler.release(log)
        scheduler.close(log)
        scheduler.end_step()
        return spent, first, hits


def _mesh(own: str, other: str) -> tuple[str, ...]:
    return "--mesh-listen", own, "--peer", other, "--node-id", own, "--mesh-plaintext"


def _rounds(source: random.Random, alone: Side, member: Side, peer: Side) -> tuple[dict[str, list[float]], int]:
    """Queries of each kind in turn, for other keys each time; and how often an answer was the last one before it was seen."""
    spent: dict[str, list[float]] = {"local": [], "absent": [], "peers_absent": [], "peers_remote": []}
    overtaken = 0
    for number in range(ROUNDS):
        here, there = (slice(at * COUNT, (at + 1) * COUNT) for at in (number, number - 1))
        absent = [[source.randbytes(16) for _ in range(COUNT)] for _ in range(2)]
        time.sleep(QUIET_S)
        for side, kinds in (
            (alone, (("local", alone.keys[here], COUNT), ("absent", absent[0], 0))),
            (member, (("peers_absent", absent[1], 0), ("peers_remote", peer.keys[here], COUNT))),
        ):
            # A sleeping sidecar is awake after these.
            for _ in range(AWAKE):
                side.ask(side.keys[there])
            for kind, keys, hits in kinds:
                took, first, last = side.ask(keys)
                if last != hits:
                    sys.exit(f"{kind}: {last} hits instead of {hits}")
                overtaken += kind == "peers_remote" and first == COUNT
                spent[kind].append(took)
    return spent, overtaken


def _false_positives(source: random.Random, member: Side, peer: Side) -> int:
    """The number of questions to the peer about unknown keys."""
    before = peer.metric("pillion_mesh_asks_total")
    for _ in range(STRANGERS):
        _, _, hits = member.ask([source.randbytes(16)])
        if hits:
            sys.exit("a block that nobody has was found")
    return peer.metric("pillion_mesh_asks_total") - before


def measure() -> dict[str, float]:
    """Medians, microseconds."""
    source = random.Random(3)
    with contextlib.ExitStack() as stack:
        harness.say(f"saving {KEYS} keys in each of three sidecars")
        ends = [f"{address}:{free_port(address)}" for address in ("127.0.0.1", "127.0.0.2")]
        alone, member, peer = (
            Side(stack, source),
            Side(stack, source, _mesh(*ends)),
            Side(stack, source, _mesh(*reversed(ends))),
        )
        wait_for(lambda: member.metric("pillion_mesh_peer_keys") == KEYS, "news of the peer's keys")
        gc.freeze()
        harness.say("measuring")
        spent, overtaken = _rounds(source, alone, member, peer)
        asks = _false_positives(source, member, peer)
    medians = {name: harness.median(samples) for name, samples in spent.items()}
    added = {kind: medians[f"peers_{kind}"] - medians[base] for kind, base in (("absent", "absent"), ("remote", "local"))}
    return {
        **{f"{name}_{COUNT}_us": value for name, value in medians.items()},
        "peers_added_us": round(max(added.values()), 1),
        "peers_remote_overtaken": overtaken,
        "peers_absent_asks": asks,
        "peers_false_positives_per_million": round(asks * 1_000_000 / STRANGERS),
    }
