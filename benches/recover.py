"""How long a killed sidecar's pool of 8 GiB takes to be served again by the next one.

A real sidecar on a pool file of tmpfs, filled by saves, killed with SIGKILL, started again on the same file. Timed from
the start of the new process until `/readyz` says that nothing of the start is left to do; that every block was adopted
is read from `/metrics`. Needs 9 GiB of free memory in /dev/shm.
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

GIB = 1 << 30
POOL_GIB = 8
# 2 MiB is a block of a model of 8 billion parameters, 64 KiB one of the smallest that are served.
BLOCK_BYTES = {"pool_8g": 2 << 20, "pool_8g_64k": 64 << 10}
# Memory that is saved from, again and again.
SOURCE_BYTES = 64 << 20
RESTARTS = 5
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


def main() -> None:
    """Both block sizes."""
    results = {name: measure(block_bytes) for name, block_bytes in BLOCK_BYTES.items()}
    print(json.dumps({f"{name}_{key}": value for name, result in results.items() for key, value in result.items()}))


main()
