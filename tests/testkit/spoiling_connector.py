"""Pillion's connector with failing loads of one cache group in one rank: their plans have wrong generations.

vLLM imports it in every process of the engine. PILLION_TEST_SPOILED is a folder: its file `next` names a rank and a group, and
`done` gets a line for each request with a failed load.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from pillion import vllm_compat, worker
from pillion.connector import PillionConnector
from testkit import plan

__all__ = ["PillionConnector"]

SPOILED = Path(os.environ["PILLION_TEST_SPOILED"])
LOAD = worker.Worker.load


@functools.wraps(LOAD)
def loading(self: Any, *arguments: Any) -> None:
    """Spoils the plans before the loads begin."""
    for part in self._parts:
        metadata = part.metadata
        here = f"{vllm_compat.find_rank(part._vllm_config)} {part.group.number}"
        if metadata is not None and metadata.loads and (SPOILED / "next").read_text() == here:
            with (SPOILED / "done").open("a") as done:
                done.writelines(f"{request}\n" for request in dict.fromkeys(request for request, _, _ in metadata.loads))
            metadata.loads = [(request, plan.outdated(planned), sync) for request, planned, sync in metadata.loads]
    LOAD(self, *arguments)


worker.Worker.load = loading  # type: ignore[assignment, method-assign]
