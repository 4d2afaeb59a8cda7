"""Unused TCP ports."""

from __future__ import annotations

import contextlib
import socket


def free_port(address: str = "127.0.0.1") -> int:
    """An unused port with an unused next one: a sidecar of a mesh listens on both."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError, OverflowError):
            one.bind((address, 0))
            port = int(one.getsockname()[1])
            other.bind((address, port + 1))
            return port
