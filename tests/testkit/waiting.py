"""Waiting for a condition under a watchdog. A watchdog ends a run that hangs; nothing asserts on the time itself."""

from __future__ import annotations

import time
from collections.abc import Callable

WATCHDOG_S = 60
POLL_S = 0.02


class Failed(AssertionError):
    """A process ended, refused or did not do its part under the watchdog."""


def wait_for(
    condition: Callable[[], bool],
    what: str,
    watchdog_s: float = WATCHDOG_S,
    poll_s: float = POLL_S,
    failed: Callable[[str], Failed] = Failed,
) -> None:
    """Return once the condition holds; otherwise raise what `failed` makes of the reason."""
    deadline = time.monotonic() + watchdog_s
    while not condition():
        if time.monotonic() > deadline:
            raise failed(f"no {what} in {watchdog_s} s")
        time.sleep(poll_s)
