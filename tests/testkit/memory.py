"""How fast this machine copies memory: tests and benchmarks compare their times with it."""

from __future__ import annotations

import timeit

import numpy

COPIED_BYTES, COPIES = 64 << 20, 20


def copy_ms(size: int) -> float:
    """Milliseconds of one copy of so many bytes within this host's memory, by one thread: the fastest of some."""
    source = numpy.ones(COPIED_BYTES, numpy.uint8)
    target = numpy.zeros_like(source)
    seconds = min(timeit.repeat(lambda: numpy.copyto(target, source), number=1, repeat=COPIES))
    return seconds * 1e3 * size / COPIED_BYTES
