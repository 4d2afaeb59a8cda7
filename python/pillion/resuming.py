"""Which blocks of a group with a window are saved: those that are read where a later request may go on, and no others.

That is at the end of a prompt and anywhere in its answer, where prompts were seen to part, and every some tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Resuming(NamedTuple):
    """Of one group, in its blocks."""

    # Blocks that are read before a point; 0: all of them, and so all are saved.
    reads: int = 0
    # From one point to the next that every prompt has; 0: there are none.
    every: int = 0
    # From one point to the next that there may be.
    boundary: int = 1

    def needed(self, first: int, end: int, prompt: int, own: tuple[int, ...] = ()) -> Iterator[tuple[int, int]]:
        """The parts of the blocks `first..end` that are saved, of a request whose prompt has so many whole blocks before its
        last token, and with these points of its own."""
        if not self.reads:
            yield first, end
            return
        prompt -= prompt % self.boundary
        points = {*own, *(range(self.every, end + self.reads, self.every) if self.every else ())}
        # Behind the prompt's last point each block is read at a point: an answer may end there.
        spans = [(point - self.reads, point) for point in sorted(points) if point < prompt] + [(prompt - self.reads, end)]
        for begin, stop in spans:
            begin, stop = max(begin, first), min(stop, end)
            if begin < stop:
                yield begin, stop
                first = stop
