"""The scheduler role of an engine with several cache groups: one [pillion.scheduler][] for each, and what makes their hits one.

A set is a request's blocks of all groups. It is served up to the highest boundary at which every group has what the next token
reads: a group with full attention every block, one with a window those of the window. It is loaded asynchronously, perhaps
while blocks of it are still on their way, and where a block of it does not come, all of it has failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pillion import groups
from pillion.config import Config
from pillion.metadata import PillionMetadata, StepOutput
from pillion.others import Others
from pillion.proof import Proof
from pillion.scheduler import Scheduler
from pillion.state import Source, State

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Boundaries that are tried for one question, and those of them after which only checkpoints are. Each costs a query of a
# window's blocks, 6 us for 64 of them, and the next one is a window below at most.
TRIES_MAX, TRIES_IN_TURN = 32, 16
# What a set is in, if one of its groups is: the first of these.
WORST_FIRST: tuple[State, ...] = ("away", "unaccepted", "unbound")


class SetScheduler:
    """The schedulers of all groups, as one."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, beside_others: bool = False
    ) -> None:
        self._config = config
        parts = groups.parts(kv_cache_config)
        self._proof = proof = Proof(len(parts), beside_others)
        self._all = [Scheduler(config, vllm_config, view, group, proof, beside_others) for group, view in parts]
        self._sizes = parts[0][0].sizes
        self._others = Others(self._sizes) if beside_others else None
        # Tokens from one boundary to the next.
        self._boundary = parts[0][0].boundary
        self._checkpoint = parts[0][0].checkpoint(config.checkpoint_tokens)
        self._reads = [groups.reads(view) for _, view in parts]
        self._full = [group for group, reads in enumerate(self._reads) if not reads]
        self._windows = [group for group, reads in enumerate(self._reads) if reads]
        # The group whose loads are told as the set's.
        self._lead = self._all[(self._full + self._windows)[0]]
        self._updating = False
        # Of each request with a hit: its first block and its end.
        self._hits: dict[str, tuple[int, int]] = {}
        # Of each request whose last question waits: the boundary that was being tried.
        self._tried: dict[str, int] = {}

    @property
    def state(self) -> State:
        """What the engine gets of the sidecar."""
        states = [part.state for part in self._all]
        return next((state for state in WORST_FIRST if state in states), "serving")

    @property
    def updating(self) -> bool:
        """Whether an update of the weights has begun and not ended."""
        return self._updating

    @updating.setter
    def updating(self, updating: bool) -> None:
        self._updating = updating
        for part in self._all:
            part.updating = updating

    # --- requests ---

    def ranks_copy(self) -> None:
        """Ranks copy for themselves: nothing changes, since a set is loaded beside the steps."""

    def announced(self, request: Request) -> None:
        """A request has arrived, and waits for its turn. Of windows it needs what the highest boundary reads, if all is kept.

        Those few blocks come first: a set's load begins once all groups are asked for, and each of windows waits for its own.
        """
        limit = self._limit(request)
        for group in self._windows + self._full:
            self._all[group].announced(request, self._blocks(group, 0, limit))

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that all groups hold; None: ask again."""
        for part in self._all:
            part.follow(request)
        if self._others:
            self._others.asked(request, computed_tokens)
            if self._others.brings(request):
                return 0, False
        if not self._config.loads or request.skip_reading_prefix_cache or self._updating:
            return 0, False
        if self.is_refused(request):
            return None if self._lead.steps_aside(request) else 0, False
        # vLLM's own hit ends on a boundary.
        if computed_tokens % self._boundary:
            return 0, False
        end = self._common(request, computed_tokens, self._limit(request))
        if end is None:
            return None, False
        if end <= computed_tokens:
            self._release(request)
            return 0, False
        self._hits[request.request_id] = (computed_tokens, end)
        return end - computed_tokens, True

    def is_refused(self, request: Request) -> bool:
        """Whether a load of the request has failed, so that the cache is not asked again."""
        return any(part.is_refused(request) for part in self._all)

    def put_off(self, request: Request) -> bool:
        """Never: a set is loaded beside the steps."""
        return False

    def _limit(self, request: Request) -> int:
        """The highest boundary of a hit: one token is left to compute."""
        tokens: int = request.num_tokens - 1
        return tokens - tokens % self._boundary

    def _common(self, request: Request, first: int, limit: int) -> int | None:
        """The highest boundary up to `limit`, of `TRIES_MAX`, whose blocks all groups have and have leased; at most `first` if
        there is none; None: ask again."""
        # The sidecar looks for all groups at once: for those with windows where they are asked first if the others have all.
        guessed = min(limit, self._tried.get(request.request_id, limit))
        for group in self._windows + self._full:
            blocks = self._blocks(group, first, guessed if self._reads[group] else limit)
            if blocks:
                self._all[group].look_ahead(request, blocks.start, len(blocks))
        end = limit
        for group in self._full:
            blocks = self._blocks(group, first, limit)
            hits = self._all[group].look(request, blocks.start, len(blocks)) if blocks else 0
            if hits is None:
                return None
            end = min(end, self._below(group, blocks.start + hits))
        for group in self._windows:
            self._all[group].part_at(request, end)
        end = min(end, self._tried.pop(request.request_id, end))
        for tried in range(TRIES_MAX):
            if tried >= TRIES_IN_TURN and self._checkpoint:
                end -= end % self._checkpoint
            asked = end
            for group in self._windows:
                blocks = self._blocks(group, first, end)
                hits = self._all[group].look(request, blocks.start, len(blocks)) if blocks else 0
                if hits is None:
                    self._tried[request.request_id] = asked
                    return None
                if hits < len(blocks):
                    # A boundary beyond a missing block reads it, as far as this one does.
                    end = self._below(group, blocks.start + hits)
                    break
            if end == asked:
                return end
        return first

    def _below(self, group: int, blocks: int) -> int:
        """The highest boundary that so many blocks of a group reach."""
        tokens = blocks * self._sizes[group]
        return tokens - tokens % self._boundary

    def _blocks(self, group: int, first: int, end: int) -> range:
        """The blocks of a group that a hit up to `end` loads; vLLM has those before `first`."""
        blocks, reads = range(first // self._sizes[group], end // self._sizes[group]), self._reads[group]
        return blocks[-reads:] if reads else blocks

    def _release(self, request: Request) -> None:
        for part in self._all:
            part.release(request)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has allocated blocks and says how many external tokens it wants: all of the hit, or none."""
        if self._others:
            foreign = self._others.allocated(request, blocks, external_tokens)
            for part in self._all:
                part.overwrite(foreign)
        hit = self._hits.pop(request.request_id, None)
        if hit is None:
            return
        if not external_tokens:
            self._release(request)
            return
        first, found = hit
        end = first + external_tokens
        # vLLM may allocate less than the answer: then windows end elsewhere, and their blocks are asked for again.
        whole = end == found or (end < found and self._reaches(request, first, end))
        loaded = [self._blocks(group, first, end) for group in range(len(self._all))]
        ids = blocks.get_block_ids()
        # Null blocks stand for those before a window.
        fresh = [
            [block for block in each[first // size : end // size] if block] for each, size in zip(ids, self._sizes, strict=True)
        ]
        for part in self._all:
            # Before the loads, which may begin as soon as they are posted.
            part.overwrite([block for each in fresh for block in each])
        wanted = [each[its.start : its.stop] for each, its in zip(ids, loaded, strict=True)]
        # A block that vLLM has not zeroed, because it is to be loaded, must be one that a group loads.
        whole = whole and all(set(each) <= set(its) for each, its in zip(fresh, wanted, strict=True))
        for group, part in enumerate(self._all):
            if whole:
                part.plan(request, loaded[group].start, wanted[group])
            else:
                part.lose(request, fresh[group])

    def _reaches(self, request: Request, first: int, end: int) -> bool:
        """True if the hit may end earlier, at `end`: the groups with windows have leased all blocks of their windows there."""
        if end % self._boundary:
            return False
        asked = [(group, self._blocks(group, first, end)) for group in self._windows]
        return all(
            self._all[group].look(request, blocks.start, len(blocks)) == len(blocks) for group, blocks in asked if blocks
        )

    def sources(self, request: Request, tokens: int) -> dict[Source, int]:
        """Where the tokens of a hit were found, by the group that loads most of them."""
        return self._lead.sources(request, tokens)

    def take_hit_tokens(self) -> dict[Source, int]:
        """Tokens of hits that were loaded since the last call, by where that group found them."""
        taken = [part.take_hit_tokens() for part in self._all]
        return taken[self._all.index(self._lead)]

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request is over; what its router is told, by the group whose loads are told as the set's."""
        self._hits.pop(request.request_id, None)
        self._tried.pop(request.request_id, None)
        if self._others:
            self._others.forget(request)
        told = [part.finished(request) for part in self._all]
        return told[self._all.index(self._lead)]

    def loads_failed(self, block_ids: set[int]) -> None:
        """vLLM computes these blocks again."""
        for part in self._all:
            part.loads_failed(block_ids)

    def requests_failed(self, req_ids: set[str]) -> None:
        """vLLM computes these requests from their beginning: what any group loaded of them counts as failed."""
        for part in self._all:
            part.requests_failed(req_ids)

    # --- one step ---

    def step(self, output: SchedulerOutput) -> PillionMetadata:
        """Posts what this step saves and what it may overwrite, of every group. Called once, at the end of every schedule()."""
        self._all[0].open_step(output)
        for part in self._all:
            part.follow_step(output)
        metadata, *others = [part.post_step(output) for part in self._all]
        metadata.others = others
        metadata.asks |= any(other.asks for other in others)
        return metadata

    def accepts(self, output: StepOutput) -> None:
        """vLLM has taken the output of a step: ranks name it by the run of the first group."""
        if self._all[0].is_whole(output):
            passed = self._proof.accept(output.step, [tracked for part in self._all for tracked in part.requests])
            for part in self._all:
                part.accept(output.step, passed)

    def loads_ended(self, req_ids: Iterable[str], failed: Collection[int]) -> None:
        """Every rank has said that these requests' loads have ended, without the `failed` blocks."""
        for part in self._all:
            part.loads_ended(req_ids, failed)

    def take_unkept(self) -> dict[str, int]:
        """What was not kept since the last call, by why, of all groups."""
        return self._all[0].take_unkept()

    # --- vLLM's blocks ---

    def bind(self, pool: BlockPool) -> None:
        """The pool that the blocks of every group are of."""
        for part in self._all:
            part.bind(pool)

    def clears_blocks(self) -> None:
        """vLLM is about to reset the pool."""
        for part in self._all:
            part.clears_blocks()

    # --- what KV is computed with ---

    def weights_may_have_changed(self) -> None:
        """Every rank says anew what it computes with, for every group."""
        for part in self._all:
            part.weights_may_have_changed()

    def adapter_loads(self, request: LoRARequest) -> None:
        """Every rank is about to load an adapter."""
        for part in self._all:
            part.adapter_loads(request)

    def adapter_removed(self, number: int) -> None:
        """No rank holds an adapter any more."""
        for part in self._all:
            part.adapter_removed(number)

    # --- what others are told of the blocks ---

    def take_events(self) -> list[Any]:
        """vLLM's events of what has changed in the cache, each with the number of its group."""
        return [event for part in self._all for event in part.take_events()]

    @property
    def lingers(self) -> bool:
        """Whether an engine without requests is to step on for the events of any group."""
        return any(part.lingers for part in self._all)

    def blocks_cleared(self) -> None:
        """vLLM has told others that every block is gone."""
        for part in self._all:
            part.blocks_cleared()

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        for part in self._all:
            part.shutdown()
