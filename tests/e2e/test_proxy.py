"""The bad networks of test_mesh.py and test_early.py are bad, and do no more than a network can."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

import dam
import proxy
from testkit.waiting import wait_for

SENT = random.Random(1).randbytes(proxy.APART_BYTES + proxy.CHUNK_BYTES)


def _send(listener: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        connection, _ = listener.accept()
        connection.sendall(SENT)
        # Waits until the other side has gone.
        connection.recv(1)


@contextlib.contextmanager
def _sent(fault: proxy.Fault) -> Iterator[tuple[socket.socket, Callable[[], int]]]:
    """The receiving end of a connection with this fault, and the number of its disturbances."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener,))
        sender.start()
        port = listener.getsockname()[1]
        between = proxy.Proxy("127.0.0.1", "127.0.0.1", (port,), fault, seed=1)
        instead = ("127.0.0.1", between.ports[port])
        with between, contextlib.suppress(ConnectionError), socket.create_connection(instead) as near:
            yield near, lambda: between.disturbances[port]
        sender.join()


def _read(near: socket.socket, count: int) -> bytes:
    """The next `count` bytes, or fewer if the connection ended."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while len(received) < count and (chunk := near.recv(count - len(received))):
            received += chunk
    return received


def _received(fault: proxy.Fault) -> tuple[bytes, int]:
    """The bytes that arrived, and the number of disturbances."""
    with _sent(fault) as (near, disturbances):
        return _read(near, len(SENT)), disturbances()


@pytest.mark.parametrize("fault", [proxy.delay, proxy.loss, proxy.slow], ids=lambda fault: fault.__name__)
def test_late_bytes_arrive(fault: proxy.Fault) -> None:
    """The bytes arrive whole, in order, and not at once."""
    received, disturbances = _received(fault)
    assert received == SENT
    assert disturbances > 0


def test_a_cut_connection_ends_within_its_bytes() -> None:
    """The bytes before the cut are right."""
    received, disturbances = _received(proxy.cut)
    assert len(received) < len(SENT) and SENT.startswith(received)
    assert disturbances == 1


def test_a_dam_holds_back_what_follows_until_it_is_opened() -> None:
    """The dam holds back nothing else, and nothing is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener,))
        sender.start()
        port = listener.getsockname()[1]
        between = dam.Dam("127.0.0.1", "127.0.0.1", port, proxy.APART_BYTES)
        with between, socket.create_connection(("127.0.0.1", between.ports[port])) as near:
            # The dam holds back whole pieces.
            received = _read(near, proxy.APART_BYTES - dam.CARRIED_BYTES)
            wait_for(lambda: between.holds, "end of what comes through")
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                received += near.recv(len(SENT))
            assert len(received) <= proxy.APART_BYTES
            near.setblocking(True)
            between.open()
            received += _read(near, len(SENT) - len(received))
        sender.join()
    assert received == SENT
