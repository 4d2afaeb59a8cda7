"""A fault for each alert: real ones, at real sidecars with a Prometheus.

Each fault has begun once its context is entered. `keep_on` is called again and again until the alert fires.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pair

import mesh
from expressions import impatient
from pillion import _shim
from pillion.engine import Engine
from prometheus import Prometheus, scraping
from testkit import idle_peers, pool_file, ports, ptrace
from testkit.fake_member import Manner
from testkit.sidecar import Sidecar, serving

PROMPT = mesh.prompt(1)
MANY = [mesh.prompt(seed) for seed in range(1, 21)]
# More blocks than the pool has slots.
LONG = mesh.prompt(1, blocks=300)

# The time in which the tests' Prometheus, with a scrape each second, has seen a sidecar.
SCRAPED_S = 2.0

Keep_on = Callable[[], object]
Fault = Callable[[Path], contextlib.AbstractContextManager[tuple[Prometheus, Keep_on]]]


@contextlib.contextmanager
def alone(directory: Path, **more: Any) -> Iterator[tuple[Sidecar, Prometheus]]:
    """A sidecar without engines; `more` as for `serving`."""
    with (
        serving(directory, mesh.DRAM, gpu=False, **more) as sidecar,
        scraping(directory, {"one": sidecar}, impatient()) as prometheus,
    ):
        yield sidecar, prometheus


@contextlib.contextmanager
def scene(directory: Path, **more: Any) -> Iterator[tuple[Sidecar, Prometheus, Engine]]:
    """A sidecar, `more` as for `serving`, and an engine with a saved prompt."""
    with (
        alone(directory, **more) as (sidecar, prometheus),
        mesh.joined(sidecar.socket, "saves", max(mesh.BLOCKS, len(LONG) // mesh.TOKENS)) as engine,
    ):
        assert mesh.save(engine, PROMPT) == len(PROMPT) // mesh.TOKENS
        yield sidecar, prometheus, engine


def nothing() -> None:
    """For faults without traffic."""


@contextlib.contextmanager
def stands_still(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The data thread alone is stopped."""
    with alone(directory) as (sidecar, prometheus), ptrace.stopped(ptrace.thread_of(sidecar.pid, "pillion-data")):
        yield prometheus, nothing


@contextlib.contextmanager
def restarts(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The sidecar is ended and started again at each look for the alert."""
    http = f"127.0.0.1:{ports.free_port()}"
    with (
        serving(directory, mesh.DRAM, gpu=False, http=http) as first,
        scraping(directory, {"one": first}, impatient()) as prometheus,
    ):
        first.terminate()
        lives = itertools.count()

        def again() -> None:
            folder = directory / f"life{next(lives)}"
            folder.mkdir()
            with serving(folder, mesh.DRAM, gpu=False, http=http):
                time.sleep(SCRAPED_S)

        yield prometheus, again


@contextlib.contextmanager
def down(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The sidecar is killed."""
    with alone(directory) as (sidecar, prometheus):
        sidecar.kill()
        yield prometheus, nothing


@contextlib.contextmanager
def nobody(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """No engine connects."""
    with alone(directory) as (_, prometheus):
        yield prometheus, nothing


@contextlib.contextmanager
def pool_cut(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """Another process truncates the pool file, and the engine loads."""
    with scene(directory) as (sidecar, prometheus, engine):
        os.truncate(sidecar.pool, 0)
        yield prometheus, lambda: mesh.load(engine, PROMPT)


@contextlib.contextmanager
def other_numbers(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """A third engine computes other KV than two that agree, under the same facts: a check of it contradicts one of the two,
    then the other."""
    with (
        scene(directory) as (sidecar, prometheus, _),
        mesh.joined(sidecar.socket, "saves too") as second,
        Engine(sidecar.socket, "other", mesh.namespace(), mesh.BLOCKS) as other,
    ):
        mesh.save(second, MANY[1])
        for tokens in (PROMPT, MANY[1]):
            mesh.save(other, tokens, value=2.0)
        yield prometheus, nothing


@contextlib.contextmanager
def blocks_changed(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """A bit of each block flips between two sidecars; Prometheus has no scrape of the second one from before its finding."""
    with serving(directory, mesh.DRAM, gpu=False) as first:
        with mesh.joined(first.socket, "saves") as engine:
            mesh.save(engine, PROMPT)
        first.wait_summed()
        first.kill()
        with pool_file.damaged(first.pool) as damaged, serving(directory, mesh.DRAM, gpu=False, pool=first.pool) as second:
            second.wait_metric("pillion_adoption_corrupt_total", damaged)
            with scraping(directory, {"one": second}, impatient()) as prometheus:
                yield prometheus, nothing


@contextlib.contextmanager
def loads_fail(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The headers of an engine's found blocks change before it loads them."""
    with scene(directory) as (sidecar, prometheus, engine), pool_file.broken(sidecar.pool, "generation") as broken:
        assert broken > 0
        yield prometheus, lambda: mesh.load(engine, PROMPT)


@contextlib.contextmanager
def saves_dropped(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """One request is longer than the pool."""
    with scene(directory) as (_, prometheus, engine):
        mesh.save(engine, LONG)
        yield prometheus, nothing


@contextlib.contextmanager
def disk_down(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """Each read of the disk ends early."""
    with scene(directory, ssd=(mesh.disk(directory),)) as (sidecar, prometheus, engine):
        mesh.save_to_disk(sidecar, engine, MANY)

        def read() -> None:
            os.truncate(directory / "disk/pillion.log", 0)
            for tokens in MANY:
                mesh.load(engine, tokens)

        yield prometheus, read


@contextlib.contextmanager
def asking(directory: Path) -> Iterator[tuple[Sidecar, Prometheus, Keep_on]]:
    """Two peers. The first keeps the blocks for an engine of the second."""
    with (
        mesh.peers(directory) as (first, second),
        scraping(directory, {"first": first, "second": second}, impatient()) as prometheus,
        mesh.joined(first.socket, "saves") as saves,
        mesh.joined(second.socket, "asks") as asks,
    ):
        for tokens in MANY[:5]:
            mesh.save(saves, tokens)
        second.wait_metric("pillion_mesh_peer_keys", first.metrics()["pillion_blocks"])
        yield first, prometheus, lambda: [mesh.load(asks, tokens) for tokens in MANY[:5]]


@contextlib.contextmanager
def peer_frozen(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """A peer is frozen: it answers nothing and keeps its connections open."""
    with asking(directory) as (first, prometheus, ask):
        first.freeze()
        try:
            yield prometheus, ask
        finally:
            first.thaw()


@contextlib.contextmanager
def peers_idle(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """Peers announce blocks, and none gives them."""
    with (
        idle_peers.scene(directory, [Manner.SILENT] * 8) as found,
        scraping(directory, {"one": found.sidecar}, impatient()) as prometheus,
    ):
        found.announce(range(len(MANY)))
        numbers = itertools.cycle(range(len(MANY)))
        yield prometheus, lambda: found.ask(next(numbers))


@contextlib.contextmanager
def peer_corrupts(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """Bits of a peer's memory flip after it has made its checksums."""
    with asking(directory) as (first, prometheus, ask):
        first.wait_summed()
        with pool_file.damaged(first.pool) as damaged:
            assert damaged > 0
            yield prometheus, ask


@contextlib.contextmanager
def disk_left_out(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The disk is not mounted."""
    with alone(directory, ssd=(f"{directory}/not/mounted:{mesh.DISK}",)) as (_, prometheus):
        yield prometheus, nothing


@contextlib.contextmanager
def no_ranks(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """An engine's scheduler sends queries, and none of its ranks is connected."""
    with alone(directory) as (sidecar, prometheus):
        scheduler = _shim.SchedulerSession(sidecar.socket, "lonely", 1, bytes(range(16)), 1_000_000, True, False, 0)

        def ask() -> None:
            log = scheduler.open()
            scheduler.append(log, [bytes(32)], 0)
            scheduler.query(log, 0, 1)

        yield prometheus, ask


@contextlib.contextmanager
def no_hello(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """A client speaks another protocol on the engines' socket."""
    with alone(directory) as (sidecar, prometheus):

        def speak() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(sidecar.socket))
                stranger.send(b"GET / HTTP/1.1")
                stranger.recv(1)

        yield prometheus, speak


@contextlib.contextmanager
def following(directory: Path, port: int, peer: str) -> Iterator[tuple[Prometheus, Keep_on]]:
    """A sidecar with `port` for its mesh and `peer` as its peer."""
    more = (f"--mesh-listen=127.0.0.1:{port}", f"--peer={peer}", "--node-id=one", "--mesh-plaintext")
    with alone(directory, more=more) as (_, prometheus):
        yield prometheus, nothing


def peer_missing(directory: Path) -> contextlib.AbstractContextManager[tuple[Prometheus, Keep_on]]:
    """No process listens at the address of the one peer."""
    return following(directory, ports.free_port(), f"127.0.0.1:{ports.free_port()}")


def no_peers(directory: Path) -> contextlib.AbstractContextManager[tuple[Prometheus, Keep_on]]:
    """The name of the pods resolves to this one alone."""
    port = ports.free_port()
    return following(directory, port, f"127.0.0.1:{port}")


def no_name(directory: Path) -> contextlib.AbstractContextManager[tuple[Prometheus, Keep_on]]:
    """The Service of the pods does not exist."""
    return following(directory, ports.free_port(), "nowhere.invalid:9441")


@contextlib.contextmanager
def finds_nothing(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """No prompt begins as another did."""
    with alone(directory) as (sidecar, prometheus), mesh.joined(sidecar.socket, "asks") as engine:
        seeds = itertools.count()
        yield prometheus, lambda: [mesh.load(engine, mesh.prompt(next(seeds))) for _ in range(20)]


@contextlib.contextmanager
def nobody_computes(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The prefill engine is away, so the decode engine computes all prompts."""
    with pair.routing(directory) as router, scraping(directory, {"one": router}, impatient()) as prometheus:
        yield prometheus, router.ask


@contextlib.contextmanager
def never_answers(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The prefill engine accepts connections, and answers nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pair.routing(directory, prefill=f"http://127.0.0.1:{silent.getsockname()[1]}") as router,
        scraping(directory, {"one": router}, impatient()) as prometheus,
    ):
        yield prometheus, router.ask


@contextlib.contextmanager
def computed_twice(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """The decode engine computes each prompt again."""
    with (
        pair.routing(directory, computes=True) as router,
        scraping(directory, {"one": router}, impatient()) as prometheus,
    ):
        yield prometheus, router.ask


@contextlib.contextmanager
def no_room(directory: Path) -> Iterator[tuple[Prometheus, Keep_on]]:
    """Prompts are longer than a router's memory for them."""
    with (
        pair.routing(directory, "--request-memory=1KiB") as router,
        scraping(directory, {"one": router}, impatient()) as prometheus,
    ):
        yield prometheus, lambda: router.ask(503)


FAULTS: dict[str, Fault] = {
    "PillionDown": down,
    "PillionStandsStill": stands_still,
    "PillionRestarts": restarts,
    "PillionPoolLost": pool_cut,
    "PillionBarredEngines": other_numbers,
    "PillionCheckDiffers": other_numbers,
    "PillionBlocksChanged": blocks_changed,
    "PillionLoadsFail": loads_fail,
    "PillionSavesDropped": saves_dropped,
    "PillionDiskDown": disk_down,
    "PillionDiskLeftOut": disk_left_out,
    "PillionNoEngine": nobody,
    "PillionFindsNothing": finds_nothing,
    "PillionServesNobody": no_ranks,
    "PillionEngineRefused": no_hello,
    "PillionNoPeers": no_peers,
    "PillionPeerNameUnresolved": no_name,
    "PillionPeerMissing": peer_missing,
    "PillionPeerLeftAlone": peer_frozen,
    "PillionPeersGiveNothing": peers_idle,
    "PillionPeerCorrupts": peer_corrupts,
    "PillionPrefillFails": nobody_computes,
    "PillionPromptsRecomputed": computed_twice,
    "PillionRouteRefuses": no_room,
}
# A joining engine is not yet connected or served: without their waits these alerts fire at every start.
JOINING = {"PillionServesNobody", "PillionNoEngine"}
# Alerts that the same fault causes, or may cause.
BESIDE: dict[str, set[str]] = {
    "PillionRestarts": {"PillionDown"},
    "PillionPeerMissing": {"PillionNoPeers"},
    "PillionPeerNameUnresolved": {"PillionNoPeers"},
    "PillionPeerLeftAlone": {"PillionDown", "PillionNoPeers", "PillionFindsNothing", "PillionPeersGiveNothing"},
    "PillionPeersGiveNothing": {"PillionPeerLeftAlone", "PillionFindsNothing"},
    "PillionPoolLost": {"PillionLoadsFail"},
    "PillionBarredEngines": {"PillionCheckDiffers"},
    "PillionCheckDiffers": {"PillionBarredEngines"},
    "PillionPeerCorrupts": {"PillionPeerLeftAlone", "PillionFindsNothing"},
}
