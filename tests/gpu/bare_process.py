"""A bare engine in a process of its own, which can be frozen and killed.

As a program it imports, reads its options from a JSON line, and plays rounds until its standard input ends. After every few
steps it writes a JSON line: its findings so far, and the state for a successor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bare_rank import WATCHDOG_S, Prompt

from testkit.child import Child, Parent, python

# Steps between two lines, some 30 ms.
BATCH_STEPS = 30
HERE = Path(__file__).resolve().parent


class Process(Child):
    """One engine's process, from the test's side. It imports torch before `start`."""

    def __init__(self, log: Path, prefix: tuple[str, ...] = ()) -> None:
        super().__init__([*prefix, *python("bare_process")], log, path=[HERE])
        self.last: dict[str, Any] = {}

    def start(self, **options: Any) -> None:
        """Sends its options: fields of `bare_engine.Options`, and `memory_part` of the GPU."""
        self.tell(options)

    def found(self, watchdog_s: float = WATCHDOG_S) -> dict[str, Any]:
        """Its next line; it must have found no wrong word."""
        return self._note(self.line(watchdog_s))

    def news(self) -> dict[str, Any]:
        """The first line written after this call; lines before it are skipped."""
        while (line := self.line_within(0)) is not None:
            self._note(line)
        self.found()
        return self.found()

    def finish(self) -> dict[str, Any]:
        """Has it end all loads and exit; its last line."""
        self.close_input()
        while "ended" not in self.found():
            pass
        self.wait_exit()
        return self.last

    def _note(self, line: str) -> dict[str, Any]:
        self.last = json.loads(line)
        assert self.last["wrong_words"] == 0, f"wrong bytes: {self.last}"
        return self.last


@contextlib.contextmanager
def running(log: Path, prefix: tuple[str, ...] = (), **options: Any) -> Iterator[Process]:
    """An engine at work, killed at the block's end."""
    process = Process(log, prefix)
    try:
        process.start(**options)
        process.found(2 * WATCHDOG_S)
        yield process
    finally:
        process.kill()


# === The program ===


def main() -> None:
    """Runs one engine."""
    parent = Parent()
    import bare_engine
    import bare_rank
    import torch

    role = parent.hear()
    if role is None:
        return
    # The part of the GPU's memory for an engine that needs as much as the one before it.
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
        parent.tell(dataclasses.asdict(found) | {"loaded": found.loaded} | known | more)

    tell(engine.found())
    while not select.select([sys.stdin], [], [], 0)[0]:
        engine.play(BATCH_STEPS)
        tell(engine.found())
    tell(engine.rest(), ended=True)
    engine.end()


if __name__ == "__main__":
    main()
