"""Stops single threads of another process by ptrace(2), while the process's other threads go on.

All calls of one thread's stop must come from one thread of this process: that is the tracer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from testkit.threads import named

# Constants of linux/ptrace.h, and of bits/waitflags.h: children of any kind, a traced thread too.
SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def thread_of(pid: int, name: str) -> int:
    """The thread of this name."""
    (found,) = named(pid, f"{name}\n")
    return found


@contextlib.contextmanager
def stopped(thread: int) -> Iterator[None]:
    """Stops the thread while the block runs."""
    stop(thread)
    try:
        yield
    finally:
        let(thread)


def stop(thread: int) -> None:
    """Stops the thread; returns once it stands still."""
    _ptrace(SEIZE, thread)
    _ptrace(INTERRUPT, thread)
    os.waitpid(thread, WALL)


def let(thread: int) -> None:
    """Lets the thread go on."""
    try:
        _ptrace(DETACH, thread)
    except ProcessLookupError:
        # The thread was killed: its process ends for its own parent once the tracer has waited for the thread.
        os.waitpid(thread, WALL)


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}, {thread}): {os.strerror(number)}: run as root, or allow ptrace")
