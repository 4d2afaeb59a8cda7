"""In place of a policy after its internal error: the engine goes on, and finds and keeps nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pillion.numbers import PolicyEvent, PolicyState, StepPart


class NoPolicy:
    """The methods of a policy called by the scheduler role."""

    state: PolicyState = "away"
    updating = False

    def __init__(self, step: int, weights: int, lost: list[StepPart], held: list[int], open_loads: list[int]) -> None:
        """`step`: the scheduled one. `lost`: loads counted on by vLLM, to report as failed in this step's metadata. `held`:
        blocks to give back. `open_loads`: steps with loads perhaps not begun by ranks."""
        self._step, self._weights = step, weights
        self._lost, self._held, self._open_loads = lost, held, open_loads
        self._empty: list[StepPart] = [([], [], False) for _ in lost]
        self._numbers = 1 << 62

    def follow_request(self, *_: Any) -> int:
        """A number never used for a request."""
        self._numbers += 1
        return self._numbers

    def matched(self, *_: Any) -> tuple[int, bool]:
        """Nothing is found."""
        return 0, False

    def end_request(self, number: int) -> tuple[None, list[int]]:
        """Nothing is handed over."""
        return None, []

    def release_held(self) -> list[int]:
        """All of them."""
        held, self._held = self._held, []
        return held

    def begin_step(self, *_: Any) -> tuple[list[int], list[int], bool]:
        """No request is looked at."""
        return [], self.release_held(), False

    def end_step(self, *_: Any) -> tuple[int, list[StepPart], bool, bool, list[int], list[int], int]:
        """A step without loads, but for the lost ones."""
        step, parts = self._step, self._lost
        self._step, self._lost = step + 1, self._empty
        return step, parts, False, False, self._open_loads, [], self._weights

    def _no(self, *_: Any) -> bool:
        """Never."""
        return False

    look_for_verdict = may_announce = is_put_off = is_refused = passes_over = lingers = _no

    def junction(self, number: int) -> int:
        """None."""
        return 0

    def take_hit_tokens(self) -> tuple[int, int, int]:
        """None."""
        return 0, 0, 0

    def take_unkept(self) -> tuple[int, int]:
        """None."""
        return 0, 0

    def take_notices(self) -> tuple[list[str], list[tuple[str, int, int]]]:
        """None."""
        return [], []

    def take_events(self, group: int) -> list[PolicyEvent]:
        """None."""
        return []

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Any other method: it does nothing."""
        return lambda *_: None
