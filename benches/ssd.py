"""Writing and reading through the SSD tier, as a ratio to fio: io_uring, direct I/O, registered buffers and files, the same
block size and depth at the device, the same file system, in turns. Latencies of the tier include waiting before that.

The tier computes a checksum before each write and verifies it, with the block's header, after each read; fio does neither. Both
write in order and read in random order, from a log or file of 3 GiB, written once before. Takes 6 GiB of disk.

    benches/run ssd
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benches import harness, ssd_log

GIB = 1 << 30
SIZE = 3 * GIB
ROUND_BYTES = GIB
ROUNDS = 9
# Block bytes, and the tier's limit of blocks at the device (JOBS_MAX, BYTES_MAX of its thread).
LOADS = {"2m": (2 << 20, 16), "256k": (256 << 10, 64)}
# The tier gets twice as many, so some wait: the blocks of a load or of write-backs are more.
POSTED = 2


def fio(file: Path, mode: str, block_bytes: int, depth: int, size: int) -> dict[str, float]:
    """One run of fio."""
    options = [f"--filename={file}", f"--rw={mode}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--io_size={size}"]
    options += [f"--size={SIZE}", "--name=fio", "--ioengine=io_uring", "--direct=1", "--fixedbufs", "--registerfiles"]
    # The pool is shared memory, in small pages as a rule: a request for it has more pieces than one for large pages.
    options += ["--mem=mmapshared"]
    command = ["fio", *options, "--output-format=json", "--allow_file_create=1", "--fallocate=native"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    job = json.loads(ended.stdout)["jobs"][0]
    figures = job["read" if "read" in mode else "write"]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    spread = figures["clat_ns"]["percentile"]
    return {
        "gib_s": figures["bw_bytes"] / GIB,
        "p50_us": spread["50.000000"] / 1000,
        "p99_us": spread["99.000000"] / 1000,
        "cpu_s_per_gib": cpu_s * GIB / figures["io_bytes"],
    }


class Bench:
    """The tier's log and fio's file, side by side."""

    def __init__(self, folder: Path) -> None:
        self._executable = ssd_log.build()
        self._log, self._file = folder / "log", folder / "fio"
        # Numbers of blocks unused by earlier rounds.
        self._first = 0

    def fill(self) -> None:
        """Writes both files once: the first write of a place is slower."""
        block_bytes, depth = LOADS["2m"]
        self._tier(block_bytes, depth, SIZE, read=False)
        fio(self._file, "write", block_bytes, depth, SIZE)

    def _tier(self, block_bytes: int, depth: int, size: int, *, read: bool) -> dict[str, float]:
        count = size // block_bytes
        load = f":{block_bytes}:{count}:{depth * POSTED}:{self._first}"
        self._first += count
        loads = ["write" + load] + (["read" + load] if read else [])
        return ssd_log.run(self._executable, self._log, SIZE, *loads)

    def round(self, block_bytes: int, depth: int) -> dict[str, dict[str, float]]:
        """Plays each once: figures by name."""
        tier = self._tier(block_bytes, depth, ROUND_BYTES, read=True)
        by_mode = {mode: {key.removeprefix(f"{mode}_"): value for key, value in tier.items()} for mode in ("write", "read")}
        fio_write = fio(self._file, "write", block_bytes, depth, ROUND_BYTES)
        fio_read = fio(self._file, "randread", block_bytes, depth, ROUND_BYTES)
        return {"write": by_mode["write"], "read": by_mode["read"], "fio_write": fio_write, "fio_read": fio_read}


def summary(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, float | list[float]]:
    """Medians of a block size, and the spread of the promised ratios."""
    found: dict[str, float | list[float]] = {}
    for mode in ("write", "read"):
        ours, theirs = ([each[kind]["gib_s"] for each in rounds] for kind in (mode, f"fio_{mode}"))
        found[f"{mode}_ratio_{name}"] = round(statistics.median(ours) / statistics.median(theirs), 3)
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        found[f"{mode}_ratio_{name}_min_max"] = [round(ratios[0], 3), round(ratios[-1], 3)]
        for kind in (mode, f"fio_{mode}"):
            for figure in ("gib_s", "p50_us", "p99_us", "cpu_s_per_gib"):
                value = statistics.median(each[kind][figure] for each in rounds)
                found[f"{kind}_{name}_{figure}"] = round(value, 3 if value < 100 else 0)
    return found


def main() -> None:
    """Prints one JSON line last."""
    harness.parser(__doc__).parse_args()
    if shutil.which("fio") is None:
        sys.exit("benches/run ssd: fio is missing, what the tier is compared with: apt-get install fio")
    result: dict[str, float | list[float]] = {}
    with ssd_log.folder() as folder:
        bench = Bench(folder)
        bench.fill()
        for name, (block_bytes, depth) in LOADS.items():
            rounds = []
            for number in range(ROUNDS):
                rounds.append(bench.round(block_bytes, depth))
                rates = ", ".join(f"{kind} {figures['gib_s']:.2f}" for kind, figures in rounds[-1].items())
                harness.say(f"{name} round {number}: {rates} GiB/s")
            result |= summary(name, rounds)
    harness.report(result)


if __name__ == "__main__":
    main()
