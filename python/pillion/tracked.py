"""The requests as the scheduler role follows them: of each its key log, its blocks, and how far they are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pillion import handover, hasher
from pillion._shim import SchedulerSession
from pillion.adapters import Adapters
from pillion.groups import ALONE, Group
from pillion.state import Source

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


# How long a request waits for the digest of its adapter before it goes without the cache: some hundred MB are read meanwhile.
ADAPTER_WAIT_S = 0.2


@dataclass(slots=True, eq=False)
class Tracked:
    """One request."""

    request: Request
    # Tokens of a block.
    block_tokens: int
    # Tokens that its model reads, where vLLM frees the blocks before them; 0 where it keeps all.
    window: int = 0
    # The cache group of the blocks, and hashes of the request for each of them.
    group: int = 0
    hashes_each: int = 1
    # Whether a key is vLLM's hash alone.
    by_hash: bool = True
    # Whether routers' words about prompts of other engines are for this connector.
    routed: bool = True
    log: int = -1
    # The connection that the log was opened in; -1: the next append opens one.
    generation: int = -1
    # What the log's keys are mixed with: that of its adapter.
    fold: bytes | None = None
    # When the digest of its adapter was first asked for in vain.
    undigested_since: float | None = None
    appended: int = 0
    # The key that was appended last: it hangs on all before it.
    newest: bytes = b""
    # The block in which ends what one engine hands over to another, until it is full: its place, and its key, the log's last.
    tail: tuple[int, bytes] | None = None
    # Whether the log ends with that key, and takes no other.
    tailed: bool = False
    # Whether another engine is awaited for the log's keys, and whether they are promised to another engine.
    awaited: bool = False
    promised: bool = False
    blocks: list[int] = field(default_factory=list)
    # Blocks from the first that vLLM has freed, or never allocated: other requests may hold them by now. They are 0.
    freed: int = 0
    # Blocks from the first that this run has seen filled, by steps that vLLM may still refuse.
    filled: int = 0
    # Whether the block in which its next step begins holds what the request itself has computed before, as that of a session.
    goes_on: bool = False
    # Preemptions until it began on its blocks.
    preemptions: int = 0
    # Blocks from the first that were offered to the cache, or came from it.
    saved: int = 0
    # The blocks that it began on, computed before, and the step in which it did. The cache has most likely kept them: they
    # are offered, and so marked as used, in the step after, not on the way to the first token. 0: that was done.
    found: int = 0
    found_in: int = 0
    # The block at which its prompt parts from those that were kept before, as far as that was seen.
    parted: int = 0
    # (first block, number, synchronous) of the last answer that promised a hit.
    hit: tuple[int, int, bool] | None = None
    # Tokens of the last load by where they were found.
    sources: dict[Source, int] = field(default_factory=dict)
    # Blocks of the last load; once one of them failed, the cache is not asked again. Each with its key, until the load ends.
    loaded: list[int] = field(default_factory=list)
    loading: list[tuple[int, bytes]] = field(default_factory=list)
    refused: bool = False
    # Whether it was asked for since, and found no room perhaps.
    asked_again: bool = False
    # Whether too little of it was handed over: its load is to fail, and so to end it.
    given_up: bool = False
    # Whether what was found last is to be loaded in a later step.
    put_off: bool = False
    # The step in which to look at it next; other entries of it among the due are stale.
    due: int = -1
    live: bool = True

    @property
    def _all(self) -> list[bytes]:
        """The key of each hashed block."""
        keys: list[bytes] = self.request.block_hashes if self.by_hash else hasher.keys_of(self.request)
        return keys

    @property
    def keys(self) -> list[bytes]:
        """The key of each whole block, that of its last part: a key hangs on all before it."""
        keys = self._all
        return keys if self.hashes_each == 1 else self.keys_of(0, len(keys) // self.hashes_each)

    @property
    def awaits(self) -> bool:
        """Whether another engine has computed the request's prompt for this one, or is about to."""
        return self.routed and handover.awaits(self.request)

    @property
    def hands_over(self) -> bool:
        """Whether another engine goes on with the request, by this connector."""
        return self.routed and handover.hands_over(self.request)

    @property
    def tail_at(self) -> int:
        """The block that is partly full and is handed over all the same; -1: none."""
        return self.tail[0] if self.tail else -1

    def fill(self, tokens: int) -> None:
        """Gives up the tail's key once `tokens` computed tokens fill its block, which is then saved under its own key."""
        if self.tail and tokens >= (self.tail[0] + 1) * self.block_tokens:
            self.saved = min(self.saved, self.tail[0])
            self.tail = None

    def steps_aside(self) -> bool:
        """Whether vLLM is to pass over a request that is refused the cache: each second time that it asks, as without room.

        vLLM 0.33 keeps such a request, whose blocks went back, before those that hold theirs since their loads ended. It looks
        at none behind one without room: all would wait for ever.
        """
        self.asked_again = not self.asked_again
        return not self.asked_again

    def keys_of(self, first: int, end: int) -> list[bytes]:
        """The keys of some of them."""
        each = self.hashes_each
        return self._all[(first + 1) * each - 1 : end * each : each]

    def hashes_of(self, first: int, end: int) -> list[bytes]:
        """vLLM's hashes of some of them."""
        each = self.hashes_each
        hashes: list[bytes] = self.request.block_hashes[(first + 1) * each - 1 : end * each : each]
        return hashes

    def loads(self, first: int, blocks: list[int]) -> None:
        """A load of the request's blocks from `first` on into `blocks` begins."""
        keys = self.keys_of(first, first + len(blocks))
        if self.tail and self.tailed and first <= self.tail[0] == first + len(keys):
            keys.append(self.tail[1])
        self.loaded, self.loading = blocks, list(zip(blocks, keys, strict=False))

    def slide(self) -> None:
        """Forgets the blocks that vLLM has freed by now: at most those before the window of the next token to be scheduled. For
        the time between a step's scheduling and the next one's."""
        if not self.window:
            return
        passed = min(max(0, self.request.num_computed_tokens - self.window + 1) // self.block_tokens, len(self.blocks))
        while self.freed < len(self.blocks) and (self.freed < passed or not self.blocks[self.freed]):
            self.blocks[self.freed] = 0
            self.freed += 1


@dataclass
class Requests:
    """The requests that are not over: their key logs and block tables."""

    _session: SchedulerSession
    _adapters: Adapters
    _block_tokens: int
    # Whether what is computed is kept: else nothing may be promised.
    _saves: bool
    # Whether what a request computes may be kept, as far as is known.
    _may_keep: Callable[[Tracked], bool]
    _window: int = 0
    # The cache group that is followed; vLLM's blocks of all groups are of one pool.
    _group: Group = ALONE
    # Of vLLM's block hashes.
    _algorithm: str = ""
    # Whether routers' words are for this connector, and not for another one beside it.
    _routed: bool = True
    by_id: dict[str, Tracked] = field(default_factory=dict)
    # Those of the last step.
    running: set[str] = field(default_factory=set)

    def hands_over(self, request: Request) -> bool:
        """Whether another engine goes on with a request, by this connector."""
        return self._routed and handover.hands_over(request)

    def follow(self, request: Request) -> Tracked:
        """What is known of a request, from now on if not before."""
        known = self.by_id.get(request.request_id)
        if known is not None:
            return known
        by_hash = not hasher.has_second_digest(self._algorithm)
        tracked = Tracked(
            request, self._block_tokens, self._window, self._group.number, self._group.hashes, by_hash, self._routed
        )
        self.by_id[request.request_id] = tracked
        if not self._group.several and (tracked.awaits or tracked.hands_over):
            tracked.tail = handover.tail(request, tracked.keys, self._block_tokens, self._algorithm)
        return tracked

    def end(self, request: Request) -> Tracked | None:
        """The request is over; its saves go on, its blocks may be reused."""
        self.running.discard(request.request_id)
        tracked = self.by_id.pop(request.request_id, None)
        if tracked is not None:
            tracked.live = False
            self._close(tracked)
        return tracked

    # --- block tables ---

    def take_blocks(self, output: SchedulerOutput, step: int) -> tuple[list[tuple[Tracked, int]], list[int]]:
        """Follows the block tables: returns the requests that begin on blocks, or do so again, each with its computed tokens,
        and all blocks that are new, of every group: whatever group had them before."""
        begun: list[tuple[Tracked, int]] = []
        new_blocks: list[int] = []

        def begin(req_id: str, ids: Sequence[list[int]], computed_tokens: int) -> None:
            tracked = self.by_id[req_id]
            # Ranks load its adapter in this step, unless they hold it.
            self.look(tracked.request)
            blocks, found = list(ids[self._group.number]), computed_tokens // self._block_tokens
            preemptions = tracked.request.num_preemptions
            tracked.goes_on = (
                preemptions == tracked.preemptions and tracked.blocks[found : found + 1] == blocks[found : found + 1]
            )
            tracked.blocks, tracked.preemptions = blocks, preemptions
            tracked.freed = 0
            tracked.saved = tracked.found = found
            tracked.found_in = step if tracked.found else 0
            begun.append((tracked, computed_tokens))

        def write(ids: Sequence[list[int]], computed_tokens: int) -> None:
            for each, size in zip(ids, self._group.sizes or (self._block_tokens,), strict=True):
                new_blocks.extend(each[computed_tokens // size :])

        for new in output.scheduled_new_reqs:
            if new.req_id in self.by_id:
                begin(new.req_id, new.block_ids, new.num_computed_tokens)
            # A request that is not followed writes, too.
            write(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, ids in enumerate(cached.new_block_ids):
            if not ids:
                continue
            req_id = cached.req_ids[index]
            if req_id in self.by_id and req_id in cached.resumed_req_ids:
                begin(req_id, ids, cached.num_computed_tokens[index])
                write(ids, cached.num_computed_tokens[index])
                continue
            new_blocks += [block for each in ids for block in each]
            if req_id in self.by_id:
                self.by_id[req_id].blocks += ids[self._group.number]
        return begun, new_blocks

    # --- key logs ---

    def append(self, tracked: Tracked) -> bool:
        """Brings the request's key log up to date; False while there is none to be had."""
        session, keys, kept = self._session, tracked.keys, 0
        preempted = tracked.request.num_preemptions > 0
        if tracked.tail:
            keys = keys[: tracked.tail_at]
        if tracked.request.lora_request and not self._follow_adapter(tracked):
            return False
        if tracked.tailed and not tracked.tail:
            # A log that ends with a tail takes no key: the next one goes on where it ended.
            kept = self._go_on(tracked)
        elif tracked.appended and keys[tracked.appended - 1 : tracked.appended] != [tracked.newest]:
            # vLLM has taken back tokens that were sampled, as between two inputs of a streaming session: a key that was written
            # is never changed, so the log begins anew.
            self._close(tracked)
        elif tracked.awaited and preempted:
            kept = self._go_on(tracked)
        if tracked.generation != session.generation:
            tracked.log = session.open(tracked.fold)
            # Nobody else computes the blocks of this engine's own answer.
            tracked.awaited = tracked.awaits and not preempted
            if tracked.awaited:
                session.await_producer(tracked.log)
            tracked.promised = self._saves and self._may_keep(tracked) and tracked.hands_over
            if tracked.promised:
                session.promise(tracked.log)
            tracked.generation = session.generation
            tracked.appended, tracked.saved, tracked.tailed = 0, kept, False
            tracked.hit = None
        if tracked.log < 0:
            # Try again at the next occasion.
            tracked.generation = -1
            return False
        if len(keys) > tracked.appended:
            tracked.appended = session.append(tracked.log, keys, tracked.appended)
            tracked.newest = keys[tracked.appended - 1] if tracked.appended else b""
        if tracked.tail and not tracked.tailed and len(keys) == tracked.appended:
            tracked.tailed = session.append_tail(tracked.log, tracked.tail[1])
        return True

    def _go_on(self, tracked: Tracked) -> int:
        """Ends a log that another one of the same keys follows; how many of its blocks were saved."""
        kept = tracked.saved if tracked.generation == self._session.generation else 0
        self._close(tracked)
        return kept

    def break_promise(self, tracked: Tracked) -> None:
        """Ends the log of a request whose blocks will not be kept: no other engine waits for them any longer."""
        if tracked.promised:
            self._close(tracked)

    def _close(self, tracked: Tracked) -> None:
        tracked.promised = False
        if tracked.log >= 0 and tracked.generation == self._session.generation:
            self._session.close(tracked.log)
        tracked.generation = -1

    # --- adapters ---

    def look(self, request: Request) -> None:
        """The files of its adapter may have changed while the request waited."""
        if request.lora_request:
            self._adapters.look(request.lora_request)

    def _follow_adapter(self, tracked: Tracked) -> bool:
        """Whether keys of the request can be told: a log has those of one fold. Ranks may have replaced the adapter."""
        fold = self._adapters.fold(tracked.request.lora_request)
        if not fold:
            return False
        if fold != tracked.fold:
            self._close(tracked)
            tracked.fold = fold
        return True

    def adapter_is_near(self, tracked: Tracked) -> bool:
        """Whether to ask again because the digest of the request's adapter is being computed."""
        lora = tracked.request.lora_request
        if lora is None or self._adapters.fold(lora) is not None:
            return False
        now = time.monotonic()
        if tracked.undigested_since is None:
            tracked.undigested_since = now
        return now - tracked.undigested_since < ADAPTER_WAIT_S
