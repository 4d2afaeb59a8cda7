"""The worker role: exports KV memory, stores fence words, loads blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pillion import _shim, vllm_compat
from pillion.config import Config
from pillion.geometry import Geometry, GeometryError, describe
from pillion.metadata import PillionMetadata

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SHARED_MEMORY = "/dev/shm"
MIB = 1 << 20
logger = vllm_compat.init_logger("vllm.pillion")


class Worker:
    """State of one rank's worker role. Without a session (memory that cannot be shared) every call does nothing."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._session: _shim.WorkerSession | None = None
        self._metadata: PillionMetadata | None = None
        # Asynchronous loads in progress: operation to request id.
        self._loading: dict[int, str] = {}
        self._failed: set[int] = set()
        self._ended: set[str] = set()
        # Last step computed on blocks that were not loaded; its fence is withheld until the scheduler voided its saves.
        self._spoiled = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Moves the KV storage to shared memory in place and shows it to the sidecar."""
        layers = vllm_compat.layers(self._kv_cache_config, kv_caches)
        try:
            if any(tensor.device.type != "cpu" for _, tensor in layers):
                raise GeometryError("this release serves vLLM's CPU build only")
            geometry = describe(layers, self._kv_cache_config.num_blocks)
            ranks = vllm_compat.world_size(self._vllm_config)
            descriptors = [_share(storage, ranks) for storage in geometry.storages]
        except (GeometryError, OSError) as error:
            logger.error("PILLION STAYS OUT: %s. vLLM runs as if no connector were configured.", error)
            return
        self._connect(geometry, descriptors)

    def _connect(self, geometry: Geometry, descriptors: list[int]) -> None:
        facts, warnings = vllm_compat.facts(self._vllm_config, self._kv_cache_config, geometry.form, self._config.model_id)
        for warning in warnings:
            logger.warning("pillion: %s", warning)
        rank, world = vllm_compat.rank(self._vllm_config), vllm_compat.world_size(self._vllm_config)
        shards = vllm_compat.shards(self._vllm_config, self._kv_cache_config)
        self._session = _shim.WorkerSession(
            self._config.socket,
            str(self._vllm_config.kv_transfer_config.engine_id),
            world,
            rank,
            rank // (world // shards),
            shards,
            self._kv_cache_config.num_blocks,
            geometry.regions,
            descriptors,
            "sidecar" if self._config.copy == "sidecar" else "engine",
            facts,
        )
        logger.info("pillion: rank %d of %d, namespace %s", rank, world, self._session.namespace or "not known yet")
        self._say_notices()

    # --- one step ---

    def begin_step(self, metadata: PillionMetadata) -> None:
        """The engine's blocks are as the scheduler meant them: loads of this step may be written."""
        self._metadata = metadata
        if self._session:
            if metadata.resolved >= self._spoiled:
                self._spoiled = 0
            self._session.join(metadata.run)
            self._session.start(metadata.step)
            self._say_notices()

    def load(self) -> None:
        """Carries out or begins this step's loads."""
        metadata = self._metadata
        if metadata is None:
            return
        for req_id, block_ids, sync in metadata.lost:
            self._fail(block_ids, metadata.step if sync else 0)
            if not sync:
                self._ended.add(req_id)
        metadata.lost = []
        loads, metadata.loads = metadata.loads, []
        for req_id, plan, sync in loads:
            if self._session is None:
                raise RuntimeError("pillion: a load was planned for a rank that has not registered its memory")
            failed = self._session.load(plan, sync)
            if failed is None:
                self._loading[_shim.plan_op(plan)] = req_id
            else:
                self._fail(failed, metadata.step)

    def end_step(self) -> None:
        """The step's KV is written."""
        metadata = self._metadata
        if metadata and self._session and not self._spoiled:
            self._session.done(metadata.step, metadata.urgent)

    def finished(self) -> set[str] | None:
        """Requests whose asynchronous load ended since the last call, well or not, each once."""
        if self._loading and self._session:
            for op, failed in self._session.finished():
                self._ended.add(self._loading.pop(op))
                self._fail(failed, 0)
        ended, self._ended = self._ended, set()
        return ended or None

    def take_failed(self) -> set[int]:
        """Blocks that were not loaded; vLLM computes them again."""
        failed, self._failed = self._failed, set()
        return failed

    def _fail(self, block_ids: list[int], spoiled: int) -> None:
        if block_ids:
            self._failed.update(block_ids)
            self._spoiled = max(self._spoiled, spoiled)

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        if self._session:
            self._session.disconnect()

    def _say_notices(self) -> None:
        assert self._session is not None
        for notice in self._session.take_notices():
            logger.warning("pillion: %s", notice)


def _share(storage: torch.UntypedStorage, ranks: int) -> int:
    """Moves a storage to shared memory, in place, and returns its descriptor, which stays the storage's own."""
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
    # Every rank of the engine moves as much; some room for whatever else uses it.
    size = -(-(used + needed * ranks) // MIB) + 64
    return OSError(
        f"the KV cache of {-(-needed // MIB)} MiB must lie in {SHARED_MEMORY}, which has {free // MIB} MiB free; give the "
        f"container more: volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {size}Mi}}}}] mounted at "
        f"{SHARED_MEMORY}, or docker run --shm-size={size}m"
    )
