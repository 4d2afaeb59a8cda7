"""What routers are told of the blocks that the sidecar keeps for this engine: vLLM's KV events, beside those of its own blocks.

A block has its tokens in them while a request is known that offered it; of others the place alone is told.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import groupby
from typing import Any

from pillion import _shim
from pillion._shim import SchedulerSession
from pillion.hasher import SHORT_BYTES, has_second_digest
from pillion.tracked import Tracked
from pillion.vllm_compat import BlockEvents

# By vLLM's names: memory of the sidecar, and its disks.
MEDIA = ("CPU", "STORAGE")
# How long a block that was offered is known by its request: a save that lasts longer is told of by its place alone.
KNOWN_S = 10.0
# How long an engine without requests steps on for the ends of its last saves, and for how long after the last of them.
LINGER_S, SETTLE_S = 1.0, 0.02


class Events:
    """Follows what the sidecar keeps. Made where vLLM publishes KV events; elsewhere nothing is asked for."""

    def __init__(self, session: SchedulerSession, events: BlockEvents, algorithm: str) -> None:
        self._session, self._events = session, events
        self._hash_bytes = SHORT_BYTES if has_second_digest(algorithm) else None
        # Offers that no change was looked up in yet, since a step that saves should not wait for that: the time at which one is
        # forgotten, its request, what its keys are folded with, and the places of its blocks.
        self._fresh: deque[tuple[float, Tracked, bytes | None, int, int]] = deque()
        # By key, the request that offered the block last, the block's place in it, and its hash.
        self._known: dict[bytes, tuple[Tracked, int, bytes]] = {}
        # Offers, the oldest first: the time at which an offer is forgotten, its request, and its keys of `_known`.
        self._offered: deque[tuple[float, Tracked, list[bytes]]] = deque()
        # Hashes of the blocks that others were told of and whose keys do not hold them, those of adapters, by key and medium.
        self._hashes: dict[tuple[bytes, str], bytes] = {}
        # Whether tokens were scheduled since saves or changes were last seen, and when they were seen with such before them.
        self.worked = False
        self._worked = self._linger_until = 0.0
        session.announce()

    def offered(self, tracked: Tracked, first: int, end: int) -> None:
        """Blocks of a request are being saved."""
        now = time.monotonic()
        while self._fresh and self._fresh[0][0] <= now:
            self._fresh.popleft()
        self._fresh.append((now + KNOWN_S, tracked, tracked.fold, first, end))

    def _learn(self, now: float) -> None:
        """Enters what was offered, and forgets what was offered long ago."""
        for forgotten, tracked, fold, first, end in self._fresh:
            # Of tokens that were taken back since, the place alone is told: others are offered there by now.
            hashes, keys = tracked.hashes_of(first, end), tracked.keys_of(first, end)
            if fold is not None:
                keys = [_shim.folded(key, fold) for key in keys]
            for place, (key, block_hash) in enumerate(zip(keys, hashes, strict=False), first):
                self._known[key] = (tracked, place, block_hash)
            self._offered.append((forgotten, tracked, keys))
        self._fresh.clear()
        while self._offered and self._offered[0][0] <= now:
            _, tracked, keys = self._offered.popleft()
            for key in keys:
                if self._known.get(key, (None,))[0] is tracked:
                    del self._known[key]

    def cleared(self) -> None:
        """vLLM has told others that all blocks are gone, the sidecar's with its own."""
        self._hashes.clear()
        self._session.announce()

    @property
    def lingers(self) -> bool:
        """Whether an engine without requests is to step on: vLLM publishes nothing between steps."""
        return time.monotonic() < self._linger_until

    def take(self) -> list[Any]:
        """The events since the last call."""
        changes, saving = self._session.take_changes()
        if not (changes or saving):
            return []
        now = time.monotonic()
        if self.worked:
            self.worked, self._worked = False, now
        self._linger_until = min(now, self._worked + LINGER_S) + SETTLE_S
        if not changes:
            return []
        self._learn(now)
        return self._events_of(changes)

    def _events_of(self, changes: list[tuple[bool, bool, bytes]]) -> list[Any]:
        events = []
        for (stored, on_disk), group in groupby(changes, key=lambda change: change[:2]):
            medium, keys = MEDIA[on_disk], [key for _, _, key in group]
            if stored:
                events += self._stored(medium, keys)
            else:
                told = [self._hashes.pop((key, medium), self._hash_of(key)) for key in keys]
                events.append(self._events.removed(medium, told))
        return events

    def _hash_of(self, key: bytes) -> bytes:
        """vLLM's hash of a block without an adapter."""
        return key[: self._hash_bytes]

    def _stored(self, medium: str, keys: list[bytes]) -> list[Any]:
        known: list[tuple[str, int, Tracked]] = []
        unknown: list[bytes] = []
        for key in keys:
            own = self._hash_of(key)
            tracked, place, block_hash = self._known.get(key, (None, 0, own))
            if block_hash != own:
                self._hashes[key, medium] = block_hash
            # Tokens that were sampled may have been taken back since.
            if tracked is not None and tracked.hashes_of(place, place + 1) == [block_hash]:
                known.append((tracked.request.request_id, place, tracked))
            else:
                unknown.append(block_hash)
        known.sort(key=lambda block: block[:2])
        events = []
        # Of one request in a row.
        for _, group in groupby(enumerate(known), key=lambda item: (item[1][0], item[1][1] - item[0])):
            run = [block for _, block in group]
            _, first, tracked = run[0]
            hashes = tracked.hashes_of(max(0, first - 1), first + len(run))
            events.append(
                self._events.stored(medium, tracked.request, first, hashes[-len(run) :], hashes[0] if first else None)
            )
        if unknown:
            events.append(self._events.located(medium, unknown))
        return events
