"""How many requests wait for peers without blocks to give: silent ones, slow ones, ones with lost packets, and ones with broken
promises beside an honest peer.

Each row is a real sidecar among played members of a plaintext mesh. Engines ask for prompts of four blocks, announced by all
members, one after the other with a pause of 50 ms, 1 or 4 engines at once. `late` are the requests after
the first 10 s, and `waited` those of them that took 0.4 s or longer. The last line is one JSON object with all rows.

    benches/run idle-peers [--seconds 120] [--jobs 6] [--quick]
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches import harness
from testkit import idle_peers
from testkit.fake_member import Manner

PEERS, AT_ONCE = (5, 8, 16, 32), (1, 4)
MANNERS = (Manner.SILENT, Manner.SLOW, Manner.LOST)
BEGIN_S, PAUSE_S = 10.0, 0.05
# One request in so many may wait after the first seconds.
ONE_IN = 50
# The time until a promise is known.
PROMISES, BROKEN_MAX, TOLD_S = 14, 3, 0.5

Row = dict[str, Any]


def measure(manner: Manner, peers: int, at_once: int, seconds: float) -> Row:
    """Requests at a sidecar with so many peers, for so long."""
    each = int(seconds / PAUSE_S)
    took: list[tuple[float, float]] = []
    with scene_of([manner] * peers, at_once) as scene:
        scene.announce(range(each * at_once))
        began = time.monotonic()

        def ask(engine: int) -> None:
            for number in range(engine * each, (engine + 1) * each):
                if (asked_s := time.monotonic() - began) >= seconds:
                    break
                took.append((asked_s, scene.ask(number, engine)[0]))
                time.sleep(PAUSE_S)

        with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
            list(threads.map(ask, range(at_once)))
    late = [spent for asked_s, spent in took if asked_s >= BEGIN_S]
    waited = sum(spent >= idle_peers.WAITED_S for spent in late)
    first = sum(spent >= idle_peers.WAITED_S for asked_s, spent in took if asked_s < BEGIN_S)
    row = {"peers": manner.value, "count": peers, "at_once": at_once, "first_waited": first}
    return row | {"late": len(late), "waited": waited, "ok": waited * ONE_IN <= len(late)}


def break_promises() -> Row:
    """Requests for prompts of a peer with broken promises, each behind a block of an honest peer."""
    waited = 0
    with scene_of([Manner.GIVES, Manner.SILENT]) as scene:
        honest, liar = scene.members
        scene.announce(range(PROMISES), [honest])
        for number in range(PROMISES):
            assert scene.ask(number)[1] == idle_peers.BLOCKS
            liar.promise(scene.digests([1000 + number])[-1:])
            time.sleep(TOLD_S)
            waited += scene.await_promised(1000 + number) >= idle_peers.WAITED_S
    return {"peers": "promises", "count": 2, "at_once": 1, "late": PROMISES, "waited": waited, "ok": waited <= BROKEN_MAX}


@contextlib.contextmanager
def scene_of(manners: list[Manner], at_once: int = 1) -> Iterator[idle_peers.Scene]:
    """A scene in a folder of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder,
        idle_peers.scene(Path(folder), manners, at_once) as scene,
    ):
        yield scene


def main() -> None:
    """Prints a row as each ends, and all of them last."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each row")
    parser.add_argument("--jobs", type=int, default=6, help="rows at a time")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 8 peers, one request at once")
    given = parser.parse_args()
    cases = list(itertools.product(MANNERS, PEERS, AT_ONCE))
    if given.quick:
        cases = [(manner, 8, 1) for manner in MANNERS]
    with concurrent.futures.ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(measure, *case, given.seconds) for case in cases]
        jobs += [] if given.quick else [pool.submit(break_promises)]
        rows = []
        for job in concurrent.futures.as_completed(jobs):
            rows.append(job.result())
            harness.say(str(rows[-1]))
    rows.sort(key=lambda row: (row["peers"], row["count"], row["at_once"]))
    harness.report({"rows": rows, "ok": all(row["ok"] for row in rows)})


if __name__ == "__main__":
    main()
