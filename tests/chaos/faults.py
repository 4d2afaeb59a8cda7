"""What strikes, and in which order: drawn from a seed."""

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
# Another sidecar follows.
ENDS_SIDECAR: set[Fault] = {"sidecar-kill", "sidecar-freeze-kill", "sidecar-drain", "engine-freeze-kill"}
# Faults of a life are dealt from a shuffled deck that holds each frequent one four times.
FREQUENT: list[Fault] = ["sidecar-kill", "sidecar-freeze"]
RARE: list[Fault] = ["sidecar-freeze-kill", "sidecar-drain", "engine-freeze", "engine-freeze-kill"]
DECK = 4 * FREQUENT + RARE
# Where the sidecar writes into the engine, a copy that is frozen half-way can be neither awaited for ever nor revoked
# (host memory): there is no promise to test.
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
    """One engine's life: how it runs, and what strikes in its rounds. The last strike is the engine's own death."""

    shape: Shape
    load: Load
    copy: Copy
    faults: list[Fault]

    def __str__(self) -> str:
        return f"{self.shape} load={self.load} copy={self.copy}"

    @property
    def ranks(self) -> int:
        """Engine processes that hold KV."""
        return 2 if self.shape == "two-ranks" else 1


def plan(rounds: int, seed: int) -> list[Life]:
    """Lives of ten rounds at the most, so many rounds in all; every load with every copy before one comes again."""
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
    """Faults without end; none is missing for longer than two decks."""
    while True:
        yield from chance.sample(deck, len(deck))
