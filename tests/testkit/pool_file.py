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
FILLING, COMMITTED = 1, 2
# Words of a slot's header (shm-protocol/PROTOCOL.md, section 7), and the offsets of their lowest bytes.
WORDS = {"state": 0, "generation": 8}
# A bit of the exponent in the upper byte of a bfloat16 or a float32: the value becomes 256 times larger or smaller, and stays
# finite, so the answer is wrong because of a key and not of infinities.
EXPONENT_BIT = 0x04


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a slot's header, and its contents."""

    header: int
    state: int
    namespace: bytes
    hash: bytes
    offset: int
    # Bytes of the slot's block, and of the longest block that fits.
    length: int
    length_max: int


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
        namespace, block_hash = pool[header + 16 : header + 32], pool[header + 32 : header + 64]
        length = _u64(pool, header + 72)
        yield Slot(header, _u64(pool, header), namespace, block_hash, data + index * stride, length, block_bytes)


def slots(pool: mmap.mmap) -> list[Slot]:
    """Every slot of every segment in use."""
    assert pool[0:8] == b"PILLPOOL", "not a pool"
    segment_bytes, segments = _u64(pool, 16), _u64(pool, 24)
    bases = range(SEGMENT_ALIGN, SEGMENT_ALIGN + segments * segment_bytes, segment_bytes)
    return [slot for base in bases for slot in _segment_slots(pool, base)]


def committed(pool: mmap.mmap) -> list[Slot]:
    """Every committed slot of the pool."""
    return [slot for slot in slots(pool) if slot.state == COMMITTED]


def filling(path: Path) -> list[bytes]:
    """The present bytes of the slots that are being filled."""
    with mapped(path) as pool:
        return [pool[slot.offset : slot.offset + slot.length_max] for slot in slots(pool) if slot.state == FILLING]


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The pool file, shared and writable."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        yield pool


@contextlib.contextmanager
def _flipped(pool: mmap.mmap, places: list[int], bit: int) -> Iterator[int]:
    """Flips a bit of every byte at these places while the block runs. Yields the number of places."""
    for place in places:
        pool[place] ^= bit
    try:
        yield len(places)
    finally:
        for place in places:
            pool[place] ^= bit


@contextlib.contextmanager
def damaged(path: Path, rank: int = 0, ranks: int = 1, value_bytes: int = 2, values: int = 1) -> Iterator[int]:
    """While the block runs, the first K `values` of every block's shard of this rank have a wrong exponent.

    A slot holds the shards of a block side by side, a shard begins with its first layer's page, and a
    page with its first head's keys (vLLM's CPU attention puts a head's keys before its values), so the
    first value of a shard is one of K. Yields the number of damaged blocks.
    """
    with mapped(path) as pool:
        # The upper byte of a little-endian value.
        shards = [slot.offset + rank * (slot.length // ranks) for slot in committed(pool)]
        places = [shard + value_bytes * (value + 1) - 1 for shard in shards for value in range(values)]
        with _flipped(pool, places, EXPONENT_BIT):
            yield len(shards)


@contextlib.contextmanager
def zeroed(path: Path, begin: float, end: float = 1.0, namespace: str = "") -> Iterator[int]:
    """While the block runs, a part of every block is zeros, from `begin` to `end` of it: that of some layers. With a
    namespace only its blocks change. Yields the number of blocks."""
    with mapped(path) as pool:
        blocks = [slot for slot in committed(pool) if namespace in ("", slot.namespace.hex())]
        parts = [slice(slot.offset + int(slot.length * begin), slot.offset + int(slot.length * end)) for slot in blocks]
        before = [pool[part] for part in parts]
        for part in parts:
            pool[part] = bytes(part.stop - part.start)
        try:
            yield len(parts)
        finally:
            for part, content in zip(parts, before, strict=True):
                pool[part] = content


@contextlib.contextmanager
def broken(path: Path, word: str) -> Iterator[int]:
    """Changes a header word of every committed slot while the block runs. Yields the number of slots.

    A changed state is a free one, a changed generation another one.
    """
    with mapped(path) as pool, _flipped(pool, [slot.header + WORDS[word] for slot in committed(pool)], COMMITTED) as blocks:
        yield blocks
