"""The faults of each engine's life and their order, drawn from a seed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

Fault = Literal[
    "sidecar-kill",
    "sidecar-freeze",
    "sidecar-freeze-kill",
    "sidecar-drain",
    "engine-freeze",
    "engine-freeze-kill",
    "engine-kill",
]
Shape = Literal["one-process", "processes", "two-ranks"]
Load = Literal["auto", "async", "sync"]
Copy = Literal["engine", "sidecar"]
FREEZES_SIDECAR: set[Fault] = {"sidecar-freeze", "sidecar-freeze-kill"}
FREEZES_ENGINE: set[Fault] = {"engine-freeze", "engine-freeze-kill"}
ENGINE_KILL: Fault = "engine-kill"
# After these faults another sidecar starts.
ENDS_SIDECAR: set[Fault] = {"sidecar-kill", "sidecar-freeze-kill", "sidecar-drain", "engine-freeze-kill"}
# The faults of a life are drawn from a shuffled list with each frequent fault four times.
FREQUENT: list[Fault] = ["sidecar-kill", "sidecar-freeze"]
RARE: list[Fault] = ["sidecar-freeze-kill", "sidecar-drain", "engine-freeze", "engine-freeze-kill"]
DECK = 4 * FREQUENT + RARE
# With copies by the sidecar into host memory, a frozen copy cannot be awaited for ever or revoked: Pillion promises nothing
# there, so nothing is tested.
DECKS: dict[Copy, list[Fault]] = {
    "engine": DECK,
    "sidecar": [fault for fault in DECK if fault not in FREEZES_SIDECAR],
}
LOADS: tuple[Load, ...] = ("auto", "async", "sync")
# Two ranks cost the most time to start.
SHAPES: tuple[Shape, ...] = ("one-process", "processes", "one-process", "processes", "two-ranks")
ROUNDS_OF_A_LIFE = 10


@dataclasses.dataclass(frozen=True)
class Life:
    """One engine's life: its shape, and the fault of each round. The last fault kills the engine."""

    shape: Shape
    load: Load
    copy: Copy
    faults: list[Fault]

    def __str__(self) -> str:
        return f"{self.shape} load={self.load} copy={self.copy}"

    @property
    def ranks(self) -> int:
        """The number of engine processes with KV."""
        return 2 if self.shape == "two-ranks" else 1


def plan(rounds: int, seed: int) -> list[Life]:
    """Lives of ten rounds at most, `rounds` in all; every load is played with every copy before one comes again."""
    chance = random.Random(seed)
    ways = list(itertools.product(LOADS, DECKS))
    chance.shuffle(ways)
    deals = {copy: _deal(deck, chance) for copy, deck in DECKS.items()}
    lives = []
    for number in range(-(-rounds // ROUNDS_OF_A_LIFE)):
        load, copy = ways[number % len(ways)]
        strikes = min(ROUNDS_OF_A_LIFE, rounds - number * ROUNDS_OF_A_LIFE) - 1
        faults = [*itertools.islice(deals[copy], strikes), ENGINE_KILL]
        lives.append(Life(SHAPES[number % len(SHAPES)], load, copy, faults))
    return lives


def _deal(deck: list[Fault], chance: random.Random) -> Iterator[Fault]:
    """Endless faults; none is missing for longer than two lists."""
    while True:
        yield from chance.sample(deck, len(deck))
