"""A bad network: a TCP proxy with disturbances at places drawn from a seed.

TCP loses and changes no byte when packets are lost: bytes are late, or the connection ends. This proxy does the same.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import random
import socket
import struct
import threading
from collections.abc import Awaitable, Callable

CHUNK_BYTES = 64 << 10
DELAY_S = (0.020, 0.060)
# A lost packet is sent again after Linux's least wait for an acknowledgement; after each further loss the wait is doubled, and
# half as likely.
LOSS_S, LOSS_WEIGHTS = (0.2, 0.4, 0.8, 1.6), (8, 4, 2, 1)
# The most bytes from one loss to the next, or from a connection's start to its cut: five of the tests' blocks.
APART_BYTES = 240 << 10
SLOW_BYTES_PER_S = 64 << 10


class Line:
    """One direction of one connection."""

    def __init__(self, disturb: Callable[[], None], writer: asyncio.StreamWriter, dice: random.Random) -> None:
        self._disturb, self._writer, self.dice = disturb, writer, dice
        # Bytes to the next disturbance.
        self.left = dice.randrange(APART_BYTES)

    async def send(self, chunk: bytes) -> None:
        """Sends a chunk on."""
        self.left -= len(chunk)
        self._writer.write(chunk)
        await self._writer.drain()

    async def hold(self, seconds: float) -> None:
        """Delays all later bytes."""
        self._disturb()
        await asyncio.sleep(seconds)

    def cut(self) -> None:
        """Ends the connection with a reset."""
        self._disturb()
        raise ConnectionResetError


Fault = Callable[[Line, bytes], Awaitable[None]]


async def delay(line: Line, chunk: bytes) -> None:
    """Delays every chunk."""
    await line.hold(line.dice.uniform(*DELAY_S))
    await line.send(chunk)


async def loss(line: Line, chunk: bytes) -> None:
    """Loses a packet now and then: all bytes after it wait until it is sent again."""
    while len(chunk) > line.left:
        before, chunk = chunk[: line.left], chunk[line.left :]
        await line.send(before)
        await line.hold(line.dice.choices(LOSS_S, LOSS_WEIGHTS)[0])
        line.left = 1 + line.dice.randrange(APART_BYTES)
    await line.send(chunk)


async def cut(line: Line, chunk: bytes) -> None:
    """Cuts every connection after a while."""
    before = chunk[: line.left]
    await line.send(before)
    if len(before) < len(chunk):
        line.cut()


async def slow(line: Line, chunk: bytes) -> None:
    """Sends few bytes a second."""
    await line.hold(len(chunk) / SLOW_BYTES_PER_S)
    await line.send(chunk)


class Proxy:
    """Carries TCP from ports of `listen` to ports of a host, with a fault."""

    def __init__(self, listen: str, host: str, ports: tuple[int, ...], fault: Fault, seed: int) -> None:
        # The number of delays and cuts, for each port.
        self.disturbances: collections.Counter[int] = collections.Counter()
        self._host, self._fault, self._seed = host, fault, seed
        self._listeners = {port: socket.create_server((listen, 0)) for port in ports}
        # The port to connect to, by the host's port.
        self.ports: dict[int, int] = {port: listener.getsockname()[1] for port, listener in self._listeners.items()}
        self._connections = 0
        self._end = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cuts every connection."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        carry = {port: functools.partial(self._carry, port) for port in self._listeners}
        servers = [await asyncio.start_server(carry[port], sock=listener) for port, listener in self._listeners.items()]
        await self._end.wait()
        for server in servers:
            server.close()

    async def _carry(self, port: int, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        ends = [near]
        # A peer's reset or end is a reset on the other side, too.
        with contextlib.suppress(OSError):
            try:
                far_reader, far = await asyncio.open_connection(self._host, port)
                ends.append(far)
                self._connections += 1
                there, back = (self._line(port, way, writer) for way, writer in (("there", far), ("back", near)))
                await asyncio.gather(self._pump(near_reader, there), self._pump(far_reader, back))
            finally:
                for end in ends:
                    _reset(end)

    def _line(self, port: int, way: str, writer: asyncio.StreamWriter) -> Line:
        dice = random.Random(f"{self._seed} {self._connections} {way}")
        return Line(functools.partial(self.disturbances.update, [port]), writer, dice)

    async def _pump(self, reader: asyncio.StreamReader, line: Line) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._fault(line, chunk)
        raise ConnectionResetError


def _reset(end: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()
