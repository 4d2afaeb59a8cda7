"""Two blocks of 128 tokens with one hash of vLLM's `xxhash_cbor`, for any parent.

XXH3-128 takes 64 bytes at a time, eight lanes of eight. A lane adds the product of its two halves, each mixed with constants,
to a sum, and its own value to its neighbour's sum. Two such steps cancel out where the changes of the values do, and those of
the products: if the low halves have a ratio of small numbers, one byte of each high half is enough. Tokens below 24 are one
byte of CBOR each, so the lanes are tokens.
"""

from __future__ import annotations

import random

BLOCK_TOKENS = 128
# (lane, low half in the second step, in the third, index of the differing byte of the high halves, its two values in each step)
_CANCELLED = (
    (0, (14, 5, 8, 8), (12, 18, 14, 14), 0, (13, 16), (7, 4)),
    (0, (14, 6, 8, 11), (12, 13, 14, 19), 0, (13, 16), (7, 4)),
    (0, (5, 23, 18, 16), (23, 16, 4, 23), 2, (5, 16), (14, 3)),
    (1, (12, 6, 23, 9), (20, 15, 14, 19), 1, (3, 17), (18, 4)),
    (1, (4, 6, 19, 11), (4, 23, 12, 18), 1, (9, 16), (19, 12)),
)
# Tokens of one byte, and of two, in CBOR.
_SHORT, _LONG = range(3, 24), range(24, 256)
# Two-byte tokens before the second step's lanes and in a step but for one lane; the message's first 20 bytes are its parent.
_BEFORE, _BESIDE, _LANE_TOKENS = 22, 28, 4


def pair(seed: int) -> tuple[list[int], list[int]]:
    """Two blocks of equal hashes; they differ in two tokens."""
    dice = random.Random(seed)
    lane, *lows, place, second, third = dice.choice(_CANCELLED)
    before = dice.choices(_LONG, k=_BEFORE + _LANE_TOKENS * lane)
    between = dice.choices(_LONG, k=_BESIDE)
    behind = dice.choices(_LONG, k=BLOCK_TOKENS - len(before) - len(between) - 16)
    highs = [dice.choices(_SHORT, k=4) for _ in lows]
    blocks = []
    for values in zip(second, third, strict=True):
        for high, value in zip(highs, values, strict=True):
            high[place] = value
        lanes = [[*low, *high] for low, high in zip(lows, highs, strict=True)]
        blocks.append([*before, *lanes[0], *between, *lanes[1], *behind])
    return blocks[0], blocks[1]
