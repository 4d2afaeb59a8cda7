"""Logs of the processes under test."""

from __future__ import annotations

from pathlib import Path

# The bytes shown of a log when something fails.
TAIL_BYTES = 6_000


def tail(log: Path, tail_bytes: int = TAIL_BYTES) -> str:
    """The end of a log file, as text."""
    return log.read_bytes()[-tail_bytes:].decode(errors="replace")
