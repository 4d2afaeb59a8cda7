"""The scheduler role: what to ask for, what to load, what to save, and what to give up before it is overwritten.

The cost of a step does not depend on how long or how many the running requests are: a decoding request is looked at
only in the step that may fill its next block (`_due`).
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from pillion import _shim, vllm_compat
from pillion.adapters import Adapters
from pillion.checking import Check
from pillion.config import Config
from pillion.metadata import PillionMetadata
from pillion.tracked import Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Requests that wait for their turn and are announced. What is fetched for more of them would push each other out of memory, and
# their keys fill the log arena.
ANNOUNCED_MAX = 64
# `auto` loads synchronously when the copy is predicted to take no longer than this: on a host, a decode step or two.
AUTO_SYNC_MS = 10.0
# On a GPU 4 GB: the step computes layer by layer behind the copy, and an asynchronous load costs its request a step more.
# Measured beside eleven other requests: 912 tokens/s so, 886 with a limit of 2 ms (benches/README.md).
AUTO_SYNC_GPU_MS = 100.0
# Bytes copied in a millisecond, for that prediction: by a host at worst 2 GB/s; over PCIe 40 GB/s, where scattered pieces
# of 32 KiB were measured at 42 and whole blocks at 54.
HOST_BYTES_PER_MS = 2_000_000
GPU_BYTES_PER_MS = 40_000_000
# On a GPU whose engine copies for itself, measured: 1.3 GB in 90 ms.
ENGINE_BYTES_PER_MS = 15_000_000
# What one step of a GPU takes in before it is full: new tokens to compute, and what synchronous loads copy. Requests that
# arrive together then begin one after the other instead of all waiting for the last one's KV and prompt: first tokens of
# conversations came after 190 ms so, 288 before (benches/README.md).
STEP_NEW_TOKENS = 512
STEP_COPY_MS = 10.0
# Beside a full step a load begins in the background, so that a later step need not wait for it: so many at once, since each
# holds blocks that nothing computes on. Measured: 914 tokens/s with none, 932 with 1, 889 with 3.
BACKGROUND_LOADS = 1
# Bytes of each part in which blocks are loaded that are still on their way: a millisecond on the wire, and enough for a copy.
PART_BYTES = 16 << 20
# How long a request waits for the digest of its adapter before it goes without the cache: some hundred MB are read meanwhile.
ADAPTER_WAIT_S = 0.2
logger = vllm_compat.init_logger("vllm.pillion")


class Scheduler:
    """State of the scheduler role."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._block_tokens = vllm_compat.block_tokens(kv_cache_config)
        self._steps_in_flight = vllm_compat.steps_in_flight(vllm_config)
        self._tokens_per_step = vllm_compat.tokens_per_step(vllm_config)
        on_gpu = vllm_compat.on_gpu()
        # vLLM takes back what a step computed upon blocks that were not loaded, and not what the step behind it did, which is
        # in flight by then. On a GPU whose sidecar copies, the engine's stream goes on over whole loads alone.
        self._never_sync = self._steps_in_flight > 1 and (not on_gpu or config.copier(on_gpu) == "engine")
        if self._never_sync and config.load == "sync":
            logger.warning(
                "pillion: pillion.load=sync has no effect beside asynchronous scheduling where %s: if a load failed, vLLM "
                "would emit a token computed without its KV. Loads are asynchronous; --no-async-scheduling changes that",
                "this engine copies for itself" if on_gpu else "KV lies in host memory",
            )
        ms, bytes_per_ms = (AUTO_SYNC_GPU_MS, GPU_BYTES_PER_MS) if on_gpu else (AUTO_SYNC_MS, HOST_BYTES_PER_MS)
        if on_gpu and config.copier(on_gpu) == "engine":
            bytes_per_ms = ENGINE_BYTES_PER_MS
        block_bytes = vllm_compat.block_bytes(kv_cache_config)
        # The most blocks that `auto` loads synchronously beside other requests.
        self._sync_blocks = int(ms * bytes_per_ms) // block_bytes
        # Blocks of synchronous loads after which a step takes no more of them; `None`: no end.
        self._step_blocks_max = int(STEP_COPY_MS * bytes_per_ms) // block_bytes if on_gpu else None
        # Blocks of this step's synchronous loads, and new tokens of its requests, so far.
        self._step_blocks = self._step_tokens = 0
        # Requests whose load goes on in the background.
        self._background: set[str] = set()
        self._run = secrets.token_bytes(16)
        self._session = _shim.SchedulerSession(
            config.socket,
            str(vllm_config.kv_transfer_config.engine_id),
            vllm_compat.world_size(vllm_config),
            self._run,
            config.query_timeout_us,
            config.copier(on_gpu) == "engine",
            on_gpu and not vllm_compat.zeroes_blocks(kv_cache_config),
            config.miss_wait_ms,
            self._part_blocks(vllm_config, block_bytes, config.copier(on_gpu)),
            vllm_compat.groups(kv_cache_config),
        )
        self._adapters = Adapters(self._run, vllm_compat.lora_form(vllm_config), self._disown)
        # How often the weights may have changed.
        self._weights = 0
        # Whether an update of them has begun and not ended: what is computed then belongs nowhere.
        self.updating = False
        # To which namespace belongs what vLLM holds; 0: not known yet.
        self._namespace = 0
        self._check = Check(self._block_tokens, config.check_every if config.loads and config.saves else 0)
        self._requests: dict[str, Tracked] = {}
        self._due: dict[int, list[Tracked]] = {}
        self._step = 0
        # Requests of the last step that are not over.
        self._running: set[str] = set()
        self._loads: list[tuple[str, bytes, bool]] = []
        self._lost: list[tuple[str, list[int], bool]] = []
        self._overwritten: list[int] = []
        # Blocks that do not hold the KV of their tokens: not loaded, disowned, or computed upon such ones. vLLM
        # may go on using them, other requests may find them in its own cache; nothing of them may be kept.
        self._broken = bytearray(kv_cache_config.num_blocks)
        self._any_broken = False
        # Requests that may hold one.
        self._suspects: set[Tracked] = set()
        self._say_notices()

    def _part_blocks(self, vllm_config: VllmConfig, block_bytes: int, copier: str) -> int:
        """Blocks of a part; 0: nothing is loaded while blocks are on their way, because it could not be, or must not fail."""
        may_fail = self._config.load != "sync" and vllm_compat.recomputes_failed_loads(vllm_config)
        return -(-PART_BYTES // block_bytes) if may_fail and copier == "sidecar" else 0

    # --- matching ---

    def announced(self, request: Request) -> None:
        """A request has arrived: what lies on a disk of its prompt is fetched while it waits for its turn."""
        if request.lora_request:
            self._adapters.look(request.lora_request)
        count = (request.num_tokens - 1) // self._block_tokens
        waiting = len(self._requests) - len(self._running)
        if not self._config.loads or request.skip_reading_prefix_cache or count <= 0 or waiting >= ANNOUNCED_MAX:
            return
        tracked = self._track(request)
        if self._append(tracked):
            self._session.hint(tracked.log, 0, count)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that the cache holds; None: ask again. Whoever asks starts anew."""
        tracked = self._track(request)
        if request.lora_request:
            # Its files may have changed while the request waited.
            self._adapters.look(request.lora_request)
        if not self._config.loads or request.skip_reading_prefix_cache or tracked.refused or self.updating:
            return 0, False
        first = computed_tokens // self._block_tokens
        # One token is left to compute, and a hit ends on a block's boundary.
        count = (request.num_tokens - 1) // self._block_tokens - first
        if count <= 0:
            return 0, False
        if not self._append(tracked):
            return (None if self._adapter_is_near(tracked) else 0), False
        hits = self._session.query(tracked.log, first, count)
        if hits < 0:
            return None, False
        if not hits:
            return self._miss(tracked)
        arriving = self._session.arriving(tracked.log)
        sync = self._synchronous(hits, request.request_id) and not arriving
        if sync and self._step_is_full():
            if self._config.load == "sync" or len(self._background) >= BACKGROUND_LOADS:
                tracked.hit = None
                return None, False
            sync = False
        # Blocks on their way cannot be compared yet.
        hits = hits if arriving else self._trim(tracked, first, hits)
        if not hits:
            self._session.release(tracked.log)
            return self._miss(tracked)
        tracked.hit = (first, hits, sync)
        return hits * self._block_tokens, not sync

    def _miss(self, tracked: Tracked) -> tuple[int, bool]:
        tracked.hit = None
        return 0, False

    def _trim(self, tracked: Tracked, first: int, hits: int) -> int:
        """The hit's blocks to load: all, or all but those that are computed to be compared with the kept ones."""
        namespace = self._session.namespace
        # Broken blocks before the hit would make every comparison fail.
        if not namespace or (first and self._any_broken):
            return hits
        return self._check.trim(tracked, first, hits, (namespace, tracked.fold), self._step)

    def _synchronous(self, blocks: int, req_id: str) -> bool:
        if self._never_sync:
            return False
        if self._config.load != "auto":
            return self._config.load == "sync"
        return blocks <= self._sync_blocks or not self._running - {req_id}

    def _step_is_full(self) -> bool:
        """Whether this step has taken in enough: the first request always fits."""
        most = self._step_blocks_max
        return most is not None and (self._step_blocks > most or self._step_tokens > STEP_NEW_TOKENS)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has allocated blocks and says how many external tokens it wants."""
        tracked = self._track(request)
        if tracked.hit is None:
            if request.request_id in self._background:
                # It has come back to be computed.
                self._background.discard(request.request_id)
                self._step_tokens += request.num_tokens - request.num_computed_tokens
            return
        (first, _, sync), tracked.hit = tracked.hit, None
        count = external_tokens // self._block_tokens
        if not count:
            self._session.release(tracked.log)
            return
        if sync:
            self._step_blocks += count
            self._step_tokens += request.num_tokens - (first + count) * self._block_tokens
        else:
            self._background.add(request.request_id)
        ids = blocks.get_block_ids()[0][first : first + count]
        tracked.loaded = ids
        self._overwritten += ids
        if self._session.saving:
            # Before the load, which may begin as soon as it is posted.
            self._session.overwrite(ids)
        plans = self._session.load(tracked.log, first, ids, self._step + 1, sync)
        if not plans:
            self._lost.append((request.request_id, ids, sync))
        self._loads += [(request.request_id, plan, sync) for plan in plans]

    # --- one step ---

    def step(self, output: SchedulerOutput) -> PillionMetadata:
        """Posts what this step saves and what it may overwrite. Called once, at the end of every schedule()."""
        self._step += 1
        self._follow_namespace()
        if self._check.goes_on:
            self._check.learn(self._session.stats(), self._step)
        step, session = self._step, self._session
        scheduled = output.num_scheduled_tokens
        ready = [tracked for tracked in self._due.pop(step, ()) if tracked.due == step]
        ready += self._take_blocks(output)
        if session.saving:
            self._cancel(output)
        if self._any_broken:
            self._follow_broken(scheduled)
        self._overwritten = []
        self._step_blocks = self._step_tokens = 0
        urgent = bool(self._loads)
        if self._config.saves:
            for tracked in ready:
                urgent |= self._save(tracked, scheduled, step)
        self._running = set(scheduled)
        session.end_step()
        self._say_notices()
        loads, self._loads = self._loads, []
        lost, self._lost = self._lost, []
        # Whatever failed in steps up to this one has been reported, and the saves posted until then are void.
        resolved = step - self._steps_in_flight
        return PillionMetadata(self._run, step, resolved, urgent or session.saving > 0, loads, lost, self._weights)

    def _take_blocks(self, output: SchedulerOutput) -> list[Tracked]:
        """Follows the block tables; returns the requests to look at although they are not due."""
        fresh: list[Tracked] = []
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                self._replace(tracked, new.block_ids[0], new.num_computed_tokens)
                if tracked.due != self._step:
                    fresh.append(tracked)
        cached = output.scheduled_cached_reqs
        for index, ids in enumerate(cached.new_block_ids):
            if not ids:
                continue
            req_id = cached.req_ids[index]
            tracked = self._requests.get(req_id)
            if req_id in cached.resumed_req_ids and tracked is not None:
                self._replace(tracked, ids[0], cached.num_computed_tokens[index])
                if tracked.due != self._step:
                    fresh.append(tracked)
                continue
            self._overwritten += ids[0]
            if tracked is not None:
                tracked.blocks += ids[0]
        return fresh

    def _replace(self, tracked: Tracked, ids: list[int], computed_tokens: int) -> None:
        tracked.blocks = list(ids)
        tracked.saved = tracked.found = computed_tokens // self._block_tokens
        tracked.found_in = self._step if tracked.found else 0
        tracked.sound = -1
        if self._any_broken:
            # Those that it found in vLLM's own cache may be; the others are written anew.
            self._suspects.add(tracked)
        self._overwritten += ids[tracked.saved :]

    def _cancel(self, output: SchedulerOutput) -> None:
        """Gives up unfinished saves whose source this step may overwrite."""
        copies = output.kv_cache_block_copies if hasattr(output, "kv_cache_block_copies") else None
        self._overwritten += [copy.dst_block_id for copy in copies or ()]
        self._overwritten += output.new_block_ids_to_zero or ()
        if self._overwritten:
            self._session.overwrite(self._overwritten)

    def _follow_broken(self, scheduled: dict[str, int]) -> None:
        """What is written anew is whole again; what is computed upon a broken block is broken."""
        broken, size = self._broken, self._block_tokens
        for block in self._overwritten:
            broken[block] = 0
        for tracked in list(self._suspects):
            tokens = scheduled.get(tracked.request.request_id)
            if tokens is None:
                continue
            start = tracked.request.num_computed_tokens
            end = start + tokens
            blocks, first = tracked.blocks, self._first_broken(tracked)
            if first * size >= start or start <= tracked.sound:
                # It reads nothing that is broken; a block that it does not fill now stays marked until it does.
                for block in blocks[first : end // size]:
                    broken[block] = 0
                tracked.sound = end
                if self._first_broken(tracked) == len(blocks):
                    self._suspects.discard(tracked)
            else:
                for block in blocks[start // size : -(-end // size)]:
                    broken[block] = 1

    def _first_broken(self, tracked: Tracked) -> int:
        """Blocks of a request before its first broken one."""
        broken = self._broken
        return next((place for place, block in enumerate(tracked.blocks) if broken[block]), len(tracked.blocks))

    def _save(self, tracked: Tracked, scheduled: dict[str, int], step: int) -> bool:
        """Saves the blocks that this step fills, and says when to look again."""
        request = tracked.request
        tokens = scheduled.get(request.request_id)
        if not tracked.live:
            return False
        if tokens is None or self.updating:
            self._look_again(tracked, step + 1)
            return False
        size = self._block_tokens
        computed = request.num_computed_tokens + tokens
        whole = self._first_broken(tracked) if tracked in self._suspects else len(tracked.blocks)
        full = min(computed // size, len(request.block_hashes), whole)
        posted = False
        checked = self._checked(tracked)
        again = 0 < tracked.found_in < step and checked is None
        due = (again or full > tracked.saved) and (checked is None or full >= checked[1])
        if due and self._append(tracked) and full <= tracked.appended and self._is_home():
            fresh = tracked.saved
            if checked is not None:
                posted = self._save_checked(tracked, *checked, step)
                fresh = checked[1]
            # Blocks that the request computed in an earlier step were offered then; offering them says nothing of their use.
            used = min(tracked.found, tracked.saved, full) if again else 0
            for first, end in ((0, used), (fresh, full)):
                if first < end:
                    posted |= self._session.save(tracked.log, first, tracked.blocks[first:end], step)
            tracked.saved = full
            if again:
                tracked.found_in = 0
        wait = 1
        if computed >= request.num_tokens and not tracked.found_in:
            missing = (tracked.saved + 1) * size - computed
            wait = max(1, -(-missing // self._tokens_per_step))
        self._look_again(tracked, step + wait)
        return posted

    def _checked(self, tracked: Tracked) -> tuple[int, int] | None:
        """Blocks of the request that are to be saved by themselves because they are compared, if they still can be."""
        span = self._check.span(tracked)
        if span is None or (span[0] == tracked.saved and tracked not in self._suspects):
            return span
        self._check.give_up(tracked)
        return None

    def _save_checked(self, tracked: Tracked, first: int, end: int, step: int) -> bool:
        posted = self._session.save(tracked.log, first, tracked.blocks[first:end], step, True)
        if posted:
            self._check.saved()
        else:
            self._check.give_up()
        return posted

    def _look_again(self, tracked: Tracked, step: int) -> None:
        if tracked.due != step:
            tracked.due = step
            self._due.setdefault(step, []).append(tracked)

    # --- requests ---

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = Tracked(request)
        return tracked

    def _append(self, tracked: Tracked) -> bool:
        """Brings the request's key log up to date; False while there is none to be had."""
        session = self._session
        if tracked.request.lora_request and not self._follow_adapter(tracked):
            return False
        hashes = tracked.request.block_hashes
        if tracked.appended and hashes[tracked.appended - 1 : tracked.appended] != [tracked.tail]:
            # vLLM has taken back tokens that were sampled, as between two inputs of a streaming session: a key that was written
            # is never changed, so the log begins anew.
            self._close(tracked)
            tracked.generation = -1
        if tracked.generation != session.generation:
            tracked.log = session.open(tracked.fold)
            tracked.generation = session.generation
            tracked.appended = tracked.saved = 0
            tracked.hit = None
        if tracked.log < 0:
            # Try again at the next occasion.
            tracked.generation = -1
            return False
        if len(hashes) > tracked.appended:
            tracked.appended = session.append(tracked.log, hashes, tracked.appended)
            tracked.tail = hashes[tracked.appended - 1] if tracked.appended else b""
        return True

    def _follow_adapter(self, tracked: Tracked) -> bool:
        """Whether keys of the request can be told: a log has those of one fold. Ranks may have replaced the adapter."""
        fold = self._adapters.fold(tracked.request.lora_request)
        if not fold:
            return False
        if fold != tracked.fold:
            self._close(tracked)
            tracked.fold, tracked.generation = fold, -1
        return True

    def _adapter_is_near(self, tracked: Tracked) -> bool:
        """Whether to ask again because the digest of the request's adapter is being computed."""
        lora = tracked.request.lora_request
        if lora is None or self._adapters.fold(lora) is not None:
            return False
        now = time.monotonic()
        if tracked.undigested_since is None:
            tracked.undigested_since = now
        return now - tracked.undigested_since < ADAPTER_WAIT_S

    def _close(self, tracked: Tracked) -> None:
        if tracked.log >= 0 and tracked.generation == self._session.generation:
            self._session.close(tracked.log)

    def finished(self, request: Request) -> None:
        """The request is over; its saves go on, its blocks may be reused."""
        self._running.discard(request.request_id)
        self._background.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            tracked.live = False
            self._check.give_up(tracked)
            self._suspects.discard(tracked)
            self._close(tracked)

    def loads_failed(self, block_ids: set[int]) -> None:
        """KV computed on blocks that were not loaded must never be kept: every unfinished save is given up.

        Of a request that holds such a block, everything from there on may have been computed upon it by now.
        """
        logger.warning("pillion: %d blocks could not be loaded and are computed again", len(block_ids))
        self._session.void_saves()
        self._check.give_up()
        self._any_broken = True
        for block in block_ids:
            self._broken[block] = 1
        for tracked in self._requests.values():
            tracked.saved, tracked.sound = 0, -1
            tracked.refused |= not block_ids.isdisjoint(tracked.loaded)
            first = self._first_broken(tracked)
            if first < len(tracked.blocks):
                self._suspects.add(tracked)
            for block in tracked.blocks[first:]:
                self._broken[block] = 1

    # --- what KV is computed with ---

    def weights_may_have_changed(self) -> None:
        """Every rank says anew what it computes with, which decides the namespace: that of before, if nothing changed.

        Until then the session is bound to none: queries wait for a moment, and what could be saved waits.
        """
        self._weights += 1
        self._namespace = 0
        self._adapters.may_differ()
        self._disown()
        self._session.weights(self._weights)

    def adapter_loads(self, request: LoRARequest) -> None:
        """Every rank is about to load an adapter."""
        self._adapters.loads(request)

    def adapter_removed(self, number: int) -> None:
        """No rank holds an adapter any more."""
        self._adapters.forget(number)

    def _follow_namespace(self) -> None:
        """Notices that ranks compute with something else than before although nothing was seen to change it."""
        namespace = self._session.namespace
        if namespace in (0, self._namespace):
            return
        if self._namespace:
            logger.warning(
                "pillion: the ranks compute with other weights than before, and nothing that could be seen changed them: "
                "blocks from before are not kept. Reset vLLM's prefix cache when weights are written behind its back"
            )
            self._disown()
        self._namespace = namespace

    def _is_home(self) -> bool:
        """Whether what vLLM holds belongs where a save would go. A new connection may be bound to another namespace; only the
        first one keeps saves until it is bound to any."""
        namespace = self._session.namespace
        return namespace == self._namespace and bool(namespace or not self._weights)

    def _disown(self) -> None:
        """Nothing that was computed, or loaded, until now is kept.

        A sleep discards the KV memory next, so no save may read it any more. Where vLLM's own cache could not be reset,
        requests still find blocks of before in it.
        """
        self._session.void_saves()
        self._check.forget()
        self._broken = bytearray(b"\1") * len(self._broken)
        self._any_broken = True
        for tracked in self._requests.values():
            tracked.hit, tracked.saved, tracked.sound = None, 0, -1
            self._suspects.add(tracked)

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        self._session.disconnect()

    def _say_notices(self) -> None:
        for notice in self._session.take_notices():
            logger.warning("pillion: %s", notice)
