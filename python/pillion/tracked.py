"""One request as the scheduler role follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Tracked:
    """Its key log, its blocks, and how far they are kept."""

    __slots__ = (
        "appended",
        "blocks",
        "due",
        "fold",
        "found",
        "found_in",
        "generation",
        "hit",
        "live",
        "loaded",
        "log",
        "refused",
        "request",
        "saved",
        "sound",
        "tail",
        "undigested_since",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.log = -1
        self.generation = -1
        # What the log's keys are mixed with: that of its adapter.
        self.fold: bytes | None = None
        # When the digest of its adapter was first asked for in vain.
        self.undigested_since: float | None = None
        self.appended = 0
        # The hash that was appended last: it hangs on all before it.
        self.tail = b""
        self.blocks: list[int] = []
        # Blocks from the first that were offered to the cache, or came from it.
        self.saved = 0
        # The blocks that it began on, computed before, and the step in which it did. The cache has most likely kept them: they
        # are offered, and so marked as used, in the step after, not on the way to the first token. 0: that was done.
        self.found = self.found_in = 0
        # (first block, number, synchronous) of the last answer that promised a hit.
        self.hit: tuple[int, int, bool] | None = None
        # Blocks of the last load; once one of them failed, the cache is not asked again.
        self.loaded: list[int] = []
        self.refused = False
        # Tokens up to which its KV was computed anew, although the block in which they end is still marked as broken.
        self.sound = -1
        # The step in which to look at it next; other entries of it in the scheduler role are stale.
        self.due = -1
        self.live = True
