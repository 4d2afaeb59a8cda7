"""A server under test: a process with a log, ready once one of its pages answers 200."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from testkit.process import Process, start
from testkit.waiting import POLL_S, WATCHDOG_S, wait_for

READY_WATCHDOG_S = 120
PAGE_WATCHDOG_S = 10


def fetch(url: str) -> str | None:
    """The body of a page with status 200, otherwise None."""
    try:
        with urllib.request.urlopen(url, timeout=PAGE_WATCHDOG_S) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


class Server(Process):
    """One process; `ready` is the URL of its readiness."""

    log: Path

    def __init__(self, command: Sequence[object], log: Path, ready: str) -> None:
        super().__init__(start(command, log, stdin=subprocess.DEVNULL), command, log)
        self._ready = ready

    def wait_ready(self, watchdog_s: float = READY_WATCHDOG_S) -> None:
        """Returns once it serves."""
        self.wait_for(lambda: fetch(self._ready) is not None, "readiness", watchdog_s)

    def wait_for(
        self, condition: Callable[[], bool], what: str, watchdog_s: float = WATCHDOG_S, poll_s: float = POLL_S
    ) -> None:
        """Waits for a condition under a watchdog; the end of the server is an error at once."""

        def holds() -> bool:
            if condition():
                return True
            self.check_running()
            return False

        wait_for(holds, what, watchdog_s, poll_s, self.failed)

    def check_running(self) -> None:
        """Fails if the process has ended."""
        if self.ended():
            raise self.failed(f"ended with status {self._process.returncode}")

    def terminate(self) -> None:
        """Sends SIGTERM; the server must end with status 0."""
        self.signal(signal.SIGTERM)
        self.wait_exit()

    def finish(self) -> None:
        """`terminate`, unless it was killed."""
        if self._process.poll() != -signal.SIGKILL:
            self.terminate()
