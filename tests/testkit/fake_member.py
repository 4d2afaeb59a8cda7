"""Played members of a plaintext mesh: each announces blocks and promises, and answers for blocks in its manner.

The messages are those of mesh/src/control/wire.rs, over gRPC; the frames are those of mesh/src/transport/tcp/frame.rs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import functools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import xxhash

VERSION, MESH = 1, "default"
HEARTBEAT_S = 1.0
# Digests of one message.
BATCH = 8_000
# A block of a slow member takes this long: four take longer than a request waits.
SLOW_S = 0.6
# Followers of one member at a time.
FOLLOWERS = 4

MAGIC, HEAD = b"PILM", struct.Struct("<4sHHII")
WELCOME, ASK, BLOCK = 2, 4, 5
ASKED, LABEL, GIVEN = struct.Struct("<QII"), struct.Struct("<16s32sII"), struct.Struct("<QIIIIQ")
WHOLE, ABSENT = 0, 1


class Manner(enum.Enum):
    """How a member answers for its announced blocks."""

    GIVES = "gives"
    # It has none of them.
    LACKS = "lacks"
    SLOW = "slow"
    # It accepts connections and answers nothing.
    SILENT = "silent"
    # Packets to its block port get lost.
    LOST = "lost"


def digest(namespace: str, key: bytes, group: int = 0) -> int:
    """The name of a block between nodes; `namespace` in hexadecimal digits."""
    return xxhash.xxh3_64_intdigest(bytes.fromhex(namespace) + struct.pack("<I", group) + key)


class FakeMember:
    """A member on ports of its own, until it is closed."""

    def __init__(self, name: str, manner: Manner) -> None:
        self.manner = manner
        self._digests: set[int] = set()
        self._promised = b""
        # Deltas and promises since the start.
        self._told: list[bytes] = []
        self._sequence = 1
        self._changed = threading.Condition()
        # Nonzero.
        self._boot = secrets.randbits(63) + 1
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0 if manner is Manner.LOST else 64)
        self._sockets = [self._listener]
        if manner is Manner.LOST:
            self._fill_queue()
        else:
            _run(self._accept)
        data = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._hello = _reply(1, _number(1, VERSION) + _text(2, MESH) + _text(3, name) + _fixed(4, self._boot) + _text(5, data))
        self._pool = concurrent.futures.ThreadPoolExecutor(FOLLOWERS)
        self._server = grpc.server(self._pool)
        follow = grpc.unary_stream_rpc_method_handler(self._follow)
        service = grpc.method_handlers_generic_handler("pillion.mesh.v1.Inventory", {"Follow": follow})
        self._server.add_generic_rpc_handlers((service,))
        # Others follow it there.
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def announce(self, digests: Sequence[int]) -> None:
        """Announces that it keeps these blocks, too."""
        for first in range(0, len(digests), BATCH):
            some = digests[first : first + BATCH]
            with self._changed:
                after, self._sequence = self._sequence, self._sequence + 1
                self._digests.update(some)
                self._tell(_reply(4, _number(1, after) + _number(2, self._sequence) + _packed(4, some)))

    def promise(self, digests: Sequence[int]) -> None:
        """Promises the prompts with these last keys, and no others."""
        with self._changed:
            self._promised = _reply(6, _packed(1, digests))
            self._tell(self._promised)

    def close(self) -> None:
        """Leaves the mesh without a message."""
        self._server.stop(None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in self._sockets:
            one.close()

    # --- inventory ---

    def _tell(self, message: bytes) -> None:
        self._told.append(message)
        self._changed.notify_all()

    def _follow(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            digests, sequence, told = sorted(self._digests), self._sequence, len(self._told)
            promised = [self._promised] if self._promised else []
        yield self._hello
        yield _reply(2, _number(1, sequence) + _number(2, len(digests)))
        for first in range(0, len(digests), BATCH):
            yield _reply(3, _number(1, sequence) + _packed(2, digests[first : first + BATCH]))
        yield _reply(3, _number(1, sequence) + _number(3, 1))
        yield from promised
        while context.is_active():
            with self._changed:
                if len(self._told) == told:
                    self._changed.wait(HEARTBEAT_S)
                news = self._told[told:]
            yield from news or [_reply(5, b"")]
            told += len(news)

    # --- blocks ---

    def _fill_queue(self) -> None:
        """Leaves no room for a further connection: the kernel drops its packets."""
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self._listener.getsockname())
            self._sockets.append(filler)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                if self.manner is not Manner.SILENT:
                    _run(functools.partial(self._serve, connection))

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            _read_frame(connection)
            connection.sendall(_frame(WELCOME, struct.pack("<Q", self._boot)))
            while True:
                kind, body = _read_frame(connection)
                if kind == ASK:
                    self._answer(connection, body)

    def _answer(self, connection: socket.socket, body: bytes) -> None:
        ticket, first, _ = ASKED.unpack_from(body)
        for index, (_, _, _, size) in enumerate(LABEL.iter_unpack(body[ASKED.size :]), first):
            if self.manner is Manner.LACKS:
                connection.sendall(_frame(BLOCK, GIVEN.pack(ticket, index, ABSENT, 0, 0, 0)))
                continue
            if self.manner is Manner.SLOW:
                time.sleep(SLOW_S)
            # Finite in each type of number.
            block = bytes(size)
            checksum = xxhash.xxh3_64_intdigest(block)
            connection.sendall(_frame(BLOCK, GIVEN.pack(ticket, index, WHOLE, size, 0, checksum)) + block)


@contextlib.contextmanager
def members(manners: Sequence[Manner]) -> Iterator[list[FakeMember]]:
    """A member of each of these manners."""
    with contextlib.ExitStack() as stack:
        made = [FakeMember(f"fake-{number}", manner) for number, manner in enumerate(manners)]
        for member in made:
            stack.callback(member.close)
        yield made


def _run(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


# === frames ===


def _frame(kind: int, body: bytes) -> bytes:
    head = HEAD.pack(MAGIC, VERSION, kind, len(body), 0)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body


def _read_frame(connection: socket.socket) -> tuple[int, bytes]:
    _, _, kind, size, _ = HEAD.unpack(_read(connection, HEAD.size))
    _read(connection, 8)
    return kind, _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        part = connection.recv(size - len(taken))
        if not part:
            raise EOFError
        taken += part
    return taken


# === protobuf ===


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _packed(field: int, values: Sequence[int]) -> bytes:
    return _bytes(field, struct.pack(f"<{len(values)}Q", *values))


def _reply(kind: int, message: bytes) -> bytes:
    """One of the kinds of `FollowReply`."""
    return _bytes(kind, message)
