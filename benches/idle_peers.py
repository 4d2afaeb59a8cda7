"""How many requests wait for peers that give nothing: silent ones, slow ones, ones whose packets get lost, and ones that break
promises beside an honest peer.

Each row is a real sidecar among members of a plaintext mesh that this process plays. Engines ask for prompts of four blocks that
all members announce, one after the other with a pause of 50 ms, 1 or 4 engines at once. `late` are the requests after the first 10 s, and
`waited` those of them that took 0.4 s or longer. The last line is one JSON object with all rows.

    benches/run idle-peers [--seconds 120] [--jobs 6] [--quick]
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benches import harness
from testkit import idle_peers
from testkit.fake_member import Manner

PEERS, AT_ONCE = (5, 8, 16, 32), (1, 4)
MANNERS = (Manner.SILENT, Manner.SLOW, Manner.LOST)
BEGIN_S, PAUSE_S = 10.0, 0.05
# Of the requests after the first seconds, one in so many may wait.
ONE_IN = 50
PROMISES, BROKEN_MAX = 14, 3

Row = dict[str, Any]


def measure(manner: Manner, peers: int, at_once: int, seconds: float) -> Row:
    """Requests at a sidecar with so many peers, for so long."""
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        with idle_peers.scene(Path(folder), [manner] * peers, at_once) as scene:
            each = int(seconds / PAUSE_S)
            scene.announce(range(each * at_once))
            took: list[tuple[float, float]] = []
            began = time.monotonic()

            def ask(engine: int) -> None:
                for number in range(engine * each, (engine + 1) * each):
                    asked_s = time.monotonic() - began
                    if asked_s >= seconds:
                        break
                    took.append((asked_s, scene.ask(number, engine)[0]))
                    time.sleep(PAUSE_S)

            threads = [threading.Thread(target=ask, args=(engine,)) for engine in range(at_once)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    late = [spent for asked_s, spent in took if asked_s >= BEGIN_S]
    waited = sum(spent >= idle_peers.WAITED_S for spent in late)
    first = sum(spent >= idle_peers.WAITED_S for asked_s, spent in took if asked_s < BEGIN_S)
    row = {"peers": manner.value, "count": peers, "at_once": at_once, "first_waited": first}
    return row | {"late": len(late), "waited": waited, "ok": waited * ONE_IN <= len(late)}


def break_promises() -> Row:
    """Requests for prompts that one peer has promised and does not compute, each behind a block of an honest peer."""
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        with idle_peers.scene(Path(folder), [Manner.GIVES, Manner.SILENT]) as scene:
            honest, liar = scene.members
            scene.announce(range(PROMISES), [honest])
            waited = 0
            for number in range(PROMISES):
                kept = scene.ask(number)[1]
                assert kept == idle_peers.BLOCKS
                liar.promise(scene.digests([1000 + number])[-1:])
                scene.sidecar.wait_for(lambda: scene.sidecar.metrics()["pillion_mesh_peer_promises"] == 1, "promise")
                waited += scene.await_promised(1000 + number) >= idle_peers.WAITED_S
    return {"peers": "promises", "count": 2, "at_once": 1, "late": PROMISES, "waited": waited, "ok": waited <= BROKEN_MAX}


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
