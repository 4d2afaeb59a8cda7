"""The scheduler role of an engine with several cache groups: one [pillion.scheduler][] for each, and what makes their hits one.

A set is a request's blocks of all groups. It is served up to the highest boundary at which every group has what the next token
reads: a group with full attention every block, one with a window those of the window. It is loaded asynchronously, and where a
block of it does not come, all of it has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pillion import groups, vllm_compat
from pillion.config import Config
from pillion.metadata import PillionMetadata
from pillion.scheduler import Scheduler
from pillion.state import Source, State

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Boundaries that are tried for one question: each costs a query of every group with a window.
TRIES_MAX = 4
# What a set is in, if one of its groups is: the first of these.
WORST_FIRST: tuple[State, ...] = ("away", "unbound")


class SetScheduler:
    """The schedulers of all groups, as one."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._block_tokens = vllm_compat.block_tokens(kv_cache_config)
        parts = groups.parts(kv_cache_config)
        self._all = [Scheduler(config, vllm_config, view, group) for group, view in parts]
        self._reads = [groups.reads(view) for _, view in parts]
        self._full = [group for group, reads in enumerate(self._reads) if not reads]
        self._windows = [group for group, reads in enumerate(self._reads) if reads]
        # The group whose loads are told as the set's.
        self._lead = self._all[(self._full + self._windows)[0]]
        self._updating = False
        # Of each request with a hit: its first block and its end.
        self._hits: dict[str, tuple[int, int]] = {}

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

    def announced(self, request: Request) -> None:
        """A request has arrived, and waits for its turn. Which blocks of a window it will need is not known yet."""
        for part, reads in zip(self._all, self._reads, strict=True):
            if not reads:
                part.announced(request)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that all groups hold; None: ask again."""
        if not self._config.loads or request.skip_reading_prefix_cache or self._updating:
            return 0, False
        if any(part.is_refused(request) for part in self._all):
            return 0, False
        # vLLM's own hit ends on a boundary, and one token is left to compute.
        first, limit = computed_tokens // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        end = self._common(request, first, limit)
        if end is None:
            return None, False
        if end <= first:
            self._release(request)
            return 0, False
        self._hits[request.request_id] = (first, end)
        return (end - first) * self._block_tokens, True

    def _common(self, request: Request, first: int, limit: int) -> int | None:
        """The highest of `TRIES_MAX` boundaries up to `limit` whose blocks every group has and has leased; `first` if there is
        none; None: ask again."""
        end = limit
        for group in self._full:
            hits = self._all[group].look(request, first, limit - first) if limit > first else 0
            if hits is None:
                return None
            end = min(end, first + hits)
        for _ in range(TRIES_MAX):
            asked = end
            for group in self._windows:
                start = self._start(group, first, end)
                hits = self._all[group].look(request, start, end - start) if end > first else 0
                if hits is None:
                    return None
                # A boundary beyond a missing block reads it, as far as this one does.
                end = start + hits
                if end < asked:
                    break
            if end == asked:
                return end
        return first

    def _start(self, group: int, first: int, end: int) -> int:
        """The first block of a group that a hit up to `end` loads; vLLM has those before `first`."""
        reads = self._reads[group]
        return max(first, end - reads) if reads else first

    def _release(self, request: Request) -> None:
        for part in self._all:
            part.release(request)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has allocated blocks and says how many external tokens it wants: all of the hit, or none."""
        hit = self._hits.pop(request.request_id, None)
        if hit is None:
            return
        if not external_tokens:
            self._release(request)
            return
        first, end = hit
        ids = blocks.get_block_ids()
        starts = [self._start(group, first, end) for group in range(len(self._all))]
        # A block that vLLM has not zeroed, because it is to be loaded, and that no group would load.
        strays = any(any(ids[group][first:start]) for group, start in enumerate(starts))
        whole = external_tokens == (end - first) * self._block_tokens and not strays
        fresh = [[block for block in each[first:end] if block] for each in ids]
        for part in self._all:
            # Before the loads, which may begin as soon as they are posted.
            part.overwrite([block for each in fresh for block in each])
        for group, part in enumerate(self._all):
            if whole:
                part.plan(request, starts[group], ids[group][starts[group] : end])
            else:
                part.lose(request, fresh[group])

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
        metadata, *others = [part.step(output) for part in self._all]
        metadata.others = others
        return metadata

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
        """vLLM's events of what has changed in the cache, of every group."""
        return [event for part in self._all for event in part.take_events()]

    @property
    def lingers(self) -> bool:
        """Whether an engine without requests is to step on for them."""
        return any(part.lingers for part in self._all)

    def blocks_cleared(self) -> None:
        """vLLM has told others that every block is gone."""
        for part in self._all:
            part.blocks_cleared()

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        for part in self._all:
            part.shutdown()
