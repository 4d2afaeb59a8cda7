"""How long a killed sidecar's pool of 8 GiB takes to be served again by the next one, and the index of an SSD log.

A real sidecar on a pool file of tmpfs, filled by saves, killed with SIGKILL, started again on the same file. Timed from
the start of the new process until `/readyz` says that nothing of the start is left to do; that every block was adopted
is read from `/metrics`. Needs 9 GiB of free memory in /dev/shm.

The log holds 1,000,000 blocks of 4 KiB, the whole of them known from footers; timed from the start of a process until all can
be found, with the page cache dropped where this may be done (as root). Takes 9 GiB of disk.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import rig
import ssd_log

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


class Sidecar:
    """A sidecar on a pool file."""

    def __init__(self, folder: Path, pool: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._http = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.socket = folder / "pillion.sock"
        self.log = folder / "log"
        where = ["--socket", self.socket, "--pool-path", pool, "--http", self._http.removeprefix("http://")]
        command = [rig.BINARY, "serve", "--dram", f"{POOL_GIB}GiB", *where]
        self._process = subprocess.Popen([str(part) for part in command], stderr=self.log.open("w"))

    def get(self, path: str) -> str:
        """An admin page; nothing before it is served."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(self._http + path) as page:
            return str(page.read().decode())
        return ""

    def wait_started(self) -> None:
        """Returns when the whole pool is in service."""
        rig.wait_for(lambda: self.get("/readyz") == "ready\n" or self._process.poll() is not None, "readiness", WATCHDOG_S)
        if self._process.poll() is not None:
            sys.exit(f"the sidecar ended:\n{self.log.read_text()}")

    def metric(self, name: str) -> int:
        """One sample of /metrics."""
        return int(re.findall(rf"^{name} (\d+)$", self.get("/metrics"), re.MULTILINE)[0])

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self._process.kill()
        self._process.wait(WATCHDOG_S)


@contextlib.contextmanager
def pool_file() -> Iterator[Path]:
    """A name on tmpfs, removed at the end."""
    path = Path(f"/dev/shm/pillion-bench-{time.monotonic_ns()}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def fill(sidecar: Sidecar, block_bytes: int) -> int:
    """Saves blocks until there is no room for more; how many are kept."""
    engine = rig.Engine(sidecar.socket, SOURCE_BYTES // block_bytes, block_bytes)
    source = random.Random(1)
    # A hundredth of the pool is headers and the ends of segments.
    blocks = POOL_GIB * GIB // block_bytes * 98 // 100
    engine.save([source.randbytes(16) for _ in range(blocks)])
    kept = sidecar.metric("pillion_blocks")
    engine.scheduler.disconnect()
    engine.worker.disconnect()
    return kept


def measure(block_bytes: int) -> dict[str, float | int]:
    """Fills a pool, then kills and restarts its sidecar some times."""
    times = []
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder, pool_file() as pool:
        sidecar = Sidecar(Path(folder), pool)
        try:
            sidecar.wait_started()
            kept = fill(sidecar, block_bytes)
            rig.say(f"{kept} blocks of {block_bytes} bytes are kept; restarting")
            for _ in range(RESTARTS):
                sidecar.kill()
                started = time.monotonic()
                sidecar = Sidecar(Path(folder), pool)
                sidecar.wait_started()
                times.append(time.monotonic() - started)
                adopted = sidecar.metric("pillion_adopted_blocks_total")
                if adopted != kept:
                    sys.exit(f"{adopted} of {kept} blocks were adopted:\n{sidecar.log.read_text()}")
                rig.say(f"adopted {adopted} in {times[-1]:.3f} s: {sidecar.log.read_text()}")
        finally:
            sidecar.kill()
    return {"s": round(sorted(times)[RESTARTS // 2], 3), "s_max": round(max(times), 3), "blocks": kept}


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
        rig.say(f"wrote {INDEX_BLOCKS} blocks of 4 KiB at {written['write_gib_s']} GiB/s")
        # The last segment is still open: this start reads it through and seals it.
        ssd_log.run(executable, log, INDEX_LOG_BYTES)
        found = []
        for _ in range(RESTARTS):
            dropped = drop_page_cache()
            found.append(ssd_log.run(executable, log, INDEX_LOG_BYTES, "ask"))
            if found[-1]["blocks"] != INDEX_BLOCKS:
                sys.exit(f"{found[-1]['blocks']} of {INDEX_BLOCKS} blocks were found")
            rig.say(f"found them again in {found[-1]['recover_s']} s")
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
    results = {name: measure(block_bytes) for name, block_bytes in BLOCK_BYTES.items()}
    pool = {f"{name}_{key}": value for name, result in results.items() for key, value in result.items()}
    print(json.dumps(pool | measure_index()))


main()
