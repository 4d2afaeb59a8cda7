"""What the cache holds of a prompt, and the loads of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pillion import handover
from pillion._shim import SchedulerSession
from pillion.checking import Check, Subject
from pillion.metadata import PillionMetadata
from pillion.pacing import Pacing
from pillion.state import SOURCES, Source
from pillion.tracked import Requests, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

# Requests that wait for their turn and are announced. What is fetched for more of them would push each other out of memory, and
# their keys fill the log arena.
ANNOUNCED_MAX = 64


@dataclass
class Matching:
    """Asks for prompts, and plans the loads of the step that is being scheduled."""

    _session: SchedulerSession
    _requests: Requests
    _pacing: Pacing
    _check: Check
    _block_tokens: int
    # Whether a load that fails must fail as a whole: vLLM frees blocks before windows, and would compute upon what is left.
    _whole: bool
    # Whether vLLM takes each hit of its own cache to be a block shorter than it is, for a drafter.
    _drops_last: bool = False
    _strict_tokens: int | None = None
    _group: int = 0
    # Tokens of hits that were loaded, by where they were found.
    hit_tokens: Counter[Source] = field(default_factory=Counter)

    def announce(self, request: Request, blocks: range | None, fetches: bool) -> None:
        """Tells its keys while the request waits for its turn. Where it `fetches`, what lies elsewhere of its prompt, or of
        these `blocks` of it, is fetched meanwhile."""
        if blocks is None:
            blocks = range((request.num_tokens - 1) // self._block_tokens)
        waiting = len(self._requests.by_id) - len(self._requests.running)
        if not blocks or waiting >= ANNOUNCED_MAX:
            return
        tracked = self._requests.follow(request)
        if self._requests.append(tracked) and fetches:
            self._session.hint(tracked.log, blocks.start, len(blocks))

    def match(self, tracked: Tracked, computed_tokens: int, step: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that the cache holds; None: ask again. Whoever asks starts anew."""
        request, session = tracked.request, self._session
        tracked.put_off = tracked.given_up = False
        # The key of a tail must not be taken for that of the block, once the request's tokens fill it.
        tracked.fill(request.num_tokens - 1)
        first = computed_tokens // self._block_tokens
        end = self._end(tracked)
        count = -(-end // self._block_tokens) - first
        if count <= 0:
            return 0, False
        if tracked.refused:
            return None if tracked.steps_aside() else 0, False
        hits = self.look(tracked, first, count)
        if hits is not None and self._is_too_much(tracked, request.num_tokens - self._reach(first + hits, end)):
            # vLLM ends a request whose load fails, and knows no other way for a connector to end one.
            self.release(tracked)
            tracked.hit, tracked.given_up = (first, count, False), True
            return end - first * self._block_tokens, True
        if hits == 1 and self._drops_last and not tracked.awaited:
            # Most likely vLLM has dropped this block of its own hit: each request would load it again.
            self.release(tracked)
            return 0, False
        if not hits:
            return hits, False
        # No step waits for blocks on their way, nor for what must be told to have failed before a token is computed upon it.
        arriving = session.arriving(tracked.log)
        alone = self._requests.running <= {request.request_id}
        sync = False if arriving or self._whole else self._pacing.synchronous(hits, alone)
        if sync is None:
            tracked.put_off = True
            return None, False
        namespace = session.namespace
        # Blocks on their way cannot be compared yet.
        if namespace and not arriving:
            hits = self._trim(tracked, first, hits, self._reach(first + hits, end), (namespace, tracked.fold), step)
        if not hits:
            session.release(tracked.log)
            return 0, False
        tracked.hit = (first, hits, sync)
        return self._reach(first + hits, end) - first * self._block_tokens, not sync

    def _end(self, tracked: Tracked) -> int:
        """Tokens that are asked for: one is left to compute, and a hit ends on a block's boundary or, of what another engine
        computes, before that one token."""
        request, size = tracked.request, self._block_tokens
        most: int = request.num_tokens - 1
        if most % size and tracked.awaits and handover.tokens(request) >= most and self._requests.append(tracked):
            # Of the block in which that token lies there is a key: that of a tail, or, if the token fills it, its own.
            newest = tracked.tail_at if tracked.tailed else tracked.appended - 1
            if newest == most // size:
                return most
        return most // size * size

    def _reach(self, blocks: int, end: int) -> int:
        """Tokens in so many blocks from the first on, of `end` that were asked for."""
        return min(blocks * self._block_tokens, end)

    def _trim(self, tracked: Tracked, first: int, hits: int, reach: int, subject: Subject, step: int) -> int:
        """How many blocks of a hit up to `reach` tokens to load, where the last whole ones may be computed to be compared."""
        whole = reach // self._block_tokens - first
        # A handed-over prompt is not computed again, and a window's first blocks are not there.
        may_be_long = not tracked.awaits and not tracked.window
        kept = self._check.trim(tracked, first, whole, subject, step, may_be_long) if whole > 0 else whole
        return hits if kept == whole else kept

    def _is_too_much(self, tracked: Tracked, tokens: int) -> bool:
        """Whether a request ends rather than have this engine compute so many of its tokens."""
        strict = self._strict_tokens
        return strict is not None and tokens > strict and tracked.awaits and not tracked.request.num_preemptions

    def look_ahead(self, tracked: Tracked, first: int, count: int) -> None:
        """Has the cache look for what the next `look` is likely to ask for."""
        if self._requests.append(tracked):
            self._session.ask_ahead(tracked.log, first, count)

    def look(self, tracked: Tracked, first: int, count: int) -> int | None:
        """How many of `count` blocks from `first` on the cache holds before one that it lacks; None: ask again."""
        if not self._requests.append(tracked):
            return None if self._requests.adapter_is_near(tracked) else 0
        hits = self._session.query(tracked.log, first, count)
        if hits < 0 and tracked.awaited and (linger_us := self._pacing.linger_us()):
            hits = self._session.linger(tracked.log, first, count, linger_us)
        if hits < 0:
            return None
        tracked.hit = None
        return hits

    def release(self, tracked: Tracked) -> None:
        """Ends the lease of the request's last hit: its blocks are not loaded."""
        tracked.hit = None
        if tracked.generation == self._session.generation:
            self._session.release(tracked.log)

    def load(self, request: Request, blocks: KVCacheBlocks, external_tokens: int, step: PillionMetadata) -> list[int]:
        """Has `step` load what was promised into the blocks that vLLM allocated, and returns the blocks."""
        tracked, session = self._requests.follow(request), self._session
        self._pacing.begin()
        if tracked.hit is None:
            self._pacing.compute(request)
            return []
        (first, _, sync), tracked.hit = tracked.hit, None
        count = -(-external_tokens // self._block_tokens)
        if not count:
            session.release(tracked.log)
            return []
        if tracked.given_up:
            tracked.loaded = blocks.get_block_ids()[self._group][first : first + count]
            step.lost.append((request.request_id, tracked.loaded, sync))
            return tracked.loaded
        self.count(tracked, first, count, external_tokens)
        self._check.loaded(external_tokens)
        self._pacing.load(request, count, request.num_tokens - first * self._block_tokens - external_tokens, sync)
        step.fills_tail |= sync and external_tokens % self._block_tokens > 0
        ids: list[int] = blocks.get_block_ids()[self._group][first : first + count]
        return self.plan(tracked, first, ids, step, sync)

    def plan(self, tracked: Tracked, first: int, ids: list[int], step: PillionMetadata, sync: bool) -> list[int]:
        """Has `step` load blocks from `first` on into `ids`, and returns those that it loads."""
        session, request, count = self._session, tracked.request, len(ids)
        # Blocks before the window of the next token are null blocks: they must be kept, for what follows, but are not loaded.
        unneeded = next((place for place, block in enumerate(ids) if block), count)
        first, ids = first + unneeded, ids[unneeded:]
        tracked.loads(first, ids)
        if session.saving:
            # Before the load, which may begin as soon as it is posted.
            session.overwrite(ids)
        plans = session.load(tracked.log, first, ids, step.step, sync)
        if not plans:
            step.lost.append((request.request_id, ids, sync))
        step.loads += [(request.request_id, plan, sync) for plan in plans]
        return ids

    def count(self, tracked: Tracked, first: int, count: int, tokens: int) -> None:
        """Counts what is about to be loaded, `count` blocks with so many tokens; as vLLM does not again what a preempted
        request had."""
        size, session = self._block_tokens, self._session
        found = [blocks * size for blocks in session.sources(tracked.log, first, count)]
        if tokens < count * size:
            # The last block is partly full.
            last = session.sources(tracked.log, first + count - 1, 1)
            found = [each - blocks * (count * size - tokens) for each, blocks in zip(found, last, strict=True)]
        tracked.sources = {source: each for source, each in zip(SOURCES, found, strict=True) if each}
        if not tracked.request.num_preemptions:
            self.hit_tokens.update(tracked.sources)
