"""Slots of a sidecar's pool file in every state: breaks their headers on purpose, and reads the ones being filled."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Iterator
from pathlib import Path

import pool

# Words of a slot's header (shm-protocol/PROTOCOL.md, section 7), and what makes each of them wrong for a reader.
WORDS = {"state": 0, "generation": 8}
FILLING = 1


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a slot's header and data lie."""

    header: int
    data: int
    state: int
    length: int


def places(file: mmap.mmap) -> Iterator[Place]:
    """Every slot of every segment in use."""
    segment_bytes, segments = pool._u64(file, 16), pool._u64(file, 24)
    for base in range(pool.SEGMENT_ALIGN, pool.SEGMENT_ALIGN + segments * segment_bytes, segment_bytes):
        if file[base : base + 8] != b"PILLSEGM":
            continue
        block_bytes, count = pool._u64(file, base + 8), pool._u64(file, base + 16)
        first = base + pool._round_up(pool.SEGMENT_HEADER_BYTES + count * pool.SLOT_HEADER_BYTES, pool.DATA_ALIGN)
        stride = pool._round_up(block_bytes, pool.SLOT_ALIGN)
        for index in range(count):
            header = base + pool.SEGMENT_HEADER_BYTES + index * pool.SLOT_HEADER_BYTES
            yield Place(header, first + index * stride, pool._u64(file, header), block_bytes)


@contextlib.contextmanager
def broken(path: Path, word: str) -> Iterator[int]:
    """While the block runs, a header word of every committed slot is not what it was. Yields their number."""
    with pool.mapped(path) as file:
        committed = [place for place in places(file) if place.state == pool.COMMITTED]
        # The lowest byte: a free state instead of a committed one, or another generation.
        for place in committed:
            file[place.header + WORDS[word]] ^= pool.COMMITTED
        try:
            yield len(committed)
        finally:
            for place in committed:
                file[place.header + WORDS[word]] ^= pool.COMMITTED


def filling(path: Path) -> list[bytes]:
    """What the slots that are being filled hold now."""
    with pool.mapped(path) as file:
        return [file[place.data : place.data + place.length] for place in places(file) if place.state == FILLING]
