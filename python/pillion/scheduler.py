"""The scheduler role: what vLLM's scheduler calls, in the order of a step.

What to ask for and load is [pillion.matching][]'s, how much at once [pillion.pacing][]'s, what to save [pillion.saving][]'s,
and which blocks hold what they should [pillion.proof][]'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pillion import _shim, groups, handover, vllm_compat
from pillion.adapters import Adapters
from pillion.checking import Check
from pillion.config import Config, ConfigError
from pillion.events import Events
from pillion.groups import ALONE, Group
from pillion.held import Held
from pillion.matching import Matching
from pillion.metadata import PillionMetadata, StepLoads, StepOutput
from pillion.others import Others
from pillion.pacing import Pacing
from pillion.proof import Passed, Proof
from pillion.saving import Saving
from pillion.state import Source, State
from pillion.tracked import Requests, Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = vllm_compat.init_logger("vllm.pillion")


class Scheduler:
    """State of the scheduler role."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        group: Group = ALONE,
        proof: Proof | None = None,
        beside_others: bool = False,
    ) -> None:
        """Of an engine with one cache group, or of one `group` of several, which `kv_cache_config` then describes alone. The
        groups share a `proof`. `beside_others`: another connector is beside this one."""
        self._recomputes = vllm_compat.recomputes_failed_loads(vllm_config)
        if config.strict_tokens is not None and (group.several or self._recomputes):
            raise ConfigError(
                "pillion.strict_tokens needs loads that fail to end their requests: set kv_load_failure_policy to fail and "
                "serve a model with one cache group, or leave the option out"
            )
        if not self._recomputes and config.strict_tokens is None and config.loads:
            logger.warning(
                "pillion: a request whose blocks cannot be loaded will end with an error: set kv_load_failure_policy to "
                "recompute in --kv-transfer-config"
            )
        self._config = config
        on_gpu = vllm_compat.on_gpu()
        block_tokens = vllm_compat.block_tokens(kv_cache_config)
        self._pacing = Pacing(config, vllm_config, vllm_compat.block_bytes(kv_cache_config))
        self._run = secrets.token_bytes(16)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._block_tokens = block_tokens
        session = self._session = _shim.SchedulerSession(
            config.socket,
            group.engine(self._engine_id),
            vllm_compat.world_size(vllm_config),
            self._run,
            config.query_timeout_us,
            config.copier(on_gpu) == "engine",
            on_gpu and not vllm_compat.zeroes_blocks(kv_cache_config),
            # A set waits for no producer, and no step for a set.
            None if group.several else config.miss_wait_ms,
            self._pacing.part_blocks,
            0 if group.several else self._pacing.whole_blocks,
            vllm_compat.groups(kv_cache_config),
            config.handover_wait_ms,
            config.promise_wait_ms,
        )
        self._adapters = Adapters(self._run, vllm_compat.lora_form(vllm_config), lambda: self._saving.disown())
        window = vllm_compat.window(kv_cache_config)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self._proof = proof = proof or Proof(beside_others=beside_others)
        self._beside_others = beside_others
        self._others = Others([block_tokens]) if beside_others and not group.several else None
        self._ranks = vllm_compat.world_size(vllm_config)
        self._requests = requests = Requests(
            session, self._adapters, block_tokens, config.saves, proof.may_keep, window, group, algorithm, not beside_others
        )
        # A block fewer of one group would be another hit than that of the others. A drafter's KV may differ under one key.
        comparable = not group.several and not vllm_compat.drafts_from_hidden_states(vllm_config)
        checks = config.loads and config.saves and comparable
        self._check = check = Check(block_tokens, config.check_every if checks else 0, config.check_per_mille)
        self._matching = Matching(
            session,
            requests,
            self._pacing,
            check,
            block_tokens,
            bool(window),
            vllm_compat.drops_last_block(vllm_config),
            config.strict_tokens,
            group.number,
        )
        tokens_per_step = vllm_compat.tokens_per_step(vllm_config)
        events = self._events = None
        if vllm_compat.kv_events_are_on(vllm_config):
            events = self._events = Events(session, vllm_compat.BlockEvents(kv_cache_config, group.number), algorithm)
        part_blocks = self._pacing.blocks_of_part
        resuming = groups.resuming(group, kv_cache_config, config.checkpoint_tokens)
        self._saving = Saving(session, requests, check, proof, block_tokens, tokens_per_step, part_blocks, resuming, events)
        self._held = Held(session)
        # Whether an update of the weights has begun and not ended: what is computed then belongs nowhere.
        self.updating = False
        # The step that vLLM schedules, and the blocks that its loads write.
        self._next = PillionMetadata(self._run, 1)
        self._loaded: list[int] = []
        # The loads of steps whose output vLLM has not taken.
        self._open_loads: list[StepLoads] = []
        # Passed-over steps, each with the first step to name it to the ranks. A rank may never begin that step, or tell nothing
        # with it: later steps name the passed-over one, too, until vLLM has taken the output of one of them.
        self._passed: dict[int, int] = {}
        # Requests that begin in that step, with their computed tokens.
        self._begun: list[tuple[Tracked, int]] = []
        self._say_notices()

    @property
    def state(self) -> State:
        """What the engine gets of the sidecar."""
        if not self._session.connected:
            return "away"
        if self._proof.stalled:
            return "unaccepted"
        return "serving" if self._session.namespace else "unbound"

    # --- requests ---

    def ranks_copy(self) -> None:
        """Ranks copy for themselves, where the sidecar could not and the user left it open."""
        self._pacing.ranks_copy()

    def announced(self, request: Request, blocks: range | None = None) -> None:
        """A request has arrived, and waits for its turn. It will need its whole prompt, or these `blocks` of it."""
        if self._check.goes_on:
            # A verdict may have come since the last step, and vLLM looks for the request in its own cache before the next one.
            self._session.end_step()
            self._follow_check()
        self._requests.look(request)
        brought = self._others is not None and self._others.brings(request)
        fetches = self._config.loads and not request.skip_reading_prefix_cache and not brought
        # A promise is made as soon as the request's keys are told.
        if fetches or (self._config.saves and self._requests.hands_over(request)):
            self._matching.announce(request, blocks, fetches)

    def follow(self, request: Request) -> Tracked:
        """A request is about to be scheduled: what is computed for it is to be kept, whether it may find anything or not."""
        self._requests.look(request)
        return self._requests.follow(request)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that the cache holds, and whether they come asynchronously; None: ask again."""
        tracked = self.follow(request)
        if self._others:
            self._others.asked(request, computed_tokens)
            if self._others.brings(request):
                return 0, False
        if not self._config.loads or request.skip_reading_prefix_cache or self.updating:
            return 0, False
        return self._matching.match(tracked, computed_tokens, self._next.step)

    def put_off(self, request: Request) -> bool:
        """Whether the cache has answered, and the load waits for a step with room."""
        return self._requests.follow(request).put_off

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has allocated blocks and says how many external tokens it wants."""
        if self._others:
            self.overwrite(self._others.allocated(request, blocks, external_tokens))
        self._loaded += self._matching.load(request, blocks, external_tokens, self._next)

    def sources(self, request: Request, tokens: int) -> dict[Source, int]:
        """Where the tokens of a hit were found whose load was planned last; empty where that is not known."""
        tracked = self._requests.by_id.get(request.request_id)
        return tracked.sources if tracked and sum(tracked.sources.values()) == tokens else {}

    def take_hit_tokens(self) -> dict[Source, int]:
        """Tokens of hits that were loaded since the last call, by where they were found."""
        counted = self._matching.hit_tokens
        taken = dict(counted)
        counted.clear()
        return taken

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request is over; what its router is told, if another engine goes on with it."""
        self._pacing.forget(request)
        if self._others:
            self._others.forget(request)
        tracked = self._requests.end(request)
        if tracked is None:
            # It was aborted before it was scheduled.
            return None
        self._check.give_up(tracked)
        self._proof.forget(tracked)
        if not tracked.hands_over:
            return None
        self._held.hold(tracked.blocks[tracked.freed :])
        saved = tracked.saved if self._config.saves and self.state == "serving" else 0
        return handover.answer(request, self._engine_id, min(saved * self._block_tokens, request.num_prompt_tokens))

    def loads_failed(self, block_ids: set[int]) -> None:
        """vLLM computes these blocks again, or ends their requests."""
        if self._recomputes:
            logger.warning("pillion: %d blocks could not be loaded and are computed again", len(block_ids))
        elif self._config.strict_tokens is None:
            logger.warning(
                "pillion: %d blocks could not be loaded, which ends their requests: set kv_load_failure_policy to recompute",
                len(block_ids),
            )
        self._saving.fail(block_ids)

    def requests_failed(self, req_ids: set[str]) -> None:
        """vLLM computes these requests from their beginning: the loads of all their blocks count as failed."""
        failed = [tracked for req_id in req_ids if (tracked := self._requests.by_id.get(req_id))]
        if self._beside_others:
            # Without a load here, another connector's load has failed.
            failed = [tracked for tracked in failed if tracked.loaded]
        for tracked in failed:
            tracked.refused, tracked.loading = True, []
        if failed:
            self.loads_failed({block for tracked in failed for block in tracked.loaded})

    def loads_ended(self, req_ids: Iterable[str], failed: Collection[int]) -> None:
        """Every rank has said that these requests' loads have ended, without the `failed` blocks."""
        for req_id in req_ids:
            if tracked := self._requests.by_id.get(req_id):
                self._proof.loaded(tracked, failed)

    # --- one group of a set ---

    def look_ahead(self, request: Request, first: int, count: int) -> None:
        """Has the cache look for what the next `look` is likely to ask for, while other groups are asked."""
        self._matching.look_ahead(self._requests.follow(request), first, count)

    def look(self, request: Request, first: int, count: int) -> int | None:
        """How many of `count` blocks from `first` on the cache holds before one that it lacks; None: ask again."""
        return self._matching.look(self._requests.follow(request), first, count)

    def part_at(self, request: Request, tokens: int) -> None:
        """Others' prompts are kept as far as this, and the request's goes on: so may other ones from there."""
        self._requests.follow(request).parted = tokens // self._block_tokens

    def release(self, request: Request) -> None:
        """What was found of the request is not loaded."""
        self._matching.release(self._requests.follow(request))

    def is_refused(self, request: Request) -> bool:
        """Whether a load of the request has failed, so that the cache is not asked again."""
        return self._requests.follow(request).refused

    def steps_aside(self, request: Request) -> bool:
        """Whether vLLM is to pass over such a request this time."""
        return self._requests.follow(request).steps_aside()

    def overwrite(self, block_ids: list[int]) -> None:
        """Some group is about to write these blocks: whatever is being saved of them is given up."""
        self._loaded += block_ids
        if self._session.saving:
            self._session.overwrite(block_ids)

    def plan(self, request: Request, first: int, block_ids: list[int]) -> None:
        """Has the step load blocks from `first` on that were found."""
        tracked = self._requests.follow(request)
        self._matching.count(tracked, first, len(block_ids), len(block_ids) * self._block_tokens)
        self._matching.plan(tracked, first, block_ids, self._next, sync=False)

    def lose(self, request: Request, block_ids: list[int]) -> None:
        """Has the step report that these blocks cannot be loaded."""
        self.release(request)
        self._requests.follow(request).loaded = block_ids
        self._next.lost.append((request.request_id, block_ids, False))

    # --- one step ---

    def step(self, output: SchedulerOutput) -> PillionMetadata:
        """Posts what this step saves and what it may overwrite. Called once, at the end of every schedule()."""
        self.open_step(output)
        self.follow_step(output)
        return self.post_step(output)

    def open_step(self, output: SchedulerOutput) -> None:
        """A step waits for vLLM to take its output. A step without tokens does so, too: its output may tell ends of loads. Once
        for all groups, before `follow_step`."""
        begun: Collection[str] = output.scheduled_cached_reqs.resumed_req_ids
        if output.scheduled_new_reqs:
            begun = [*begun, *[new.req_id for new in output.scheduled_new_reqs]]
        self._proof.schedule(self._next.step, output.num_scheduled_tokens, begun)

    def follow_step(self, output: SchedulerOutput) -> None:
        """Follows the block tables, and gives up what the step may overwrite."""
        metadata, session = self._next, self._session
        self._saving.follow()
        self._follow_check()
        self._held.release_saved()
        self._begun, written = self._requests.take_blocks(output, metadata.step)
        loaded, self._loaded = self._loaded, []
        filled = loaded + [copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()]
        filled += output.new_block_ids_to_zero or ()
        if session.saving and (written or filled):
            session.overwrite(written + filled)
        if self._config.saves and (filled or written or self._begun or self._proof.encodes):
            self._follow_proof(output, filled, written)

    def _follow_check(self) -> None:
        """After a difference no request finds earlier blocks in vLLM's own cache: some were loaded, and may be wrong."""
        if self._saving.contradicts(self._next.step):
            self._held.forget_cached()

    def _follow_proof(self, output: SchedulerOutput, filled: list[int], written: list[int]) -> None:
        """Learns what the step fills by other means than computing tokens, and upon what its requests begin, before it computes
        tokens into the `written` blocks."""
        proof, by_id = self._proof, self._requests.by_id
        proof.overwrite(filled)
        for req_id, _, sync in self._next.loads:
            if sync and (tracked := by_id.get(req_id)):
                proof.load(tracked)
        for req_id, inputs in (getattr(output, "scheduled_encoder_inputs", None) or {}).items():
            if tracked := by_id.get(req_id):
                proof.encode(tracked.request.mm_features[index].identifier for index in inputs)
        for tracked, computed_tokens in self._begun:
            proof.begin(tracked, computed_tokens)
        proof.overwrite(written)

    def post_step(self, output: SchedulerOutput) -> PillionMetadata:
        """Posts what the step saves, once all groups have followed it."""
        metadata, session, scheduled = self._next, self._session, output.num_scheduled_tokens
        step = metadata.step
        self._next = PillionMetadata(self._run, step + 1)
        metadata.urgent = bool(metadata.loads)
        if self._open_loads:
            metadata.open_loads = self._open_loads
        if self._passed:
            metadata.passed = list(self._passed)
        if metadata.loads or metadata.lost:
            self._open_loads = [*self._open_loads, StepLoads(step, list(metadata.loads), list(metadata.lost))]
        if self._config.saves:
            # What the steps of an update compute is looked at once it has ended.
            metadata.urgent |= self._saving.save(self._begun, {} if self.updating else scheduled, step)
        self._requests.running = set(scheduled)
        metadata.idle = not scheduled
        metadata.asks = self._proof.waits or bool(self._open_loads)
        self._pacing.end_step(metadata.idle)
        session.end_step()
        if scheduled and self._events:
            self._events.worked = True
        self._say_notices()
        metadata.urgent |= session.saving > 0
        metadata.weights = self._saving.weights
        return metadata

    def accepts(self, output: StepOutput) -> None:
        """vLLM has taken the output of a step, which every rank has returned or not."""
        if self.is_whole(output):
            self.accept(output.step, self._proof.accept(output.step, self.requests))

    def is_whole(self, output: StepOutput) -> bool:
        """Whether every rank of this run has returned the output."""
        return output.ranks == self._ranks and output.run == self._run

    @property
    def requests(self) -> Collection[Tracked]:
        """Those that are not over."""
        return self._requests.by_id.values()

    def accept(self, step: int, passed: Passed) -> None:
        """vLLM has taken the output of `step`, and has `passed` over others before it."""
        if self._open_loads:
            self._open_loads = [loads for loads in self._open_loads if loads.step > step]
        if self._passed:
            self._passed = {lost: told for lost, told in self._passed.items() if told > step}
        if passed.steps:
            self._passed |= dict.fromkeys(passed.steps, self._next.step)
        self._saving.accept(step, passed)

    def take_unkept(self) -> dict[str, int]:
        """What was not kept since the last call, by why: steps that vLLM passed over, and blocks that no step had filled."""
        taken = dict(self._proof.counts)
        self._proof.counts.clear()
        return taken

    def _say_notices(self) -> None:
        for notice in self._session.take_notices():
            logger.warning("pillion: %s", notice)

    # --- vLLM's blocks ---

    def bind(self, pool: BlockPool) -> None:
        """The pool that the engine's blocks are of."""
        self._held.bind(pool)

    def clears_blocks(self) -> None:
        """vLLM is about to reset the pool, which it does only while no block is in use."""
        self._held.release()

    # --- what others are told of the blocks ---

    def take_events(self) -> list[Any]:
        """vLLM's events of what has changed in the cache, where vLLM publishes any."""
        return self._events.take() if self._events else []

    @property
    def lingers(self) -> bool:
        """Whether an engine without requests is to step on for them."""
        return self._events is not None and self._events.lingers

    def blocks_cleared(self) -> None:
        """vLLM has told others that every block is gone."""
        if self._events:
            self._events.cleared()

    # --- what KV is computed with ---

    def weights_may_have_changed(self) -> None:
        """Every rank says anew what it computes with, which decides the namespace: that of before, if nothing changed.

        Until then the session is bound to none: queries wait for a moment, and what could be saved waits.
        """
        self._adapters.may_differ()
        self._saving.rebind()

    def adapter_loads(self, request: LoRARequest) -> None:
        """Every rank is about to load an adapter."""
        self._adapters.loads(request)

    def adapter_removed(self, number: int) -> None:
        """No rank holds an adapter any more."""
        self._adapters.forget(number)

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        self._session.disconnect()
