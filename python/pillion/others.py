"""Another connector beside this one, under vLLM's MultiConnector, and the blocks of its loads.

A block of another connector's load has unknown content. It is not saved or handed over, and no block computed upon it is. The
other connector also brings the prompts of other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pillion import handover

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class Others:
    """The blocks of requests without a load of this connector."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: tokens of a block, by cache group."""
        self._sizes = sizes
        # By request: tokens in vLLM's own cache at its last question, until vLLM has allocated blocks.
        self._had: dict[str, int] = {}

    def asked(self, request: Request, computed_tokens: int) -> None:
        """Notes vLLM's question for tokens beyond `computed_tokens`."""
        self._had[request.request_id] = computed_tokens

    def brings(self, request: Request) -> bool:
        """True if the prompt comes from another engine, by another connector."""
        return handover.awaits(request)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> list[int]:
        """Returns the blocks of all groups for a possible load of another connector: all blocks since vLLM's question, if this
        connector loads none."""
        had = self._had.pop(request.request_id, None)
        if had is None or external_tokens:
            return []
        groups = zip(blocks.get_block_ids(), self._sizes, strict=True)
        # Null blocks stand for those before a window.
        return [block for ids, size in groups for block in ids[had // size :] if block]

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._had.pop(request.request_id, None)
