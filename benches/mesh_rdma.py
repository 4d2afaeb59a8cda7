"""The cost of fetching blocks from a peer over RDMA: against ib_read_bw in the same run, two processes, two devices.

Without an RDMA NIC this runs in a guest with Soft-RoCE under emulation (scripts/rxe-vm): the ratio shows the transport's
addition to READs, the rates themselves show nothing. Each round fetches every block of a small pool over two queue pairs,
checksums on, and then lets ib_read_bw read as many bytes over as many, once polling and once waiting for events as Pillion
does: the better median counts, since polling needs processors, and emulation has few.

In the guest this module runs itself, with the binary's path.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benches import harness
from benches.mesh_node import Node, build
from testkit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
BLOCK_BYTES = 2 << 20
BLOCKS = 32
READ_BYTES = 1 << 20
QUEUE_PAIRS = 2
ROUNDS = 3
ONES = 30
WATCHDOG_S = 300
DEVICES = ("rxe0", "rxe1")


def ib_read_bw(port: int, *options: str) -> float:
    """MiB/s of ib_read_bw: rxe0 reads as many bytes from rxe1 as Pillion's reader does."""
    reads = BLOCKS * BLOCK_BYTES // READ_BYTES // QUEUE_PAIRS
    common = ["ib_read_bw", "-s", str(READ_BYTES), "-n", str(reads), "-q", str(QUEUE_PAIRS), "-p", str(port), "-F", *options]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([*common, "-d", DEVICES[1]], stdout=quiet, stderr=quiet)
    listening = f":{port:04X} "

    def listens() -> bool:
        assert server.poll() is None, "ib_read_bw ended"
        return any(listening in line and " 0A " in line for line in Path("/proc/net/tcp").read_text().splitlines())

    wait_for(listens, "listening ib_read_bw", WATCHDOG_S)
    command = [*common, "-d", DEVICES[0], "10.77.0.2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WATCHDOG_S)
    server.wait(WATCHDOG_S)
    found = re.search(rf"^\s*{READ_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)", ran.stdout, re.MULTILINE)
    return float(found[1]) if found else sys.exit(f"ib_read_bw said {ran.stdout}{ran.stderr}")


def measure(binary: str) -> dict[str, float]:
    """Rounds of Pillion and of ib_read_bw, interleaved; then single blocks."""
    sizes = (BLOCKS, BLOCK_BYTES)
    owner = Node(binary, "serve", *sizes, f"{DEVICES[1]}:{QUEUE_PAIRS}")
    reader = Node(binary, "fetch", owner.line(WATCHDOG_S), *sizes, f"{DEVICES[0]}:{QUEUE_PAIRS}")
    reader.ask("all")
    ours, polling, waiting = [], [], []
    for number in range(ROUNDS):
        ours.append(BLOCKS * BLOCK_BYTES / MIB / float(reader.ask("all")))
        polling.append(ib_read_bw(18515 + 2 * number))
        waiting.append(ib_read_bw(18516 + 2 * number, "-e"))
        harness.say(f"{ours[-1]:.0f} MiB/s, ib_read_bw {polling[-1]:.0f} polling, {waiting[-1]:.0f} waiting")
    micros = sorted(float(word) for word in reader.ask(f"one {ONES}").split())
    reader.end()
    owner.end()
    theirs = max(statistics.median(polling), statistics.median(waiting))
    return {
        "mib_per_s": harness.median(ours),
        "ib_read_bw_mib_per_s": round(theirs, 1),
        "ratio_ib_read_bw": round(statistics.median(ours) / theirs, 3),
        "one_p50_us": micros[ONES // 2],
    }


def main() -> None:
    """Builds, boots, measures, reports."""
    subprocess.run(["scripts/rxe-vm", "setup"], check=True, stdout=sys.stderr)
    built = build()
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        # Copies, because a file open in the guest must not change.
        shutil.copy(built, folder)
        for package in (ROOT / "benches", ROOT / "tests/testkit"):
            shutil.copytree(package, Path(folder, package.name), ignore=shutil.ignore_patterns("__pycache__"))
        command = ["env", f"PYTHONPATH={folder}", "python3", "-P", "-m", "benches.mesh_rdma", Path(folder, built.name)]
        subprocess.run(["scripts/rxe-vm", "run", *map(str, command)], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        harness.report(measure(sys.argv[1]))
    else:
        main()
