"""Reads a sidecar's pool file as shm-protocol/src/pool.rs lays it out, and damages KV in it on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

SEGMENT_ALIGN = 2 << 20
SEGMENT_HEADER_BYTES = 64
SLOT_HEADER_BYTES = 128
SLOT_ALIGN = 512
DATA_ALIGN = 4096
COMMITTED = 2
# A bit of the exponent in the upper byte of a bfloat16 or a float32: the value is 256 times too large or too small, and
# finite, so that the answer is wrong because a key is, not because of infinities.
EXPONENT_BIT = 0x04


@dataclasses.dataclass(frozen=True)
class Slot:
    """A committed slot."""

    namespace: bytes
    hash: bytes
    offset: int
    length: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _u64(pool: mmap.mmap, offset: int) -> int:
    return int(struct.unpack_from("<Q", pool, offset)[0])


def _segment_slots(pool: mmap.mmap, base: int) -> Iterator[Slot]:
    if pool[base : base + 8] != b"PILLSEGM":
        return
    block_bytes, count = _u64(pool, base + 8), _u64(pool, base + 16)
    data = base + _round_up(SEGMENT_HEADER_BYTES + count * SLOT_HEADER_BYTES, DATA_ALIGN)
    stride = _round_up(block_bytes, SLOT_ALIGN)
    for index in range(count):
        header = base + SEGMENT_HEADER_BYTES + index * SLOT_HEADER_BYTES
        if _u64(pool, header) == COMMITTED:
            namespace, block_hash = pool[header + 16 : header + 32], pool[header + 32 : header + 64]
            yield Slot(namespace, block_hash, data + index * stride, _u64(pool, header + 72))


def committed(pool: mmap.mmap) -> list[Slot]:
    """Every committed slot of the pool."""
    assert pool[0:8] == b"PILLPOOL", "not a pool"
    segment_bytes, segments = _u64(pool, 16), _u64(pool, 24)
    bases = range(SEGMENT_ALIGN, SEGMENT_ALIGN + segments * segment_bytes, segment_bytes)
    return [slot for base in bases for slot in _segment_slots(pool, base)]


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The pool file, shared and writable."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        yield pool


@contextlib.contextmanager
def damaged(path: Path, rank: int = 0, ranks: int = 1, value_bytes: int = 2) -> Iterator[int]:
    """While the block runs, one K value of every block's shard of this rank has a wrong exponent.

    A slot holds the shards of a block side by side, a shard begins with its first layer's page, and a
    page with its first head's keys (vLLM's CPU attention puts a head's keys before its values), so the
    first value of a shard is one of K. Yields the number of damaged blocks.
    """
    with mapped(path) as pool:
        slots = committed(pool)
        # The upper byte of a little-endian value.
        places = [slot.offset + rank * (slot.length // ranks) + value_bytes - 1 for slot in slots]
        for place in places:
            pool[place] ^= EXPONENT_BIT
        try:
            yield len(slots)
        finally:
            for place in places:
                pool[place] ^= EXPONENT_BIT
