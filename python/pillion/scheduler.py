"""The scheduler role: hands the numbers of vLLM's requests and steps to the policy, and carries out its decisions in vLLM.

Every rule of queries, loads, saves and trusted blocks is in the policy, in Rust (`connector-shim/src/core/policy`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pillion import _shim, groups, handover, hasher, vllm_compat
from pillion.config import Config
from pillion.events import Events
from pillion.metadata import PillionMetadata, StepLoads, StepOutput
from pillion.numbers import Numbers, StepPart
from pillion.records import Records
from pillion.state import SOURCES, UNKEPT, Counts, State, name_counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# The policy's number for any request not followed by it.
STRANGER = -1
# The most steps with remembered requests: the policy waits for the outputs of fewer.
STEPS_MAX = 64
logger = vllm_compat.init_logger("vllm.pillion")


class Scheduler:
    """vLLM's requests by the policy's numbers, and the metadata for the ranks in each step."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, beside_others: bool = False
    ) -> None:
        """`beside_others`: another connector is beside this one."""
        parts = groups.split_groups(kv_cache_config)
        # By group. Ranks name a step by the run of the first one.
        self._runs = [secrets.token_bytes(16) for _ in parts]
        self._vllm_config = vllm_config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._ranks = vllm_compat.world_size(vllm_config)
        self._beside_others = beside_others
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self._has_own_keys = hasher.has_second_digest(algorithm)
        self._policy = groups.make_policy(config, vllm_config, kv_cache_config, self._runs, beside_others)
        self._adapters = _shim.Adapters(self._runs[0], vllm_compat.lora_form(vllm_config))
        # vLLM's groups, those without a session last.
        self._order = groups.order_groups(parts[0][0])
        self._windows = any(vllm_compat.find_window(view) for _, view in parts)
        # The groups with states, by vLLM's number: their places in the policy.
        self._states = {group.number: group.place for group, view in parts if vllm_compat.state_tokens(view)}
        self._events: list[Events] = []
        if vllm_compat.kv_events_are_on(vllm_config):
            self._events = [Events(group, view) for group, view in parts]
        self._records = Records(config, self._engine_id)
        self._pool: BlockPool | None = None
        # The unfinished requests: the policy's number of each, and each by its number.
        self._numbers: dict[str, int] = {}
        self._requests: dict[int, Request] = {}
        # Finished requests: the policy's number, and the next step at the request's end.
        self._over: dict[str, tuple[int, int]] = {}
        # Requests computed by the last step, and how many of these are over.
        self._running: dict[str, int] = {}
        self._left = 0
        # The same of the steps without a taken output, and the loads of these, by group.
        self._open: dict[int, dict[str, int]] = {}
        self._open_loads: dict[int, list[StepLoads]] = {}
        self._step = 1
        self._say()

    @property
    def state(self) -> State:
        """The sidecar's present service to the engine."""
        return self._policy.state

    # --- requests ---

    def ranks_copy(self) -> None:
        """Notes that ranks copy for themselves: the sidecar could not, and the user left it open."""
        self._policy.ranks_copy()

    def announced(self, request: Request) -> None:
        """Notes a request that has arrived, and waits for its turn."""
        if self._policy.look_for_verdict():
            self._forget_cached()
        if request.lora_request:
            self._look(request.lora_request)
        if self._policy.may_announce(len(self._running) - self._left):
            self._policy.announce(self._follow(request))

    def _follow(self, request: Request) -> int:
        """The policy's number of a request, followed from now on if not before."""
        number = self._numbers.get(request.request_id)
        if number is not None:
            return number
        awaits, hands_over = handover.awaits_prompt(request), handover.hands_over(request)
        # Beside another connector, routers' params about prompts of other engines are for that one.
        routed = not self._beside_others
        number = self._policy.follow_request(
            request.num_prompt_tokens,
            not request.skip_reading_prefix_cache and (routed or not awaits),
            handover.count_awaited(request, request.num_prompt_tokens) if routed and awaits else None,
            routed and hands_over,
            self._now(request),
            None if vllm_compat.has_extra_keys(request) else request.all_token_ids,
        )
        self._numbers[request.request_id] = number
        self._requests[number] = request
        hints = handover.hints_of(request)
        if hints != (None, None):
            self._policy.follow_hints(number, *hints)
        return number

    def _now(self, request: Request) -> Numbers:
        """A request's present numbers for the policy."""
        lora = request.lora_request
        keys = hasher.keys_of(request) if self._has_own_keys else request.block_hashes
        adapter = self._adapters.word(vllm_compat.adapter_words(lora)) if lora else None
        return request.num_tokens, request.num_computed_tokens, request.num_preemptions, adapter, keys

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens in the cache beyond `computed_tokens`, and True if they come asynchronously; None: ask again."""
        if request.lora_request:
            self._look(request.lora_request)
        number = self._follow(request)
        running = len(self._running) - self._left
        alone = running == 0 or (running == 1 and request.request_id in self._running)
        found = self._policy.matched(number, self._now(request), computed_tokens, alone)
        if self._states and (junction := self._policy.junction(number)):
            vllm_compat.make_state_at(request, junction)
        return found

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plans the load into the blocks allocated by vLLM, for the number of external tokens that it wants."""
        number = self._follow(request)
        wanted = self._policy.allocated(number, self._now(request), external_tokens)
        if wanted is not None:
            ids = self._ordered(blocks.get_block_ids())
            self._policy.load_blocks(number, [each[first:end] for each, (first, end) in zip(ids, wanted, strict=False)])

    def _ordered(self, blocks: Sequence[list[int]]) -> Sequence[list[int]]:
        """Blocks by vLLM's groups, those of groups without a session last."""
        return blocks if self._order is None else [blocks[number] for number in self._order]

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Tokens of the last planned load by the place of their hit; empty for unknown places."""
        found = self._policy.sources(self._numbers.get(request.request_id, 0), tokens)
        return name_counts(SOURCES, found) if found else {}

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        hits, unkept = name_counts(SOURCES, self._policy.take_hit_tokens()), name_counts(UNKEPT, self._policy.take_unkept())
        return {"hit_tokens": hits, "records": self._records.take_ends(), "unkept": unkept, "hints": self._records.take_hints()}

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Ends a request. Returns the answer to its router, if another engine goes on with it."""
        self._left += request.request_id in self._running
        number = self._numbers.pop(request.request_id, None)
        if number is None:
            # It was aborted before it was scheduled.
            return None
        kept, blocks = self._policy.end_request(number, self._now(request), *vllm_compat.answer_end(request))
        self._say()
        del self._requests[number]
        self._over[request.request_id] = (number, self._step)
        for events in self._events:
            events.ended(number, request)
        if self._pool is not None and blocks:
            self._policy.held([block for block in blocks if vllm_compat.hold_block(self._pool, block)])
        return None if kept is None else handover.answer_router(request, self._engine_id, kept, self._vllm_config)

    # --- loads ---

    def loads_failed(self, block_ids: set[int]) -> None:
        """Notes failed blocks: vLLM computes them again, or ends their requests."""
        self._progress()
        self._policy.loads_failed(list(block_ids))
        self._say()

    def requests_failed(self, req_ids: set[str]) -> None:
        """Notes failed requests: vLLM computes them from their beginning, as if the loads of all their blocks had failed."""
        self._progress()
        self._policy.requests_failed(self._known(req_ids))
        self._say()

    def loads_ended(self, req_ids: Iterable[str], failed: Collection[int]) -> None:
        """Notes the end of these requests' loads on every rank, without the `failed` blocks."""
        self._policy.loads_ended(self._known(req_ids), list(failed))

    def _known(self, req_ids: Iterable[str]) -> list[int]:
        return [number for req_id in req_ids if (number := self._numbers.get(req_id)) is not None]

    def _progress(self) -> None:
        """Reports the progress of requests before a request falls back: vLLM frees the blocks before a window."""
        if self._windows:
            self._policy.progress([(number, request.num_computed_tokens) for number, request in self._requests.items()])

    # --- one step ---

    def step(self, output: SchedulerOutput) -> PillionMetadata:
        """Posts this step's saves and possible overwrites. Called once, at the end of every schedule()."""
        scheduled = output.num_scheduled_tokens
        begun, grown = self._tables(output)
        copied, filled = list(getattr(output, "kv_cache_block_copies", None) or ()), output.new_block_ids_to_zero or []
        offered = self._offered(output) if self._states else []
        due, released, contradicted, count = self._policy.begin_step(
            begun, grown, filled, self._encoded(output), offered, copied
        )
        self._give_back(released)
        if contradicted:
            self._forget_cached()
        numbers = []
        for number in due:
            request = self._requests[number]
            numbers.append((number, scheduled.get(request.request_id), self._now(request)))
        named = vllm_compat.next_reused(self._pool, count) if count and self._pool is not None else []
        told = self._policy.end_step(numbers, len(scheduled), named)
        self._running, self._left = scheduled, 0
        self._say()
        return self._metadata(*told)

    def _tables(self, output: SchedulerOutput) -> tuple[list[Any], list[Any]]:
        """Requests with a new block table, and further blocks of others."""
        numbers, begun, grown = self._numbers, [], []
        for new in output.scheduled_new_reqs:
            begun.append(self._begun(new.req_id, new.block_ids, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for index, ids in enumerate(cached.new_block_ids):
            if not ids:
                continue
            req_id = cached.req_ids[index]
            if req_id in cached.resumed_req_ids and req_id in numbers:
                begun.append(self._begun(req_id, ids, cached.num_computed_tokens[index]))
            else:
                grown.append((numbers.get(req_id, STRANGER), self._ordered(ids)))
        return begun, grown

    def _offered(self, output: SchedulerOutput) -> list[tuple[int, int, int, int]]:
        """The states made by the step for the requests that it computes. vLLM has taken back blocks of any other request."""
        numbers, scheduled = self._numbers, output.num_scheduled_tokens
        return [
            (numbers[req_id], self._states[group], block, boundary)
            for req_id, states in vllm_compat.offered_states(output).items()
            if req_id in numbers and req_id in scheduled
            for group, block, boundary in states
            if group in self._states
        ]

    def _begun(self, req_id: str, blocks: Any, computed_tokens: int) -> tuple[int, Any, int, Numbers | None]:
        number = self._numbers.get(req_id)
        if number is None:
            # A request without a number writes, too.
            return STRANGER, self._ordered(blocks), computed_tokens, None
        request = self._requests[number]
        if request.lora_request:
            # Ranks load its adapter in this step, unless they hold it.
            self._look(request.lora_request)
        if request.mm_features:
            places = [(media.identifier, media.mm_position.offset, media.mm_position.length) for media in request.mm_features]
            self._policy.follow_media(number, places)
        return number, self._ordered(blocks), computed_tokens, self._now(request)

    def _encoded(self, output: SchedulerOutput) -> list[str]:
        """Outputs of encoders in the step, by vLLM's identifiers."""
        inputs = getattr(output, "scheduled_encoder_inputs", None) or {}
        return [
            self._requests[number].mm_features[place].identifier
            for req_id, places in inputs.items()
            if (number := self._numbers.get(req_id)) is not None
            for place in places
        ]

    def _metadata(
        self,
        step: int,
        parts: list[StepPart],
        fills_tail: bool,
        asks: bool,
        open_loads: list[int],
        passed: list[int],
        weights: int,
    ) -> PillionMetadata:
        """The metadata for the ranks, by group."""
        self._step = step + 1
        self._open[step] = self._running
        if len(self._open) > STEPS_MAX:
            self._forget_steps(next(iter(self._open)))
        if len(self._open_loads) > len(open_loads):
            self._open_loads = {each: self._open_loads[each] for each in open_loads}
        made = []
        for group, (run, (loads, lost, urgent)) in enumerate(zip(self._runs, parts, strict=True)):
            metadata = PillionMetadata(run, step, urgent, not self._running, asks, passed=passed, weights=weights)
            metadata.fills_tail = fills_tail
            metadata.loads = [(self._requests[number].request_id, plan, sync) for number, plan, sync in loads]
            metadata.lost = [(self._requests[number].request_id, blocks, sync) for number, blocks, sync in lost]
            metadata.open_loads = [self._open_loads[each][group] for each in open_loads]
            made.append(metadata)
        if any(metadata.loads or metadata.lost for metadata in made):
            self._open_loads[step] = [StepLoads(step, list(metadata.loads), list(metadata.lost)) for metadata in made]
        made[0].others = made[1:]
        return made[0]

    def accepts(self, output: StepOutput) -> None:
        """Notes a step's output taken by vLLM, returned by every rank or not."""
        if output.ranks != self._ranks or output.run != self._runs[0]:
            return
        scheduled = {}
        if self._policy.passes_over(output.step):
            self._progress()
            scheduled = {step: self._all_known(req_ids) for step, req_ids in self._open.items()}
        self._policy.accept_step(output.step, scheduled)
        self._forget_steps(output.step)
        if scheduled:
            self._say()

    def _forget_steps(self, last: int) -> None:
        """Forgets the requests of the steps up to this one."""
        self._open = {step: req_ids for step, req_ids in self._open.items() if step > last}
        if self._over:
            self._over = {req_id: known for req_id, known in self._over.items() if known[1] > last}

    def _all_known(self, req_ids: Iterable[str]) -> list[int]:
        """The numbers of requests computed by a step, including finished ones."""
        known = [self._numbers.get(req_id) or self._over.get(req_id, (None,))[0] for req_id in req_ids]
        return [number for number in known if number is not None]

    def _say(self) -> None:
        """Logs the policy's messages, and keeps its records with the outcomes of hints."""
        notices, remarks, records, hints = self._policy.take_notices()
        for notice in (*notices, *self._adapters.take_notices()):
            logger.warning("pillion: %s", notice)
        for is_error, text, number in remarks:
            if number is not None:
                text %= getattr(self._requests.get(number), "request_id", number)
            (logger.error if is_error else logger.warning)("pillion: %s", text)
        for record in records:
            request = self._requests[record[0]]
            self._records.keep(request.request_id, getattr(request, "trace_headers", None), record)
        for number, ends in hints:
            self._records.end_hints(number, ends)

    # --- vLLM's blocks ---

    def bind(self, pool: BlockPool) -> None:
        """Takes the pool of the engine's blocks."""
        self._pool = pool

    def clears_blocks(self) -> None:
        """Gives held blocks back before a reset of the pool, which needs all blocks free."""
        self._give_back(self._policy.release_held())

    def _give_back(self, blocks: list[int]) -> None:
        if self._pool is not None and blocks:
            vllm_compat.free_blocks(self._pool, blocks)

    def _forget_cached(self) -> None:
        """Removes all blocks from vLLM's own prefix cache: some were loaded, and may be wrong."""
        if self._pool is not None:
            vllm_compat.forget_cached(self._pool)

    # --- KV events ---

    def take_events(self) -> list[Any]:
        """vLLM's events of changes in the cache; empty if vLLM publishes none."""
        return [event for events in self._events for event in events.take(self._policy, self._requests)]

    @property
    def lingers(self) -> bool:
        """True if an engine without requests must step on for events."""
        return bool(self._events) and self._policy.lingers()

    def blocks_cleared(self, done: bool) -> None:
        """Notes vLLM's reset of the pool, the users' sign of changed weights. `done`: routers have forgotten all blocks."""
        if done:
            self._policy.blocks_cleared()
        self.weights_may_have_changed()

    # --- weights and adapters ---

    @property
    def updating(self) -> bool:
        """True between begin and end of an update of the weights: KV computed meanwhile has no namespace."""
        return self._policy.updating

    @updating.setter
    def updating(self, updating: bool) -> None:
        self._policy.update(updating)

    def weights_may_have_changed(self) -> None:
        """Has every rank state its weights again, and so the namespace decided: the one of before, if nothing changed.

        Until then the session has no namespace: queries wait for a moment, and saves wait.
        """
        self._adapters.may_differ()
        self._progress()
        self._policy.weights_may_have_changed()

    def adapter_loads(self, request: LoRARequest) -> None:
        """Notes that every rank is about to load an adapter."""
        if self._adapters.loads(vllm_compat.adapter_words(request)):
            self._policy.disown()

    def adapter_removed(self, number: int) -> None:
        """Notes that no rank holds an adapter any more."""
        if self._adapters.forget(number):
            self._policy.disown()

    def _look(self, adapter: LoRARequest) -> None:
        """Compares the adapter's files with those of before; ranks may hold other bytes than these."""
        if self._adapters.look_at(vllm_compat.adapter_words(adapter)):
            self._policy.disown()

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        self._policy.disconnect()
        self._records.close()
