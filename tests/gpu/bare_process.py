"""A bare engine in a process of its own, which can be frozen and killed.

As a program: imports, then reads what engine to be, a JSON line, and plays rounds until its standard input ends. After every
few steps it writes a JSON line: what it found so far, and what another engine needs to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bare_rank import WATCHDOG_S, Prompt

# Steps between two lines, some 30 ms.
BATCH_STEPS = 30
EXIT_WATCHDOG_S = 30
LOG_TAIL_BYTES = 4000


class Process:
    """One engine's process, from the test's side. It has imported torch, or is about to, before it is `start`ed."""

    def __init__(self, log: Path, prefix: tuple[str, ...] = ()) -> None:
        self.log = log
        self.last: dict[str, Any] = {}
        self._unread = b""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            start_new_session=True,  # ranks in processes of their own end with it
        )

    def start(self, **options: Any) -> None:
        """Which engine to be: fields of `bare_engine.Options`, and `memory_part` of the GPU."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options).encode() + b"\n")
        self._process.stdin.flush()

    def line(self, watchdog_s: float = WATCHDOG_S) -> dict[str, Any]:
        """Its next line; it must not have found a wrong word."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + watchdog_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            assert chunk, f"the engine {'ended' if readable else 'says nothing'}\n{self.log.read_text()[-LOG_TAIL_BYTES:]}"
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        self.last = json.loads(line)
        assert self.last["wrong_words"] == 0, f"wrong bytes: {self.last}"
        return self.last

    def news(self) -> dict[str, Any]:
        """A line about what was done from now on: those that wait to be read are skipped."""
        assert self._process.stdout is not None
        while b"\n" in self._unread or select.select([self._process.stdout], [], [], 0)[0]:
            self.line()
        self.line()
        return self.line()

    def finish(self) -> dict[str, Any]:
        """Has it end all loads and leave; its last line."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self.line()
        while "ended" not in last:
            last = self.line()
        status = self._process.wait(EXIT_WATCHDOG_S)
        assert status == 0, f"exit status {status}\n{self.log.read_text()[-LOG_TAIL_BYTES:]}"
        return last

    @property
    def pid(self) -> int:
        """The process that was started: with a prefix, that of the prefix."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """To it and the ranks below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """At once, as the kernel would."""
        self.signal(signal.SIGKILL)
        self._process.wait(EXIT_WATCHDOG_S)


@contextlib.contextmanager
def running(log: Path, prefix: tuple[str, ...] = (), **options: Any) -> Iterator[Process]:
    """An engine at work, that is gone when the block ends."""
    process = Process(log, prefix)
    try:
        process.start(**options)
        process.line(2 * WATCHDOG_S)
        yield process
    finally:
        process.kill()


# === The program ===


def main() -> None:
    """One engine's life."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import bare_engine
    import bare_rank
    import torch

    line = sys.stdin.readline()
    if not line:
        return
    role = json.loads(line)
    # A part of the GPU's memory, for one that ends up with as much as the one before it.
    part = role.pop("memory_part", None)
    if part is not None:
        role["blocks"] = int(torch.cuda.mem_get_info()[1] * part) // bare_rank.BLOCK_BYTES
    role["socket"] = Path(role["socket"])
    role["prompts"] = tuple(Prompt(*prompt) for prompt in role.get("prompts", ()))
    role["devices"] = tuple(role.get("devices", (0,)))
    began = time.monotonic()
    engine = bare_engine.Engine(bare_engine.Options(**role))
    start_s = time.monotonic() - began

    def tell(found: bare_rank.Found, **more: Any) -> None:
        known: dict[str, Any] = {"pid": os.getpid(), "start_s": start_s, "next_key": engine.next_key}
        known |= {"prompts": [dataclasses.astuple(prompt) for prompt in engine.prompts], "inherited": engine.inherited}
        out.write(json.dumps(dataclasses.asdict(found) | {"loaded": found.loaded} | known | more) + "\n")

    tell(engine.found())
    while not select.select([sys.stdin], [], [], 0)[0]:
        engine.play(BATCH_STEPS)
        tell(engine.found())
    tell(engine.rest(), ended=True)
    engine.end()


if __name__ == "__main__":
    main()
