"""The cost of fetching blocks from a peer over TCP: against iperf3 in the same run, loopback, two processes.

Each round fetches every block of a pool of 1 GiB, checksums on, and then lets iperf3 move as many bytes over as many streams;
medians of the rounds. Then single blocks, one at a time. Needs iperf3 (`apt-get install iperf3`) and 5 GiB of free memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benches import harness
from benches.mesh_node import Node, build
from testkit.ports import free_port

GIB = 1 << 30
BLOCK_BYTES = 2 << 20
BLOCKS = GIB // BLOCK_BYTES
STREAMS = (1, 4)
ROUNDS = 9
TLS_ROUNDS = 5
ONES = 2000
WATCHDOG_S = 120


@contextlib.contextmanager
def nodes(binary: Path, streams: int, *tls: object) -> Iterator[tuple[Node, Node]]:
    """An owner and a reader, connected and warm."""
    owner = Node(binary, "serve", BLOCKS, BLOCK_BYTES, streams, *tls)
    try:
        reader = Node(binary, "fetch", owner.line(WATCHDOG_S), BLOCKS, BLOCK_BYTES, streams, *tls)
        try:
            reader.ask("all")
            yield owner, reader
        finally:
            reader.end()
    finally:
        owner.end()


def iperf3(streams: int) -> tuple[float, float]:
    """GiB/s of iperf3 over as many streams, and its seconds of CPU for a GiB."""
    port = str(free_port())
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port, "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in (server.stdout.readline() or sys.exit("iperf3 -s ended")):
        pass
    command = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(streams), "-n", str(GIB), "-J"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WATCHDOG_S)
    server.communicate(timeout=WATCHDOG_S)
    end = json.loads(ran.stdout)["end"]
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    gib = received["bytes"] / GIB
    return gib / received["seconds"], (cpu["host_total"] + cpu["remote_total"]) / 100 * received["seconds"] / gib


def bulk(binary: Path, streams: int) -> dict[str, float]:
    """Rounds of Pillion and of iperf3, interleaved."""
    ours, theirs, ratios, their_cpu = [], [], [], []
    with nodes(binary, streams) as (owner, reader):
        cpu_s = 0.0
        for _ in range(ROUNDS):
            before = owner.cpu_s() + reader.cpu_s()
            ours.append(1 / float(reader.ask("all")))
            cpu_s += owner.cpu_s() + reader.cpu_s() - before
            rate, cpu = iperf3(streams)
            theirs.append(rate)
            their_cpu.append(cpu)
            ratios.append(ours[-1] / rate)
            harness.say(f"{streams} streams: {ours[-1]:.2f} GiB/s, iperf3 {rate:.2f}")
    return {
        "gib_per_s": harness.median(ours, 2),
        "iperf3_gib_per_s": harness.median(theirs, 2),
        "ratio_iperf3": round(statistics.median(ours) / statistics.median(theirs), 3),
        "ratio_iperf3_min": round(min(ratios), 3),
        "cpu_s_per_gib": round(cpu_s / ROUNDS, 3),
        "iperf3_cpu_s_per_gib": harness.median(their_cpu, 3),
    }


def ones(binary: Path) -> dict[str, float]:
    """Microseconds of one block, asked for after the one before has come."""
    with nodes(binary, STREAMS[-1]) as (_, reader):
        micros = sorted(float(word) for word in reader.ask(f"one {ONES}").split())
    return {"one_p50_us": micros[ONES // 2], "one_p99_us": micros[ONES * 99 // 100]}


def over_tls(binary: Path) -> dict[str, float]:
    """The same blocks by mutual TLS."""
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        subprocess.run([str(binary), "certificates", folder], check=True)
        with nodes(binary, STREAMS[-1], folder) as (_, reader):
            rates = [1 / float(reader.ask("all")) for _ in range(TLS_ROUNDS)]
    return {"tls_gib_per_s": harness.median(rates, 2)}


def main() -> None:
    """Builds, measures, reports."""
    harness.parser(__doc__).parse_args()
    if shutil.which("iperf3") is None:
        sys.exit("iperf3 is not installed: apt-get install iperf3")
    binary = build()
    results: dict[str, float] = {}
    for streams in STREAMS:
        suffix = "" if streams == STREAMS[-1] else f"_{streams}"
        results |= {key + suffix: value for key, value in bulk(binary, streams).items()}
    harness.report(results | ones(binary) | over_tls(binary))


if __name__ == "__main__":
    main()
