"""How long a killed sidecar's pool of 8 GiB takes to be served again by the next one, and the index of an SSD log.

A real sidecar on a pool file of tmpfs, filled by saves, killed with SIGKILL, started again on the same file. Timed from
the start of the new process until `/readyz` says that nothing of the start is left to do, and until every block is verified
(`verified_s`), by `/metrics`. Needs 9 GiB of free memory in /dev/shm.

The log holds 1,000,000 blocks of 4 KiB, the whole of them known from footers; timed from the start of a process until all can
be found, with the page cache dropped where this may be done (as root). Takes 9 GiB of disk.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches import harness, rig, ssd_log
from testkit import logs
from testkit.sidecar import Sidecar, new_pool
from testkit.waiting import Failed

GIB = 1 << 30
POOL_GIB = 8
# 2 MiB is a block of a model of 8 billion parameters, 64 KiB one of the smallest that are served.
BLOCK_BYTES = {"pool_8g": 2 << 20, "pool_8g_64k": 64 << 10}
# Memory that is saved from, again and again.
SOURCE_BYTES = 64 << 20
RESTARTS = 5
INDEX_BLOCKS = 1_000_000
INDEX_LOG_BYTES = 9 * GIB
WATCHDOG_S = 120


def started(folder: Path, pool: Path) -> Sidecar:
    """A sidecar on a pool file, the whole of which is in service."""
    sidecar = Sidecar(folder, f"{POOL_GIB}GiB", pool)
    try:
        sidecar.wait_for(lambda: sidecar.get("/readyz") == "ready\n", "readiness", WATCHDOG_S, rig.POLL_S)
    except Failed:
        sidecar.kill()
        raise
    return sidecar


def fill(sidecar: Sidecar, block_bytes: int) -> int:
    """Saves blocks until there is no room for more; how many are kept."""
    engine = rig.Engine(sidecar.socket, SOURCE_BYTES // block_bytes, block_bytes)
    source = random.Random(1)
    # A hundredth of the pool is headers and the ends of segments.
    blocks = POOL_GIB * GIB // block_bytes * 98 // 100
    engine.save([source.randbytes(16) for _ in range(blocks)])
    kept = sidecar.metrics()["pillion_blocks"]
    engine.close()
    return kept


def measure(block_bytes: int) -> dict[str, float | int]:
    """Fills a pool, then kills and restarts its sidecar some times."""
    times, verified = [], []
    pool = new_pool()
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder, contextlib.ExitStack() as stack:
        stack.callback(pool.unlink, missing_ok=True)
        sidecar = started(Path(folder), pool)
        stack.callback(lambda: sidecar.kill())
        kept = fill(sidecar, block_bytes)
        sidecar.wait_summed()
        harness.say(f"{kept} blocks of {block_bytes} bytes are kept; restarting")
        for _ in range(RESTARTS):
            sidecar.kill()
            began = time.monotonic()
            sidecar = started(Path(folder), pool)
            times.append(time.monotonic() - began)
            sidecar.wait_metric("pillion_adopted_blocks_total", kept)
            verified.append(time.monotonic() - began)
            harness.say(f"adopted {kept} in {times[-1]:.3f} s, verified in {verified[-1]:.3f}: {logs.tail(sidecar.log)}")
    return {
        "s": harness.median(times, 3),
        "s_max": round(max(times), 3),
        "verified_s": harness.median(verified, 3),
        "verified_s_max": round(max(verified), 3),
        "blocks": kept,
    }


def drop_page_cache() -> bool:
    """Leaves nothing of the disk in memory, if this process may."""
    subprocess.run(["sync"], check=True)
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    return False


def measure_index() -> dict[str, float | int | bool]:
    """Fills a log, then opens it some times."""
    executable = ssd_log.build()
    with ssd_log.folder() as folder:
        log = folder / "log"
        written = ssd_log.run(executable, log, INDEX_LOG_BYTES, f"write:4096:{INDEX_BLOCKS}:64:0")
        harness.say(f"wrote {INDEX_BLOCKS} blocks of 4 KiB at {written['write_gib_s']} GiB/s")
        # The last segment is still open: this start reads it through and seals it.
        ssd_log.run(executable, log, INDEX_LOG_BYTES)
        found = []
        for _ in range(RESTARTS):
            dropped = drop_page_cache()
            found.append(ssd_log.run(executable, log, INDEX_LOG_BYTES, "ask"))
            if found[-1]["blocks"] != INDEX_BLOCKS:
                sys.exit(f"{found[-1]['blocks']} of {INDEX_BLOCKS} blocks were found")
            harness.say(f"found them again in {found[-1]['recover_s']} s")
    times = sorted(figures["recover_s"] for figures in found)
    return {
        "index_1m_s": round(times[RESTARTS // 2], 3),
        "index_1m_s_max": round(times[-1], 3),
        "index_1m_cache_dropped": dropped,
        "index_1m_bytes_per_key": max(figures["bytes_per_key"] for figures in found),
        "index_1m_probe_1024_us": sorted(figures["probe_1024_us"] for figures in found)[RESTARTS // 2],
        "index_1m_probe_1024_absent_us": sorted(figures["probe_1024_absent_us"] for figures in found)[RESTARTS // 2],
    }


def main() -> None:
    """Both block sizes of the pool, and the log."""
    harness.parser(__doc__).parse_args()
    results = {name: measure(block_bytes) for name, block_bytes in BLOCK_BYTES.items()}
    pool = {f"{name}_{key}": value for name, result in results.items() for key, value in result.items()}
    harness.report(pool | measure_index())


if __name__ == "__main__":
    main()
