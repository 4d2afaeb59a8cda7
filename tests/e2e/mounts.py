"""File systems visible to one process alone, of the size that a test sets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

# With the right to mount, or as root of a user namespace.
WAYS = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
SCRIPT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def small_tmpfs(place: Path, size_bytes: int) -> tuple[str, ...]:
    """The words before a command that give it a tmpfs of this size at `place`. Skips the test where mounting is forbidden."""
    refusals = []
    for way in WAYS:
        prefix = (*way, "sh", "-c", SCRIPT, str(size_bytes), str(place))
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return prefix
        refusals.append(f"{' '.join(way)}: {tried.stderr.strip()}")
    pytest.skip(f"this machine does not let us mount a tmpfs of our own: {'; '.join(refusals)}")
