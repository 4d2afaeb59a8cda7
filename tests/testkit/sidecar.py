"""Real sidecars: one `pillion serve` per `Sidecar`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit import metrics, ports, threads
from testkit.process import EXIT_WATCHDOG_S
from testkit.server import Server, fetch
from testkit.waiting import Failed


class Sidecar(Server):
    """A sidecar with a socket, a pool file and an admin address of its own."""

    def __init__(
        self,
        directory: Path,
        dram: str = "128MiB",
        pool: Path | None = None,
        anonymous: bool = False,
        prefix: tuple[str, ...] = (),
        gpu: bool = True,
        ssd: tuple[str, ...] = (),
        http: str | None = None,
        more: tuple[str, ...] = (),
        binary: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """A pool of `anonymous` memory has no file; without `gpu` the sidecar sees no GPU.

        `prefix` goes before the command. Each `ssd` is a PATH:SIZE[:create]; `more` are arguments as they are.
        """
        self.socket = directory / "pillion.sock"
        self.pool = pool or new_pool()
        self.http = http or f"127.0.0.1:{ports.free_port()}"
        arguments = ["--socket", self.socket, "--dram", dram, "--http", self.http]
        arguments += [] if anonymous else ["--pool-path", self.pool]
        arguments += [] if gpu else ["--gpu", "off"]
        arguments += [*(f"--ssd={disk}" for disk in ssd), *more]
        command = [*prefix, binary or find_binary(), "serve", *arguments]
        super().__init__(command, log or directory / "sidecar.log", f"http://{self.http}/readyz")

    def get(self, path: str) -> str | None:
        """The body of an admin page, or None if its status is not 200."""
        return fetch(f"http://{self.http}{path}")

    def namespaces(self) -> list[dict[str, Any]]:
        """The list of `pillion ctl namespaces`."""
        return list(self.ctl("namespaces")["namespaces"])

    def ctl(self, *command: str) -> dict[str, Any]:
        """The answer of a command of `pillion ctl`."""
        line = [str(find_binary()), "ctl", "--socket", str(self.socket), *command]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def metrics(self) -> dict[str, int]:
        """Every sample of /metrics by name, summed over its labels."""
        return metrics.totals(self._metrics_page())

    def sample(self, name: str) -> int:
        """One sample of /metrics by its name with the labels, as the page has it."""
        return metrics.sample(self._metrics_page(), name)

    def wait_metric(self, name: str, at_least: int) -> None:
        """Waits until a metric is at least so large; saves commit some time after the engine's answer."""
        self.wait_for(lambda: self.metrics()[name] >= at_least, f"{name} >= {at_least}")

    def wait_summed(self) -> None:
        """Waits until every saved block has its checksum: the next sidecar of the pool file adopts no block without one."""
        self.wait_for(lambda: self.metrics()["pillion_pool_unsummed_blocks"] == 0, "checksums")

    def freeze(self) -> None:
        """Stops the process with SIGSTOP, until `thaw`."""
        threads.freeze(self.pid)

    def thaw(self) -> None:
        """Lets the process go on with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wait_refusal(self) -> str:
        """The output of a sidecar that cannot start; it must end with an error status."""
        status = self._process.wait(EXIT_WATCHDOG_S)
        if status in (0, -signal.SIGKILL):
            raise self.failed(f"no refusal, but exit status {status}")
        return self.log.read_text()

    def _metrics_page(self) -> str:
        page = self.get("/metrics")
        if page is None:
            raise self.failed("no /metrics")
        return page

    def evidence(self) -> str:
        """The evidence of any process, and the current metrics."""
        return f"\n--- /metrics\n{self.get('/metrics')}{super().evidence()}"


def find_binary(named: str | None = None) -> Path:
    """The sidecar's executable: `named`, or the one in this interpreter's wheel, or one on the PATH."""
    own = Path(sysconfig.get_path("scripts")) / "pillion"
    wanted = named or os.environ.get("PILLION_BINARY") or (str(own) if own.exists() else "pillion")
    found = shutil.which(wanted)
    if found is None:
        raise Failed(f"no executable {wanted!r}: install Pillion's wheel into {sys.prefix}, or name one by PILLION_BINARY")
    return Path(found)


def new_pool() -> Path:
    """A name for a pool file. It must lie on tmpfs; the tests read and damage the file."""
    return Path("/dev/shm") / f"pillion-test-{uuid.uuid4()}"


@contextlib.contextmanager
def serving(directory: Path, dram: str = "128MiB", **more: Any) -> Iterator[Sidecar]:
    """A ready sidecar, `more` as for `Sidecar`. At the block's end it must exit cleanly, unless the block killed it."""
    sidecar = Sidecar(directory, dram, **more)
    try:
        sidecar.wait_ready()
        yield sidecar
        sidecar.finish()
    finally:
        sidecar.kill()
        sidecar.pool.unlink(missing_ok=True)
