"""Follows an engine's KV events as a router does, and knows the blocks of each medium in its pod."""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from typing import Any

import msgspec
import zmq

from testkit import ports

GPU, MEMORY, DISK = "GPU", "CPU", "STORAGE"
POLL_MS = 20


class EventLost(AssertionError):
    """An event was lost: the known blocks are not the announced ones."""


@dataclasses.dataclass(frozen=True)
class Known:
    """The contents of a block's event."""

    parent: int | None
    tokens: tuple[int, ...]


class Router:
    """Follows one engine. The router binds the address, so no event is lost while the engine starts."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self.endpoint = f"tcp://127.0.0.1:{ports.free_port()}"
        self._socket.bind(self.endpoint)
        # The socket's owner sends subscriptions to new engines, so a thread of its own reads it.
        self._batches: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._next = 0
        # By medium and cache group.
        self.blocks: dict[tuple[str, int], dict[int, Known]] = collections.defaultdict(dict)
        # Every block that was ever announced with its tokens.
        self.described: dict[tuple[str, int], dict[int, Known]] = collections.defaultdict(dict)
        self.cleared = 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` for an engine that this router follows."""
        return {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}}

    def close(self) -> None:
        """Closes the socket."""
        self._closed.set()
        self._reader.join()
        self._socket.close(linger=0)

    def _read(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(POLL_MS):
                _, number, payload = self._socket.recv_multipart()
                self._batches.put((int.from_bytes(number, "big"), payload))

    def keys(self, medium: str, group: int = 0) -> set[int]:
        """The blocks of a cache group in a medium, after all events so far."""
        self.hear()
        return set(self.blocks[medium, group])

    def hear(self) -> None:
        """Takes in all events so far."""
        while not self._batches.empty():
            number, payload = self._batches.get()
            if number != self._next:
                raise EventLost(f"event {number} follows on {self._next - 1}")
            self._next += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.cleared += 1
            for blocks in self.blocks.values():
                blocks.clear()
            return
        medium, hashes = event["medium"], event["block_hashes"]
        where = (medium, event["group_idx"])
        blocks = self.blocks[where]
        if event["type"] == "BlockRemoved":
            for key in hashes:
                # Routers count how often a block was stored.
                assert key in blocks or medium == GPU, "removed twice"
                blocks.pop(key, None)
            return
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == size * len(hashes)
        for place, key in enumerate(hashes):
            assert key not in blocks or medium == GPU, "stored twice"
            known = Known(parent, tuple(tokens[place * size : (place + 1) * size]))
            blocks[key] = known
            if size:
                self.described[where][key] = known
            parent = key
