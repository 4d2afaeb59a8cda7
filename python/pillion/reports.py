"""What a rank has told vLLM with the output of each step, until vLLM has taken that output: else it is told again.

vLLM frees the blocks of a request whose load is under way only once it learns that the load has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Reports that are kept. vLLM passes over fewer steps before it takes one again, or it takes none at all.
REPORTS_MAX = 64


@dataclass(slots=True)
class Report:
    """The report of one step: requests whose load has ended or failed as a whole, and blocks of theirs that were not loaded."""

    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)

    def take(self, other: Report) -> None:
        """Says what another one has said, too."""
        self.ended |= other.ended
        self.failed |= other.failed
        self.blocks |= other.blocks


class Reports:
    """The reports of one rank. A step without any costs nothing."""

    def __init__(self) -> None:
        self._step = 0
        # By step, what was told with its output; and what is to be told again. A step that raises may tell nothing.
        self._told: dict[int, Report] = {}
        self._again = Report()

    def begin_step(self, step: int, passed: Sequence[int]) -> None:
        """A step begins; vLLM has passed over those others."""
        self._step = step
        for each in passed:
            if lost := self._told.pop(each, None):
                self._again.take(lost)

    def ended(self, req_ids: set[str] | None) -> set[str] | None:
        """Requests whose load has ended, with those that vLLM has not learned of."""
        if not (req_ids or self._again.ended):
            return None
        told, self._again.ended = (req_ids or set()) | self._again.ended, set()
        self._now.ended |= told
        return told

    def failed(self, req_ids: set[str]) -> set[str]:
        """Requests whose load failed as a whole."""
        if not (req_ids or self._again.failed):
            return req_ids
        told, self._again.failed = req_ids | self._again.failed, set()
        self._now.failed |= told
        return told

    def blocks(self, block_ids: set[int]) -> set[int]:
        """Blocks of such requests that were not loaded."""
        if not (block_ids or self._again.blocks):
            return block_ids
        told, self._again.blocks = block_ids | self._again.blocks, set()
        self._now.blocks |= told
        return told

    @property
    def _now(self) -> Report:
        """What is told with the current step's output."""
        if self._step not in self._told:
            self._told[self._step] = Report()
            if len(self._told) > REPORTS_MAX:
                del self._told[next(iter(self._told))]
        return self._told[self._step]
