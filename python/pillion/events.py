"""vLLM's KV events for routers: the blocks kept by the sidecar for this engine."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pillion import vllm_compat
from pillion._shim import Policy
from pillion.groups import Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# vLLM's names for the sidecar's memory and its disks.
MEDIA = ("CPU", "STORAGE")
# Time for which the policy knows the blocks of a finished request.
KNOWN_S = 10.0


class Events:
    """Makes the events of one cache group."""

    def __init__(self, group: Group, kv_cache_config: KVCacheConfig) -> None:
        self._group = group
        self._events = vllm_compat.BlockEvents(kv_cache_config, group.number)
        # Finished requests, the oldest first, with the time of forgetting them; and by the policy's number.
        self._ended: deque[tuple[float, int]] = deque()
        self._over: dict[int, Request] = {}

    def ended(self, number: int, request: Request) -> None:
        """Notes the end of a request."""
        now = time.monotonic()
        # `take` is in every step, and freeing a long prompt takes a while.
        while self._ended and self._ended[0][0] <= now:
            del self._over[self._ended.popleft()[1]]
        self._ended.append((now + KNOWN_S, number))
        self._over[number] = request

    def take(self, policy: Policy, requests: dict[int, Request]) -> list[Any]:
        """The events since the last call."""
        events = []
        for on_disk, hashes, stored, number, first in policy.take_events(self._group.place):
            medium, request = MEDIA[on_disk], requests.get(number) or self._over.get(number)
            if not stored:
                events.append(self._events.removed(medium, hashes))
                continue
            own = self._hashes(request, first, first + len(hashes)) if request is not None else []
            # Sampled tokens may have been taken back since, and others have followed.
            known = sum(ours == theirs for ours, theirs in zip(own, hashes, strict=False))
            if request is not None and known:
                parent = self._hashes(request, first - 1, first)[0] if first else None
                events.append(self._events.stored(medium, hashes[:known], request, first, parent))
            if known < len(hashes):
                events.append(self._events.stored(medium, hashes[known:]))
        return events

    def _hashes(self, request: Request, first: int, end: int) -> list[bytes]:
        """vLLM's hashes of some of a request's blocks."""
        each = self._group.hashes
        return vllm_compat.block_hashes(request)[(first + 1) * each - 1 : end * each : each]
