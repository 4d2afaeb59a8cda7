"""The bad network of test_mesh.py is bad, and does no more than a network can."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import pytest

import proxy

SENT = random.Random(1).randbytes(proxy.APART_BYTES + proxy.CHUNK_BYTES)


def _send(listener: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        connection, _ = listener.accept()
        connection.sendall(SENT)
        # Until the other side has gone.
        connection.recv(1)


def _received(fault: proxy.Fault) -> tuple[bytes, int]:
    """What arrives, and how often it was disturbed."""
    received = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener,))
        sender.start()
        port = listener.getsockname()[1]
        between = proxy.Proxy("127.0.0.1", "127.0.0.1", (port,), fault, seed=1)
        instead = ("127.0.0.1", between.ports[port])
        with between, contextlib.suppress(ConnectionError), socket.create_connection(instead) as near:
            while len(received) < len(SENT) and (chunk := near.recv(1 << 20)):
                received += chunk
        sender.join()
    return received, between.disturbances[port]


@pytest.mark.parametrize("fault", [proxy.delay, proxy.loss, proxy.slow], ids=lambda fault: fault.__name__)
def test_late_bytes_arrive(fault: proxy.Fault) -> None:
    """All of them, in order, and not at once."""
    received, disturbances = _received(fault)
    assert received == SENT
    assert disturbances > 0


def test_a_cut_connection_ends_within_its_bytes() -> None:
    """What came before is right."""
    received, disturbances = _received(proxy.cut)
    assert len(received) < len(SENT) and SENT.startswith(received)
    assert disturbances == 1
