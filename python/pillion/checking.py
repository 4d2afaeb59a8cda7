"""The standing check: the last blocks of some hits are computed all the same, and the sidecar compares them with the kept ones.

Everything else says why what is kept should be what this engine would compute. This asks whether it is: of the first hit of
each namespace and adapter after every start and reset, and of one in some hundreds later. At most one check goes on at a
time; one that brings no verdict, because a block was evicted or a request aborted, is tried again after 1, 2, 4, ... hits.

- A short check computes the last blocks of a hit, upon the loaded ones. It sees another model, and no error in earlier blocks.
- A long check computes the whole hit, and so sees an error in any block. Its tokens are a small share of all loaded ones.
- A difference puts the engine in doubt: its next hits have long checks, or count as misses.
"""

from __future__ import annotations

from collections.abc import Mapping

# Tokens that a check has the engine compute although they were found, at most. A block that has more is checked whole.
TOKENS = 64
# Checks of an engine in doubt: more than the sidecar needs, since some are of one chain or bring no verdict.
WITNESSES = 4
# Steps after which a check without a verdict is given up: its save may have been dropped anywhere on its way.
STEPS_MAX = 1000

# Hits are counted by subject, a namespace and the fold of an adapter: each has a first hit of its own.
Subject = tuple[int, bytes | None]


class Check:
    """Chooses hits to check, and follows the one that is being checked."""

    def __init__(self, block_tokens: int, every: int, per_mille: int = 0) -> None:
        """`every`: hits from one verdict to the next check; 0: nothing is checked. `per_mille`: tokens
        of long checks for 1,000 loaded ones."""
        self._block_tokens, self._per_mille = block_tokens, per_mille
        # Thousandths of tokens, to be spent by long checks.
        self._room = 0
        self._blocks = max(1, TOKENS // block_tokens)
        self._every = every
        # Of each subject: hits to let pass, and how many it will be after a check without a verdict.
        self._waits: dict[Subject, tuple[int, int]] = {}
        # Blocks that were compared since the start of the session, and differing ones.
        self._compared = self._differing = 0
        # Further checks of an engine in doubt.
        self._sought = 0
        self._subject: Subject | None = None
        # Whose hit it is and its blocks, until they are saved.
        self._span: tuple[object, int, int] | None = None
        self._ends_at = 0

    @property
    def goes_on(self) -> bool:
        """Whether a verdict is waited for."""
        return self._subject is not None

    def loaded(self, tokens: int) -> None:
        """So many tokens were loaded."""
        self._room += tokens * self._per_mille

    def trim(self, owner: object, first: int, hits: int, subject: Subject, step: int, whole: bool = False) -> int:
        """How many of the hit's blocks to load, `first` being its first; `whole`: it may be computed as a whole. `owner` may
        have asked before, in vain."""
        doubtful = whole and self._sought > 0
        if self.span(owner) is None and not self._is_due(subject):
            return 0 if doubtful else hits
        self._subject, self._ends_at = subject, step + STEPS_MAX
        kept, cost = max(0, hits - self._blocks), hits * self._block_tokens * 1000
        if doubtful:
            kept = 0
        elif whole and kept and self._room >= cost:
            kept, self._room = 0, self._room - cost
        self._span = (owner, first + kept, first + hits)
        return kept

    def _is_due(self, subject: Subject) -> bool:
        if not self._every:
            return False
        passing, wait = self._waits.get(subject, (0, 1))
        if (passing and not self._sought) or self.goes_on:
            self._waits[subject] = (max(0, passing - 1), wait)
            return False
        self._sought = max(0, self._sought - 1)
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

    def learn(self, stats: Mapping[str, int], step: int) -> bool:
        """Looks for the verdict, and returns whether blocks differ."""
        compared, differing = stats["blocks_checked"], stats["blocks_differing"]
        differs = differing > self._differing
        if compared > self._compared:
            if differs:
                self._sought = WITNESSES
            self._compared, self._differing = compared, differing
            if self._subject is not None and self._span is None:
                self._waits[self._subject] = (self._every, 1)
                self._subject = None
        if step >= self._ends_at:
            self.give_up()
        return differs

    def forget(self) -> None:
        """Drops every verdict: the weights may have changed, so each subject's next hit is checked."""
        self._waits.clear()
        self.give_up()
