"""Removes from Pillion in this process all that separates KV but the standing check: facts, samples, digests of adapters."""

from __future__ import annotations

from typing import Any

from pillion import _shim
from pillion.facts import Facts
from pillion.live import Live
from pillion.sample import DIGEST_BYTES

# Facts that separate engines of another configuration or other weights.
HIDDEN = ("config", "rotary", "weights", "model_class")
SAME = bytes(DIGEST_BYTES)


class BlindAdapters:
    """Gives every adapter the same fold."""

    def __init__(self, *_: Any) -> None:
        pass

    def word(self, request: Any) -> bytes:
        """The fold of each adapter."""
        return SAME

    def take_notices(self) -> list[str]:
        """No notices."""
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


def make() -> None:
    """Has every engine of this process state the same values."""
    stated = Facts.stated

    def hidden(self: Facts, form: str) -> dict[str, str]:
        return stated(self, form) | dict.fromkeys(HIDDEN, "hidden")

    instead: dict[tuple[Any, str], Any] = {
        (Facts, "stated"): hidden,
        (Live, "begin"): lambda *_: SAME,
        (Live, "again"): lambda *_: SAME,
        (Live, "differs"): lambda *_: False,
        (_shim, "Adapters"): BlindAdapters,
    }
    for (owner, name), function in instead.items():
        setattr(owner, name, function)
