"""What a rank has told vLLM with the output of each step, until vLLM has taken that output: else it is told again.

vLLM frees the blocks of a request whose load is under way only once it learns that the load has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Steps whose reports are kept. vLLM passes over fewer before it takes one again, or it takes none at all.
STEPS_MAX = 64


@dataclass(slots=True)
class Report:
    """The report of one step: requests whose load has ended or failed as a whole, and blocks that were not loaded."""

    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)

    def take(self, other: Report) -> None:
        """Says what another one has said, too."""
        self.ended |= other.ended
        self.failed |= other.failed
        self.blocks |= other.blocks


class Reports:
    """The reports of one rank."""

    def __init__(self) -> None:
        self._now = Report()
        self._again = Report()
        self._steps: dict[int, Report] = {}

    def begin_step(self, step: int, passed: list[int]) -> None:
        """A step begins; vLLM has passed over those others."""
        self._again = Report()
        for each in passed:
            if lost := self._steps.pop(each, None):
                self._again.take(lost)
        self._now = self._steps[step] = Report()
        if len(self._steps) > STEPS_MAX:
            del self._steps[next(iter(self._steps))]

    def ended(self, req_ids: set[str] | None) -> set[str] | None:
        """Requests whose load has ended, with those that vLLM has not learned of."""
        told = (req_ids or set()) | self._again.ended
        self._now.ended |= told
        return told or None

    def failed(self, req_ids: set[str]) -> set[str]:
        """Requests whose load failed as a whole."""
        told = req_ids | self._again.failed
        self._now.failed |= told
        return told

    def blocks(self, block_ids: set[int]) -> set[int]:
        """Blocks that were not loaded."""
        told = block_ids | self._again.blocks
        self._now.blocks |= told
        return told
