"""Blocks of requests that are over, held until they are saved for another engine.

vLLM gives a block without a hash to the very next request: that of a prompt's tail, or each one where its prefix cache is off.
While the sidecar still reads it, that would give its save up.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pillion import vllm_compat

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from pillion._shim import SchedulerSession

# A save takes milliseconds. A block whose save has no end by then is vLLM's again: its save is given up if it is overwritten.
HELD_S = 1.0


class Held:
    """The blocks that one scheduler role holds of vLLM's block pool: none before the pool is bound."""

    def __init__(self, session: SchedulerSession) -> None:
        self._session = session
        self._pool: BlockPool | None = None
        # When each block is vLLM's again at the latest, the first one first.
        self._until: dict[int, float] = {}

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are told by number."""
        self._pool = pool

    def forget_cached(self) -> None:
        """Has no request find a block of before in vLLM's own prefix cache."""
        if self._pool is not None:
            vllm_compat.forget_cached(self._pool)

    def hold(self, blocks: list[int]) -> None:
        """A request that had these blocks is over. A preempted one has them no more: they may be vLLM's, or held, already."""
        if self._pool is None or not self._session.saving:
            return
        until = time.monotonic() + HELD_S
        for block in self._session.unsaved(blocks):
            if block not in self._until and vllm_compat.hold(self._pool, block):
                self._until[block] = until

    def release_saved(self) -> None:
        """Gives back what is saved, or cannot be."""
        if self._until:
            now, unsaved = time.monotonic(), set(self._session.unsaved(list(self._until)))
            self._release([block for block, until in self._until.items() if block not in unsaved or until < now])

    def release(self) -> None:
        """Gives back all: vLLM resets no pool with a block that is in use."""
        self._release(list(self._until))

    def _release(self, blocks: list[int]) -> None:
        if self._pool is not None and blocks:
            vllm_compat.free(self._pool, blocks)
        for block in blocks:
            del self._until[block]
