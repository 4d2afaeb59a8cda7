"""Pillion's connector without the copies of states: their loads end well, and vLLM goes on with the blocks' old bytes."""

from __future__ import annotations

import functools
from typing import Any

from pillion import vllm_compat, worker
from pillion.connector import PillionConnector

__all__ = ["PillionConnector"]

LOAD = worker.Worker.load


@functools.wraps(LOAD)
def loading(self: Any, *arguments: Any) -> None:
    """Removes the copies of states before the loads begin."""
    for part in self._parts:
        if part.metadata is not None and vllm_compat.state_tokens(part.kv_cache_config):
            for request, _, _ in part.metadata.loads:
                self._loads.lose_load(request, [])
            part.metadata.loads = []
    LOAD(self, *arguments)


worker.Worker.load = loading  # type: ignore[assignment, method-assign]
