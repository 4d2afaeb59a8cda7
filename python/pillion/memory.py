"""The KV memory of one cache group in a rank: shown to the sidecar, with the rank's statements of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pillion import _shim, vllm_compat
from pillion.config import Config
from pillion.facts import Facts
from pillion.geometry import Geometry, GeometryError, describe_layers, self_test
from pillion.groups import Group
from pillion.live import Live
from pillion.metadata import PillionMetadata
from pillion.models import Models
from pillion.sample import Sampler

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A sleep waits so long for copies of the KV memory. A load of an engine takes at most some hundred milliseconds.
REST_S = 10.0
# A step begun after a pause of so many seconds compares the weights with those of before. That takes milliseconds on a
# GPU; on a CPU its kernels must be asked, for as long as a decoding step.
LOOK_AFTER_S_GPU = 1.0
LOOK_AFTER_S_CPU = 60.0
logger = vllm_compat.init_logger("vllm.pillion")


class GroupMemory:
    """A group's session. Without one (memory impossible to share) every call does nothing."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        group: Group,
        first: GroupMemory | None = None,
        beside_others: bool = False,
    ) -> None:
        """`kv_cache_config`: of this group alone. `first`: the engine's first group; it shares its samples of the weights."""
        self._config = config
        self._vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.group = group
        self._beside_others = beside_others
        self.session: _shim.WorkerSession | None = None
        # The reason for the missing session of this rank.
        self.out_reason = ""
        # True if this process copies instead of the sidecar.
        self.copies = False
        # For the sidecar to compare with other engines: facts, and a digest of the live weights.
        self._facts: dict[str, str] = {}
        self._first = first or self
        self._sampler: Sampler | None = None
        self._live: Live | None = None
        self._live_weights: bytes | None = None
        # Count of possible changes of the weights, by the scheduler, and the time of this rank's last step.
        self._weights = 0
        self.last_step_s = time.monotonic()
        # The namespace last named in the log.
        self._namespace = ""
        # The present step's work.
        self.metadata: PillionMetadata | None = None
        # On a GPU only: the device, with everything in the order of its stream, and the waits between its layers.
        self.device: torch.device | None = None
        self.waits: _shim.LayerWaits | None = None
        # Shows the memory to the sidecar again in the form of the first time.
        self._reconnect: Callable[[], None] | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Shows the KV memory to the sidecar: a GPU's as it is, a host's after its move to shared memory in place."""
        layers = vllm_compat.list_tensors(self.kv_cache_config, kv_caches)
        try:
            served = "cuda" if vllm_compat.on_gpu() else "cpu"
            for name, tensor in layers:
                if tensor.device.type != served:
                    raise GeometryError(
                        f"layer {name} has its KV on a device of kind {tensor.device.type}, and only CUDA and CPU engines are "
                        "served: leave --kv-transfer-config out"
                    )
            heads = vllm_compat.list_heads(self._vllm_config, self.kv_cache_config)
            geometry = describe_layers(layers, self.kv_cache_config.num_blocks, heads)
            self_test(layers, geometry, self.kv_cache_config.num_blocks)
            if unprepared := vllm_compat.prepare_scales(self._vllm_config, self.kv_cache_config):
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
        session, self.session = self.session, None
        if session is None:
            return
        if self.device is not None:
            import torch

            torch.cuda.synchronize(self.device)
        if not session.end_session(int(REST_S * 1e6)):
            self.session = session
            raise RuntimeError(
                f"pillion: copies of the KV memory have not ended within {REST_S:.0f} s, so the engine does not sleep. "
                "Pillion is off for it until it restarts"
            )

    def restore(self) -> None:
        """The KV memory is there again at its address, with other content."""
        if self.session is not None or self.out_reason or self._reconnect is None:
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
        self.device = layers[0][1].device
        self._identify(geometry)
        self._reconnect = lambda: self._connect_gpu(geometry, pointers)
        self._reconnect()
        logger.info(
            "pillion: KV cache layout %s: a block of %d bytes in %d runs, delivered in cuts of %s layers",
            getattr(self._vllm_config.cache_config, "kv_cache_layout", None) or "unnamed",
            geometry.cuts[-1],
            len(geometry.regions),
            ", ".join(map(str, geometry.cut_layers)),
        )
        # No step waits for the loads of several groups.
        if not self.group.several:
            serial = vllm_compat.hooks_are_serial(self._vllm_config)
            names = [name for name, _ in layers]
            self.waits = _shim.LayerWaits(names, geometry.cut_layers, serial, vllm_compat.running_hook_mode)

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
        models = Models(vllm_compat.cache_layers(self._vllm_config, self.kv_cache_config))
        facts = Facts(self._config, self._vllm_config, self.kv_cache_config, models)
        self._facts = facts.stated(geometry.form)
        self._sampler = self._first._sampler or Sampler(
            models, facts.experts_apart, vllm_compat.keeps_weights(self._vllm_config)
        )
        self._live = Live(self._sampler, facts.running, facts.experts_move)
        self._live_weights = self._live.begin(self._facts, 0)

    def _connect(self, geometry: Geometry, descriptors: list[int], pointers: list[int], cuts: list[int], copier: str) -> None:
        rank, world = vllm_compat.find_rank(self._vllm_config), vllm_compat.world_size(self._vllm_config)
        shards = vllm_compat.count_shards(self._vllm_config, self.kv_cache_config)
        self.session = _shim.WorkerSession(
            self._config.socket,
            self.group.engine(str(self._vllm_config.kv_transfer_config.engine_id)),
            world,
            rank,
            rank // (world // shards),
            shards,
            self.kv_cache_config.num_blocks,
            geometry.regions,
            descriptors,
            copier,
            self._facts,
            pointers,
            cuts,
            self.stream(),
            self._config.namespace,
            live_weights=self._live_weights,
            groups=vllm_compat.digest_groups(self.kv_cache_config),
        )
        self.say_notices()

    def begin_step(self, session: _shim.WorkerSession, metadata: PillionMetadata) -> None:
        """Takes part in the scheduler's run, with the weights of the moment."""
        self._follow_weights(session, metadata)
        session.join(metadata.run)
        self._say_namespace(session)

    def _follow_weights(self, session: _shim.WorkerSession, metadata: PillionMetadata) -> None:
        """Reports the digest of the weights after a possible change: the sidecar binds the engine by the digests of all ranks.

        Weights may be written past vLLM without notice, but hardly while requests run. So after a pause the weights are
        compared, before this step loads anything.
        """
        paused = time.monotonic() - self.last_step_s
        self.last_step_s += paused
        if self._live is None:
            return
        count = getattr(metadata, "weights", 0)
        if count > self._weights:
            self._weights = count
            session.set_weights(count, self._live.again(metadata.step))
        elif paused > (LOOK_AFTER_S_GPU if self.device else LOOK_AFTER_S_CPU) and self._live.differs(metadata.step):
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
            rank, world = vllm_compat.find_rank(self._vllm_config), vllm_compat.world_size(self._vllm_config)
            logger.info("pillion: rank %d of %d, %s", rank, world, session.namespace_line)

    def stream(self) -> int:
        """The engine's stream of the moment; 0 on a CPU engine, without streams."""
        if self.device is None:
            return 0
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def say_notices(self) -> None:
        """Logs the session's messages."""
        assert self.session is not None
        for notice in self.session.take_notices():
            logger.warning("pillion: %s", notice)


def _share(storage: torch.UntypedStorage, ranks: int) -> int:
    """Moves a storage to shared memory, in place, and returns its descriptor, still owned by the storage."""
    if not storage.is_shared():
        _shim.check_shared_memory(storage.nbytes(), ranks, full=False)
    try:
        descriptor, _ = storage._share_fd_cpu_()
    except RuntimeError:
        # torch's error for a full file system: another rank took the room meanwhile.
        _shim.check_shared_memory(storage.nbytes(), ranks, full=True)
        raise
    return int(descriptor)
