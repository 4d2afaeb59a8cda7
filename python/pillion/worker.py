"""The worker role: exports KV memory, stores fence words, loads blocks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pillion import _shim, vllm_compat
from pillion.config import Config
from pillion.cuda import LayerWaits
from pillion.facts import Facts
from pillion.geometry import Geometry, GeometryError, describe, self_test
from pillion.groups import ALONE, Group
from pillion.live import Live
from pillion.metadata import Load, Lost, PillionMetadata, StepLoads, StepOutput
from pillion.models import Models
from pillion.sample import Sampler

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

SHARED_MEMORY = "/dev/shm"
MIB = 1 << 20
# A step without tokens waits so long for the end of a load: vLLM looks once in a millisecond.
LINGER_S = 0.002
# A sleep waits so long for copies of the KV memory. A load of an engine takes at most some hundred milliseconds.
REST_S = 10.0
# A step begun after a pause of so many seconds looks whether the weights are still the same. A look takes milliseconds on a
# GPU; on a CPU its kernels must be asked, for as long as a decoding step.
LOOK_AFTER_S_GPU = 1.0
LOOK_AFTER_S_CPU = 60.0
logger = vllm_compat.init_logger("vllm.pillion")


class Worker:
    """State of one rank's worker role. Without a session (memory impossible to share) every call does nothing."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        group: Group = ALONE,
        first: Worker | None = None,
        beside_others: bool = False,
    ) -> None:
        """`group`: the engine's only cache group, or one of several, with a `kv_cache_config` of the one group alone.
        `first`: the worker of the engine's first group; it shares its samples of the weights with this one."""
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._group = group
        self._beside_others = beside_others
        # Whether a failing load must fail as a whole: vLLM frees blocks before windows, and tells no groups apart.
        self._whole = group.several or bool(vllm_compat.window(kv_cache_config))
        self._session: _shim.WorkerSession | None = None
        # Why this rank has no session.
        self.out_reason = ""
        # Whether this process copies although the sidecar was to.
        self.copies = False
        # For the sidecar to compare with other engines: facts, and a digest of the live weights.
        self._facts: dict[str, str] = {}
        self._first = first or self
        self._sampler: Sampler | None = None
        self._live: Live | None = None
        self._live_weights: bytes | None = None
        # How often the weights may have changed so far, as the scheduler counts, and when this rank had its last step.
        self._weights = 0
        self._last_step_s = time.monotonic()
        # The namespace last named in the log.
        self._namespace = ""
        self._metadata: PillionMetadata | None = None
        # On a GPU only: the device, with everything in the order of its stream, and the waits between its layers.
        self._device: torch.device | None = None
        self._waits: LayerWaits | None = None
        # Asynchronous loads in progress, by operation. A request may have several.
        self._loading: dict[int, Load] = {}
        # Shows the memory to the sidecar again in the form of the first time.
        self._reconnect: Callable[[], None] | None = None
        # Blocks not brought by ended loads of such requests.
        self._lacking: dict[str, list[int]] = {}
        # Plans of this step's loads with waits between its layers.
        self._loaded_by_cuts: list[bytes] = []
        # Blocks not loaded: of loads with a waiting step, and of loads of waiting requests.
        self._failed: set[int] = set()
        self._failed_waiting: set[int] = set()
        self._ended: set[str] = set()
        # The exception being handled at this step's beginning: another one at its end comes from its own forward.
        self._handled: BaseException | None = None
        # Requests with a failed load, if vLLM must not go on upon their loaded blocks: it frees the blocks before windows.
        self._failed_requests: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Shows the KV memory to the sidecar: a GPU's as it is, a host's once it is moved to shared memory in place."""
        layers = vllm_compat.layers(self._kv_cache_config, kv_caches)
        try:
            served = "cuda" if vllm_compat.on_gpu() else "cpu"
            for name, tensor in layers:
                if tensor.device.type != served:
                    raise GeometryError(
                        f"layer {name} has its KV on a device of kind {tensor.device.type}, and only CUDA and CPU engines are "
                        "served: leave --kv-transfer-config out"
                    )
            heads = vllm_compat.heads(self._vllm_config, self._kv_cache_config)
            geometry = describe(layers, self._kv_cache_config.num_blocks, heads)
            self_test(layers, geometry, self._kv_cache_config.num_blocks)
            if unprepared := vllm_compat.prepare_scales(self._vllm_config, self._kv_cache_config):
                raise GeometryError(unprepared)
            if served == "cuda":
                self._register_gpu(layers, geometry)
                return
            ranks = vllm_compat.world_size(self._vllm_config)
            descriptors = [_share(storage, ranks) for storage in geometry.storages]
            self._identify(geometry)
            self._reconnect = lambda: self._connect(geometry, descriptors, [], [], self._config.copier(on_gpu=False))
            self._reconnect()
        except (GeometryError, OSError, _shim.ShimError) as error:
            # The last: memory impossible to export, such as sleep mode's, or a refusal by the sidecar.
            self._stay_out(str(error))
        except RuntimeError as error:
            # Torch's, such as its OutOfMemoryError: the engine's own KV fills the device.
            text = str(error).partition("\n")[0]
            self._stay_out(f"torch: {text} (if memory is short, lower --gpu-memory-utilization)")

    def unregister(self) -> None:
        """Ends all use of the KV memory. RuntimeError if copies go on for too long."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        if not session.end_session(int(REST_S * 1e6)):
            self._session = session
            raise RuntimeError(
                f"pillion: copies of the KV memory have not ended within {REST_S:.0f} s, so the engine does not sleep. "
                "Pillion is off for it until it restarts"
            )
        loading, self._loading, self._lacking = self._loading, {}, {}
        for req_id, plan, _ in loading.values():
            self._end_load(req_id, _shim.plan_blocks(plan))

    def restore(self) -> None:
        """The KV memory is there again at its address, with other content."""
        if self._session is not None or self.out_reason or self._reconnect is None:
            return
        try:
            self._reconnect()
        except (GeometryError, _shim.ShimError) as error:
            self._stay_out(str(error))
        # The new session has not stated its weights yet.
        self._weights = -1

    def _stay_out(self, reason: str) -> None:
        self.out_reason = reason
        logger.error("PILLION STAYS OUT: %s. vLLM runs as if no connector were configured.", reason)

    def _register_gpu(self, layers: list[tuple[str, torch.Tensor]], geometry: Geometry) -> None:
        pointers = [int(storage.data_ptr()) for storage in geometry.storages]
        self._device = layers[0][1].device
        self._identify(geometry)
        self._reconnect = lambda: self._connect_gpu(geometry, pointers)
        self._reconnect()
        logger.info(
            "pillion: KV cache layout %s: a block of %d bytes in %d runs, delivered in cuts of %s layers",
            vllm_compat.granted_layout(self._vllm_config),
            geometry.cuts[-1],
            len(geometry.regions),
            ", ".join(map(str, geometry.cut_layers)),
        )
        self._waits = LayerWaits(
            [name for name, _ in layers],
            geometry.cut_layers,
            vllm_compat.hooks_are_serial(self._vllm_config),
            vllm_compat.running_hook_mode,
        )

    def _connect_gpu(self, geometry: Geometry, pointers: list[int]) -> None:
        """Shows the memory to the sidecar; if it cannot and the user left it open, this process copies."""
        copier = self._config.copier(on_gpu=True)
        # A sleeping allocator takes the memory away under the engine's own copies, unless vLLM calls a hook before.
        alone = vllm_compat.keeps_kv_memory(self._vllm_config) or vllm_compat.tells_of_sleep()
        if copier == "engine" and not alone:
            raise GeometryError(
                "pillion.copy=engine does not work with sleep mode before vLLM 0.33, which frees the KV memory under the "
                "engine's own copies: upgrade vLLM, or run without --enable-sleep-mode"
            )
        try:
            self._connect(geometry, [], pointers, geometry.cuts, copier)
        except _shim.ShimError as refused:
            # Most of all for memory impossible to export, and for a sidecar without access to the GPU.
            if self._beside_others and self._config.copy == "auto":
                # The scheduler role would not learn of it, and its steps may wait for loads of the sidecar alone.
                raise GeometryError(f"{refused} (beside another connector set pillion.copy to engine)") from refused
            if self._config.copy != "auto" or not alone:
                raise GeometryError(str(refused)) from refused
            try:
                self._connect(geometry, [], pointers, geometry.cuts, "engine")
            except _shim.ShimError:
                raise GeometryError(str(refused)) from refused
            self.copies = True
            logger.warning(
                "pillion: %s. Until then the engine copies its blocks itself, which is slower (pillion.copy=engine)", refused
            )

    def _identify(self, geometry: Geometry) -> None:
        """Makes the rank's statements of itself. Once: weights are read for them."""
        models = Models(vllm_compat.cache_layers(self._vllm_config, self._kv_cache_config))
        facts = Facts(self._config, self._vllm_config, self._kv_cache_config, models)
        self._facts = facts.stated(geometry.form)
        self._sampler = self._first._sampler or Sampler(
            models, facts.experts_apart, vllm_compat.keeps_weights(self._vllm_config)
        )
        self._live = Live(self._sampler, facts.running, facts.experts_move)
        self._live_weights = self._live.begin(self._facts, 0)

    def _connect(self, geometry: Geometry, descriptors: list[int], pointers: list[int], cuts: list[int], copier: str) -> None:
        rank, world = vllm_compat.rank(self._vllm_config), vllm_compat.world_size(self._vllm_config)
        shards = vllm_compat.shards(self._vllm_config, self._kv_cache_config)
        self._session = _shim.WorkerSession(
            self._config.socket,
            self._group.engine(str(self._vllm_config.kv_transfer_config.engine_id)),
            world,
            rank,
            rank // (world // shards),
            shards,
            self._kv_cache_config.num_blocks,
            geometry.regions,
            descriptors,
            copier,
            self._facts,
            pointers,
            cuts,
            self._stream(),
            self._config.namespace,
            live_weights=self._live_weights,
            groups=vllm_compat.groups(self._kv_cache_config),
        )
        self._say_notices()

    # --- one step ---

    def begin_step(self, metadata: PillionMetadata) -> None:
        """The engine's blocks are as the scheduler meant them: loads of this step may be written."""
        late = self._missed_loads(metadata)
        self._metadata = metadata
        self._handled = sys.exc_info()[1]
        if self._session:
            self._follow_weights(self._session, metadata)
            self._session.join(metadata.run)
            self._say_namespace(self._session)
            if self._waits:
                self._waits.begin_step(self._session, self._stream)
            self._session.start(metadata.step, self._stream())
            self._loaded_by_cuts = []
            for planned in late:
                self._begin(planned.loads, self._session)
                self._end_lost(planned.lost)
            self._say_notices()

    def _missed_loads(self, metadata: PillionMetadata) -> list[StepLoads]:
        """Loads of earlier steps not begun by this rank, although the sidecar may copy them: such a step was skipped, or
        raised before it got there. vLLM waits for their ends, and this step for the blocks written by them."""
        last = self._metadata or PillionMetadata(metadata.run, 0)
        if not (metadata.open_loads or last.loads or last.lost):
            return []
        unbegun = StepLoads(last.step, last.loads, last.lost)
        return [unbegun, *(planned for planned in metadata.open_loads if planned.step > last.step)]

    def _follow_weights(self, session: _shim.WorkerSession, metadata: PillionMetadata) -> None:
        """Tells the sidecar the digest of the weights once they may have changed: it binds the engine to the word of all ranks.

        Weights may be written past vLLM without notice, but hardly while requests run: so a pause is followed by a look,
        before this step loads anything.
        """
        paused = time.monotonic() - self._last_step_s
        self._last_step_s += paused
        if self._live is None:
            return
        count = getattr(metadata, "weights", 0)
        if count > self._weights:
            self._weights = count
            session.set_weights(count, self._live.again(metadata.step))
        elif paused > (LOOK_AFTER_S_GPU if self._device else LOOK_AFTER_S_CPU) and self._live.differs(metadata.step):
            logger.warning(
                "pillion: the weights have changed without a call of vLLM. Loads fail until the sidecar knows the new ones. "
                "KV in vLLM's own prefix cache is from the old weights: reset it whenever you change weights"
            )
            session.set_weights(0, self._live.again(metadata.step))

    def _say_namespace(self, session: _shim.WorkerSession) -> None:
        """Logs the namespace once it is known, after the first steps of all ranks, and at every change."""
        namespace = session.namespace
        if namespace and namespace != self._namespace:
            self._namespace = namespace
            rank, world = vllm_compat.rank(self._vllm_config), vllm_compat.world_size(self._vllm_config)
            logger.info("pillion: rank %d of %d, %s", rank, world, session.namespace_line)

    def load(self, forward_context: ForwardContext) -> None:
        """Begins this step's loads; the forward's blocks are there, or on a GPU waited for, before it reads them."""
        metadata = self._metadata
        if metadata is None:
            return
        lost, metadata.lost = metadata.lost, []
        self._end_lost(lost)
        loads, metadata.loads = metadata.loads, []
        if loads and self._session is None:
            raise RuntimeError("pillion: a load was planned for a rank that has not registered its memory")
        # A layer writes its KV before its hook is called: into a block whose copy may come behind that.
        by_cuts = not metadata.fills_tail and self._may_wait_by_cuts(loads, forward_context)
        if self._session:
            self._begin(loads, self._session, by_cuts)

    def _begin(self, loads: list[Load], session: _shim.WorkerSession, by_cuts: bool = False) -> None:
        for req_id, plan, sync in loads:
            failed = session.load(plan, self._stream(), by_cuts and sync)
            if failed is None:
                self._loading[_shim.plan_op(plan)] = (req_id, plan, sync)
            else:
                self._fail(failed)

    def _end_lost(self, lost: list[Lost]) -> None:
        for req_id, block_ids, sync in lost:
            if sync:
                self._fail(block_ids)
            else:
                self._end_load(req_id, block_ids)

    def _may_wait_by_cuts(self, loads: list[Load], forward_context: ForwardContext) -> bool:
        """Whether this forward waits for its loads cut by cut."""
        needed = [plan for _, plan, sync in loads if sync]
        if not needed or not self._waits or not self._waits.permits(vllm_compat.hook_mode(forward_context)):
            return False
        self._waits.expect()
        self._loaded_by_cuts += needed
        return True

    def reach_layer(self, layer: str) -> None:
        """The forward is about to launch a layer."""
        if self._waits and self._session:
            self._waits.reach(layer, self._session, self._stream)

    def end_step(self) -> None:
        """This rank has written the step's KV, unless its forward raised: vLLM calls this then, too."""
        self._last_step_s = time.monotonic()
        metadata = self._metadata
        if metadata is None or self._session is None:
            return
        raised = sys.exc_info()[1]
        if raised is not None and raised is not self._handled:
            # Loads not waited for by the forward are waited for by the next step.
            return
        if self._waits:
            self._end_waits(self._waits, self._session, metadata.step)
        self._session.done(metadata.step, metadata.urgent, self._stream())

    def step_output(self) -> StepOutput | None:
        """The step begun by this rank, for its output about to be returned by vLLM; None where nobody waits for it."""
        metadata = self._metadata
        return StepOutput(metadata.run, metadata.step) if metadata is not None and metadata.asks else None

    def _end_waits(self, waits: LayerWaits, session: _shim.WorkerSession, step: int) -> None:
        if waits.end_step(session, self._stream):
            return
        blocks = [block for plan in self._loaded_by_cuts for block in _shim.plan_blocks(plan)]
        logger.error(
            "pillion: step %d did not call the hooks of all its layers, so it may have read %d blocks before they were "
            "loaded. These are computed again, and from now on every step waits for its whole load",
            step,
            len(blocks),
        )
        self._fail(blocks)

    def _stream(self) -> int:
        """The engine's stream of the moment; 0 on a CPU engine, without streams."""
        if self._device is None:
            return 0
        import torch

        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def is_loading(self, req_id: str) -> bool:
        """Whether an asynchronous load of the request goes on."""
        return any(loading == req_id for loading, _, _ in self._loading.values())

    def finished(self) -> set[str] | None:
        """Requests with an asynchronous load ended since the last call, well or not, each once."""
        if self._loading and self._session:
            self._take_ends(self._session)
        ended, self._ended = self._ended, set()
        return ended or None

    def _take_ends(self, session: _shim.WorkerSession) -> None:
        """Reports loads at their end. A step without tokens waits for one: it can bring nothing else."""
        idle = self._metadata is not None and self._metadata.idle and not self._whole
        until = time.monotonic() + LINGER_S
        while True:
            left_us = max(0, int((until - time.monotonic()) * 1e6)) if idle and not self._ended else 0
            for op, failed in session.finished(left_us):
                req_id, _, _ = self._loading.pop(op)
                self._lacking.setdefault(req_id, []).extend(failed)
                if not self.is_loading(req_id):
                    self._end_load(req_id, self._lacking.pop(req_id))
            if not left_us or not self._loading:
                return

    def _end_load(self, req_id: str, lacking: list[int]) -> None:
        """An asynchronous load has ended, without these blocks."""
        self._ended.add(req_id)
        if lacking and self._whole:
            self._failed_requests.add(req_id)
        else:
            self._failed_waiting.update(lacking)

    def take_failed_requests(self) -> set[str]:
        """Requests for vLLM to compute from their beginning; each is among the last ones returned by `finished`."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed(self) -> set[int]:
        """Blocks read by a step but not loaded; vLLM computes them again."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_waiting(self) -> set[int]:
        """Blocks of waiting requests not loaded; they belong to these requests until vLLM learns of it."""
        failed, self._failed_waiting = self._failed_waiting, set()
        return failed

    def _fail(self, block_ids: list[int]) -> None:
        self._failed.update(block_ids)

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        if self._session:
            self._session.disconnect()

    def _say_notices(self) -> None:
        assert self._session is not None
        for notice in self._session.take_notices():
            logger.warning("pillion: %s", notice)


def _share(storage: torch.UntypedStorage, ranks: int) -> int:
    """Moves a storage to shared memory, in place, and returns its descriptor, still owned by the storage."""
    needed = storage.nbytes()
    if not storage.is_shared():
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < needed:
            raise _no_room(needed, ranks)
    try:
        descriptor, _ = storage._share_fd_cpu_()
    except RuntimeError as error:
        # torch's word for a full file system: another rank took the room meanwhile.
        raise _no_room(needed, ranks) from error
    return int(descriptor)


def _no_room(needed: int, ranks: int) -> OSError:
    room = os.statvfs(SHARED_MEMORY)
    free, used = room.f_bavail * room.f_frsize, (room.f_blocks - room.f_bfree) * room.f_frsize
    # Every rank of the engine moves as much; some room for other users of it.
    size = -(-(used + needed * ranks) // MIB) + 64
    return OSError(
        f"the KV cache of {-(-needed // MIB)} MiB must lie in {SHARED_MEMORY}, which has {free // MIB} MiB free: enlarge it, "
        f"by volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {size}Mi}}}}] mounted at {SHARED_MEMORY}, or docker "
        f"run --shm-size={size}m"
    )
