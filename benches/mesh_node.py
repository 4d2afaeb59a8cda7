"""One side of a bench of the mesh: a process of its example `mesh_blocks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
END_S = 300


class Node:
    """One side."""

    def __init__(self, *words: object) -> None:
        self._process = subprocess.Popen([*map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it prints next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        return line or sys.exit(f"{self._process.args!r} ended")

    def ask(self, command: str) -> str:
        """A command, and what it prints."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.line()

    def cpu_s(self) -> float:
        """Seconds of CPU so far, user and system."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def end(self) -> None:
        """It ends with its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_S)
