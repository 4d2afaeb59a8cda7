"""Blocks that do not hold the KV of their tokens: not loaded, disowned, or computed upon such ones.

vLLM may go on using them, other requests may find them in its own cache; nothing of them may be kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from pillion.tracked import Tracked

# Encoders' outputs that are remembered as new ones: beyond it, all count as old.
ENCODED_MAX = 1 << 16
# Blocks that a step writes from some token on, those that it loads, and those that it copies, each from one to another.
NewBlocks = tuple[list[int], list[int], list[tuple[int, int]]]


class Broken:
    """Marks of these blocks, which follow what vLLM computes."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._marks = bytearray(blocks)
        self._block_tokens = block_tokens
        # Whether any block ever was.
        self.any = False
        # Requests that may hold one.
        self.suspects: set[Tracked] = set()
        # vLLM's identifiers of what encoders made since all blocks were disowned; None: no blocks ever were. vLLM may still use
        # older outputs, which encoders made with other weights.
        self._encoded: set[str] | None = None

    def whole(self, tracked: Tracked) -> int:
        """Blocks of the request before its first broken one."""
        return self._first(tracked) if tracked in self.suspects else len(tracked.blocks)

    def fail(self, block_ids: set[int], requests: Iterable[Tracked]) -> None:
        """Blocks were not loaded; of a request that holds one, what follows may have been computed upon it by now."""
        self.any = True
        for block in block_ids:
            self._marks[block] = 1
        for tracked in requests:
            tracked.saved, tracked.sound = 0, -1
            tracked.refused |= not block_ids.isdisjoint(tracked.loaded)
            first = self._first(tracked)
            if first < len(tracked.blocks):
                self.suspects.add(tracked)
            for block in tracked.blocks[first:]:
                self._marks[block] = 1

    def disown(self, requests: Iterable[Tracked]) -> None:
        """Every block is broken: where vLLM's own cache could not be reset, requests still find blocks of before in it."""
        self.any, self._encoded = True, set()
        self._marks = bytearray(b"\1") * len(self._marks)
        # vLLM's null block, which stands for blocks before a window, and holds nothing.
        self._marks[0] = 0
        for tracked in requests:
            tracked.hit, tracked.saved, tracked.sound = None, 0, -1
            self.suspects.add(tracked)

    def encode(self, identifiers: Iterable[str]) -> None:
        """A step has encoders make these outputs."""
        if self._encoded is not None:
            self._encoded.update(identifiers)
            if len(self._encoded) > ENCODED_MAX:
                self._encoded.clear()

    def follow(self, begun: list[Tracked], new: NewBlocks, scheduled: dict[str, int]) -> None:
        """What a step writes anew is whole again; what it computes upon a broken block is broken."""
        if not self.any:
            return
        # What they found in vLLM's own cache may be broken.
        self.suspects.update(begun)
        marks, size = self._marks, self._block_tokens
        written, loaded, copies = new
        partly = {self._computed_partly(tracked) for tracked in begun}
        for block in written:
            if block not in partly:
                marks[block] = 0
        for block in loaded:
            marks[block] = 0
        for copied, written_to in copies:
            marks[written_to] = marks[copied]
        for tracked in list(self.suspects):
            if not tracked.live:
                self.suspects.discard(tracked)
            tokens = scheduled.get(tracked.request.request_id)
            if tokens is None:
                continue
            tracked.slide(size)
            start = tracked.request.num_computed_tokens
            end = start + tokens
            blocks, first = tracked.blocks, self._first(tracked)
            broken_from = start
            if first * size >= start or start <= tracked.sound:
                # It reads nothing that is broken; a block that it does not fill now stays marked until it does.
                broken_from = min(self._old_outputs(tracked, start, end), default=end)
                for block in blocks[first : broken_from // size]:
                    marks[block] = 0
                tracked.sound = broken_from
            if broken_from < end:
                for block in blocks[broken_from // size : -(-end // size)]:
                    marks[block] = 1
            elif self._first(tracked) == len(blocks) and not self._old_outputs(tracked, end, tracked.request.num_tokens):
                self.suspects.discard(tracked)

    def _old_outputs(self, tracked: Tracked, start: int, end: int) -> list[int]:
        """Tokens from `start` to `end` at which begins what an encoder made with weights of before."""
        if self._encoded is None:
            return []
        old = [media.mm_position for media in tracked.request.mm_features if media.identifier not in self._encoded]
        return [max(start, place.offset) for place in old if place.offset < end and place.offset + place.length > start]

    def _computed_partly(self, tracked: Tracked) -> int | None:
        """The block of which an earlier step computed the beginning, as that of a session that goes on: it keeps its mark."""
        place, tokens = divmod(tracked.request.num_computed_tokens, self._block_tokens)
        return tracked.blocks[place] if tokens and place < len(tracked.blocks) else None

    def _first(self, tracked: Tracked) -> int:
        marks = self._marks
        return next((place for place, block in enumerate(tracked.blocks) if marks[block]), len(tracked.blocks))
