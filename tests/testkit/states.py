"""Models with states: prompts of several blocks, and their answers."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testkit import engine, pool_file, prompts, sidecar

# Less than a block, without any hit, and some blocks.
PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (300, 700, 1300)]
OUTPUT_TOKENS = 8


def ask(running: engine.Engine, asked: list[list[int]] = PROMPTS) -> list[dict[str, Any]]:
    """Each prompt alone: batches of one shape give comparable bits."""
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in asked]


def all_of(answers: list[dict[str, Any]], name: str) -> list[Any]:
    """One field of each answer."""
    return [answer[name] for answer in answers]


def namespaces(keeper: sidecar.Sidecar, kind: str = "state") -> list[str]:
    """The namespaces of the groups of a kind."""
    found = keeper.namespaces()
    return [str(each["namespace"]) for each in found if each["facts"]["group_kind"] == kind]


@contextmanager
def exchanged(keeper: sidecar.Sidecar, layer_bytes: int, kind: str = "state") -> Iterator[int]:
    """While the block runs, states, or blocks of another kind, have the first layers of one another. Yields their number."""
    names = {bytes.fromhex(name) for name in namespaces(keeper, kind)}
    with pool_file.mapped(Path(keeper.pool)) as pool:
        places = [slot.offset for slot in pool_file.committed(pool) if slot.namespace in names]
        _exchange(pool, places, layer_bytes)
        try:
            yield len(places)
        finally:
            _exchange(pool, places, layer_bytes)


def _exchange(pool: mmap.mmap, places: list[int], count: int) -> None:
    held = [pool[place : place + count] for place in places]
    for place, content in zip(places, reversed(held), strict=True):
        pool[place : place + count] = content
