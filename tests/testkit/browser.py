"""A headless Chromium."""

from __future__ import annotations

import subprocess

WATCHDOG_S = 300
# Root has no sandbox; the machine's /dev/shm may be small.
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def browse(address: str, *options: str) -> str:
    """The output of the browser for a page."""
    done = subprocess.run([*CHROMIUM, *options, address], capture_output=True, text=True, check=True, timeout=WATCHDOG_S)
    return done.stdout
