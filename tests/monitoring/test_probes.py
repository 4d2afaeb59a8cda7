"""The probes of a sidecar with a stopped data thread, and of an idle one."""

from __future__ import annotations

import http.client
import time
from pathlib import Path

from testkit import ptrace
from testkit.sidecar import Sidecar, serving
from testkit.waiting import WATCHDOG_S, wait_for

# A request so long after the last turn is answered 503.
READY_S, HEALTHY_S = 3.0, 12.0
IDLE_S, IDLE_POLL_S = 60.0, 0.25


def status(of: Sidecar, path: str) -> int:
    """The HTTP status of a page."""
    connection = http.client.HTTPConnection(of.http, timeout=WATCHDOG_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_probes_fail_while_the_data_thread_alone_stands_still(tmp_path: Path) -> None:
    """First /readyz fails, then /healthz; both succeed once the thread goes on."""
    with serving(tmp_path, "16MiB", gpu=False) as sidecar:
        data_thread = ptrace.thread_of(sidecar.pid, "pillion-data")
        assert (status(sidecar, "/readyz"), status(sidecar, "/healthz")) == (200, 200)
        with ptrace.stopped(data_thread):
            began = time.monotonic()
            for path, seconds in (("/readyz", READY_S), ("/healthz", HEALTHY_S)):
                time.sleep(began + seconds - time.monotonic())
                assert status(sidecar, path) == 503, f"{path} {seconds} s after the last turn"
            assert status(sidecar, "/metrics") == 200, "the page that says for how long"
        wait_for(lambda: status(sidecar, "/readyz") == status(sidecar, "/healthz") == 200, "probes that succeed again")


def test_probes_of_an_idle_sidecar_never_fail(tmp_path: Path) -> None:
    """No engine is connected, so only its own timer wakes the data thread."""
    with serving(tmp_path, "16MiB", gpu=False) as sidecar:
        until = time.monotonic() + IDLE_S
        while time.monotonic() < until:
            for path in ("/readyz", "/healthz"):
                assert status(sidecar, path) == 200, f"{path} {until - time.monotonic():.1f} s before the end"
            time.sleep(IDLE_POLL_S)
