"""One side of a bench of the mesh: a process of the example `mesh_blocks`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testkit.child import Child

TICKS = os.sysconf("SC_CLK_TCK")
WATCHDOG_S = 300


def build() -> Path:
    """The example, of a release build."""
    command = ["cargo", "build", "--quiet", "--release", "--package", "tools", "--example", "mesh_blocks"]
    subprocess.run(command, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release/examples/mesh_blocks"


class Node(Child):
    """One side: it answers a line by a line, and ends with its standard input."""

    def __init__(self, *words: object) -> None:
        super().__init__(words, log=None)

    def ask(self, command: str) -> str:
        """Sends a command; its printed line."""
        self.write(command)
        return self.line(WATCHDOG_S)

    def cpu_s(self) -> float:
        """Seconds of CPU so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def end(self) -> None:
        """Closes its input, and waits for its end."""
        self.close_input()
        self.wait_exit(WATCHDOG_S)
