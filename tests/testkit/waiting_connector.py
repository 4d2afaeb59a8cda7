"""Pillion's connector, whose steps wait for their loads where `pillion.load` is `sync`, as on a GPU whose sidecar copies.

What is done about such a load that fails is so tested without a GPU. With a step in flight nothing is changed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pillion import vllm_compat
from pillion.connector import PillionConnector
from pillion.pacing import Pacing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pillion.config import Config

__all__ = ["PillionConnector"]

INIT, SYNCHRONOUS = Pacing.__init__, Pacing.synchronous
WAITING: set[Pacing] = set()


@functools.wraps(INIT)
def init(self: Pacing, config: Config, vllm_config: VllmConfig, block_bytes: int) -> None:
    """Remembers who waits."""
    INIT(self, config, vllm_config, block_bytes)
    if config.load == "sync" and vllm_compat.steps_in_flight(vllm_config) == 1:
        WAITING.add(self)


@functools.wraps(SYNCHRONOUS)
def synchronous(self: Pacing, blocks: int, alone: bool) -> bool | None:
    """Always, of those."""
    return self in WAITING or SYNCHRONOUS(self, blocks, alone)


Pacing.__init__ = init  # type: ignore[method-assign]
Pacing.synchronous = synchronous  # type: ignore[method-assign]
