"""A load's plan, as connector-shim/src/core/plan.rs lays it out."""

from __future__ import annotations

import struct

HEADER_BYTES, BLOCK_BYTES = 32, 24
# Within a block's entry.
GENERATION = 16


def outdated(plan: bytes, first_block: int = 0) -> bytes:
    """A plan with wrong generations from a block on: the load of these blocks fails."""
    wrong = bytearray(plan)
    for place in range(HEADER_BYTES + first_block * BLOCK_BYTES + GENERATION, len(wrong), BLOCK_BYTES):
        struct.pack_into("<Q", wrong, place, struct.unpack_from("<Q", wrong, place)[0] + 1)
    return bytes(wrong)
