"""The standing check: the last blocks of some hits are computed all the same, and the sidecar compares them with the kept ones.

Everything else says why what is kept should be what this engine would compute. This asks whether it is: of the first hit of
each namespace and adapter after every start and reset, and of one in some hundreds later. At most one check goes on at a
time; one that brings no verdict, because a block was evicted or a request aborted, is tried again after 1, 2, 4, ... hits.
"""

from __future__ import annotations

from collections.abc import Mapping

# Tokens that a check has the engine compute although they were found, at most. A block that has more is checked whole.
TOKENS = 64
# Steps after which a check without a verdict is given up: its save may have been dropped anywhere on its way.
STEPS_MAX = 1000

# Hits are counted by subject, a namespace and the fold of an adapter: each has a first hit of its own.
Subject = tuple[int, bytes | None]


class Check:
    """Chooses hits to check, and follows the one that is being checked."""

    def __init__(self, block_tokens: int, every: int) -> None:
        """`every`: hits from one verdict to the next check; 0: nothing is checked."""
        self._blocks = max(1, TOKENS // block_tokens)
        self._every = every
        # Of each subject: hits to let pass, and how many it will be after a check without a verdict.
        self._waits: dict[Subject, tuple[int, int]] = {}
        # Blocks that were compared since the start of the session.
        self._compared = 0
        self._subject: Subject | None = None
        # Whose hit it is and its blocks, until they are saved.
        self._span: tuple[object, int, int] | None = None
        self._ends_at = 0

    @property
    def goes_on(self) -> bool:
        """Whether a verdict is waited for."""
        return self._subject is not None

    def trim(self, owner: object, first: int, hits: int, subject: Subject, step: int) -> int:
        """How many of the hit's blocks to load, `first` being its first. `owner` may have asked before, in vain."""
        if self.span(owner) is None and not self._is_due(subject):
            return hits
        self._subject, self._ends_at = subject, step + STEPS_MAX
        kept = max(0, hits - self._blocks)
        self._span = (owner, first + kept, first + hits)
        return kept

    def _is_due(self, subject: Subject) -> bool:
        if not self._every:
            return False
        passing, wait = self._waits.get(subject, (0, 1))
        if passing or self.goes_on:
            self._waits[subject] = (max(0, passing - 1), wait)
            return False
        self._waits[subject] = (wait, min(2 * wait, self._every))
        return True

    def span(self, owner: object) -> tuple[int, int] | None:
        """The blocks of this owner that are to be saved as checked: the first, and the end."""
        return self._span[1:] if self._span is not None and self._span[0] is owner else None

    def saved(self) -> None:
        """The blocks of the span were posted with a checked save."""
        self._span = None

    def give_up(self, owner: object | None = None) -> None:
        """Blocks will not be compared: those that one owner was to save, or any."""
        if owner is None or self.span(owner) is not None:
            self._span = self._subject = None

    def learn(self, stats: Mapping[str, int], step: int) -> None:
        """Looks for the verdict."""
        compared = stats["blocks_checked"]
        if compared > self._compared:
            self._compared = compared
            if self._subject is not None and self._span is None:
                self._waits[self._subject] = (self._every, 1)
                self._subject = None
        if step >= self._ends_at:
            self.give_up()

    def forget(self) -> None:
        """Drops every verdict: the weights may have changed, so each subject's next hit is checked."""
        self._waits.clear()
        self.give_up()
