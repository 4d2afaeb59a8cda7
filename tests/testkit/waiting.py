"""Waits for a condition under a watchdog. A watchdog ends a run that hangs; no test asserts on the time itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

WATCHDOG_S = 60
POLL_S = 0.02


def _read_factor() -> float:
    given = os.environ.get("WATCHDOG_FACTOR", "1")
    try:
        factor = float(given)
    except ValueError:
        factor = 0
    if not 0 < factor < float("inf"):
        sys.exit(f"WATCHDOG_FACTOR is {given!r}: make it a number above 0, such as 3")
    return factor


# Every watchdog waits this many times as long, for machines under load.
FACTOR = _read_factor()


class Failed(AssertionError):
    """A process ended, refused or did not do its part under the watchdog."""

    def __init__(self, reason: str, evidence: str = "", log: Path | None = None) -> None:
        """`reason` is one line; `evidence` follows it, and may have many; `log` is the log of the process."""
        super().__init__(reason + evidence)
        self.reason = reason
        self.log = log


def allow(watchdog_s: float) -> float:
    """Seconds to wait under a watchdog of `watchdog_s`."""
    return watchdog_s * FACTOR


def outlasted(what: str, watchdog_s: float) -> str:
    """The reason of a failure after `allow(watchdog_s)` seconds without `what`."""
    limit_s = allow(watchdog_s)
    return f"no {what} in {limit_s:g} s; set WATCHDOG_FACTOR={3 * FACTOR:g} to wait {3 * limit_s:g} s"


def wait_for(
    condition: Callable[[], bool],
    what: str,
    watchdog_s: float = WATCHDOG_S,
    poll_s: float = POLL_S,
    failed: Callable[[str], Failed] = Failed,
) -> None:
    """Returns once the condition holds; otherwise raises the error of `failed` for the reason."""
    deadline = time.monotonic() + allow(watchdog_s)
    while not condition():
        if time.monotonic() > deadline:
            raise failed(outlasted(what, watchdog_s))
        time.sleep(poll_s)
