"""`PillionConnector`: a KV connector for vLLM, with blocks kept in the Pillion sidecar.

The class only passes vLLM's hooks to their role: [pillion.scheduler][] in the scheduler process, [pillion.worker][] in each
rank. If an engine cannot be served yet, the class logs the reason once and stays out of the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion import config as options
from pillion import hasher, vllm_compat, watch
from pillion.metadata import PillionMetadata, StepOutput
from pillion.scheduler import Scheduler
from pillion.state import NO_COUNTS, EngineState, PromMetrics, State
from pillion.vllm_compat import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from pillion.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = vllm_compat.init_logger("vllm.pillion")


def __getattr__(name: str) -> Any:
    """vLLM's own connector, where `--kv-offloading-size` has put its name beside this module's path."""
    return vllm_compat.offloading_connector(name)


@dataclass(frozen=True)
class RankState(KVConnectorHandshakeMetadata):
    """A rank's statement to the scheduler role before the first request."""

    # The reason if the rank is not served; otherwise empty.
    out_reason: str = ""
    host: str = ""
    # True if the rank copies for itself instead of the sidecar.
    copies: bool = False


def this_host() -> str:
    """The kernel's id of its own run, the same in all containers of a host; empty if the kernel gives none."""
    try:
        return BOOT_ID.read_text()
    except OSError:
        return ""


class PillionConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles of the connector. At most one of `_scheduler` and `_worker` is set; neither if Pillion stays out."""

    # The state last reported to vLLM, with its reason.
    _told: tuple[State, str] | None = None
    # True if another connector is beside this one.
    _is_one_of_several = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        # The reason if neither is set.
        self._out = ""
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        config = options.parse_options(extra)
        beside = self._is_one_of_several = vllm_compat.is_one_of_several(vllm_config)
        reason = "this vLLM gives connectors no KV cache configuration: install vLLM 0.29 or later"
        if kv_cache_config is not None:
            reason = vllm_compat.find_unsupported(vllm_config, kv_cache_config) or ""
        if reason:
            self._stay_out(reason)
            return
        assert kv_cache_config is not None
        if role == KVConnectorRole.SCHEDULER:
            if warning := vllm_compat.release_warning():
                logger.warning("pillion: %s", warning)
            self._scheduler = Scheduler(config, vllm_config, kv_cache_config, beside_others=beside)
            core = vllm_compat.engine_core()
            if core is not None:
                watch.engine_core(core, self._scheduler)
            hasher.install_hasher(vllm_config.cache_config.prefix_caching_hash_algo, config.hasher == "native")
        else:
            self._worker = Worker(config, vllm_config, kv_cache_config, beside_others=beside)

    def _stay_out(self, reason: str) -> None:
        self._out = reason
        logger.error("PILLION STAYS OUT: %s. vLLM runs as if no connector were configured.", reason)

    # --- what vLLM asks of the class ---

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout named by `pillion.layout`; with `auto` the one with each block in one run, for models that permit it."""
        transfer = vllm_config.kv_transfer_config
        config = options.parse_options((transfer and transfer.kv_connector_extra_config) or {})
        if config.layout != "auto":
            return None if config.layout == "none" else config.layout
        # MultiConnector ends the start if two connectors name different layouts.
        return None if vllm_compat.is_one_of_several(vllm_config) else vllm_compat.fitting_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Never: a graph that calls no hook between layers needs none."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """True for an engine computing for others alone. For other engines a lost save is only a later miss."""
        return bool(self._kv_transfer_config.kv_role == "kv_producer")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """A report of the scheduler role, in vLLM's front end."""
        return EngineState(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The gauges of the reports."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker role ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Exports the KV memory to the sidecar."""
        if self._worker:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Ends all use of the KV memory before sleep mode takes the memory away."""
        if self._worker:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Exports the KV memory again, once the engine is awake."""
        if self._worker:
            self._worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's host, or its reason to stay out, for the scheduler role."""
        # MultiConnector hands the metadata of one connector to all. The sidecar binds no engine without all ranks.
        if self._is_one_of_several:
            return None
        if reason := self._worker.out_reason if self._worker else self._out:
            return RankState(reason)
        return RankState("", this_host(), self._worker.copies) if self._worker else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker and isinstance(connector_metadata, PillionMetadata) and connector_metadata.run:
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads this step's blocks: synchronous ones now, the others in the background."""
        if self._worker:
            self._worker.load(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """On a GPU the engine's stream waits here, if it did not in start_load_kv."""
        if self._worker:
            self._worker.reach_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Reports this step's written KV to the sidecar. Waits for nothing."""
        if self._worker:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests with an asynchronous load ended on this rank."""
        return None, self._worker.take_ended() if self._worker else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As `get_finished`, with the requests among them whose loads failed as a whole. Called by vLLM 0.30 and later."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker:
            results.failed_recving |= self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks with a load failed since the last call."""
        return self._worker.take_failed_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Names the step in its output, so the scheduler role learns of each output taken by vLLM."""
        return self._worker.step_output() if self._worker else None

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        for role in (self._scheduler, self._worker):
            if role:
                role.shutdown()

    # --- scheduler role ---

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """The scheduler role stays out if a rank does or has another sidecar: each rank holds a part of every block."""
        reasons, ranks = [], {rank: told for (_, rank), told in sorted(metadata.items()) if isinstance(told, RankState)}
        for rank, told in ranks.items():
            if told.out_reason:
                reasons.append(f"rank {rank}: {told.out_reason}")
            elif told.host != this_host():
                reasons.append(
                    f"rank {rank} runs on another host than the scheduler, and a sidecar serves only ranks of its own host: "
                    "run one engine on each host"
                )
        if self._scheduler and any(told.copies for told in ranks.values()):
            self._scheduler.ranks_copy()
        if reasons and self._scheduler:
            self._scheduler.shutdown()
            self._scheduler = None
            self._stay_out(reasons[0])

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Holds blocks of the pool, and sees its resets, the users' sign of changed weights."""
        if self._scheduler:
            vllm_compat.watch_resets(gpu_block_pool, self._scheduler.clears_blocks, self._scheduler.blocks_cleared)
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Announces the coming query to the sidecar."""
        if self._scheduler:
            self._scheduler.announced(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens in the cache beyond `num_computed_tokens`, and True if they come asynchronously."""
        return self._scheduler.match(request, num_computed_tokens) if self._scheduler else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load into the blocks allocated by vLLM."""
        if self._scheduler:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Tokens of a hit by the place of the hit, for vLLM's counts of an admitted request."""
        found = self._scheduler.sources(request, num_external_tokens) if self._scheduler else {}
        unknown: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return vllm_compat.cache_hit_sources(found) if found else unknown

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Posts this step's saves and cancellations and describes its loads."""
        if not self._scheduler:
            return PillionMetadata(run=b"", step=0)
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learns of ended and of failed loads, and of the step with its output taken by vLLM."""
        if not self._scheduler:
            return
        invalid, failed = connector_output.invalid_block_ids, getattr(connector_output, "failed_recving", None)
        received = connector_output.finished_recving
        if invalid:
            self._scheduler.loads_failed(invalid)
        if failed:
            self._scheduler.requests_failed(failed)
        if received:
            self._scheduler.loads_ended(received, invalid)
        # Behind the failed loads: nothing of these is accepted.
        if isinstance(output := getattr(connector_output, "kv_connector_worker_meta", None), StepOutput):
            self._scheduler.accepts(output)

    def take_events(self) -> Iterable[Any]:
        """KV events for routers, where vLLM publishes any: the blocks kept by the sidecar."""
        return self._scheduler.take_events() if self._scheduler else ()

    def has_pending_push_work(self) -> bool:
        """True while an engine without requests must step on for a moment: the ends of its last saves are not reported yet."""
        return self._scheduler is not None and self._scheduler.lingers

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """A report for vLLM's metrics; None if nothing has changed since the last report."""
        # MultiConnector looks for the class of each report by its name. The wheel's plugin registers the name.
        untold = self._is_one_of_several and not vllm_compat.is_registered(type(self).__name__)
        if self.role != KVConnectorRole.SCHEDULER or untold:
            return None
        told: tuple[State, str] = (self._scheduler.state, "") if self._scheduler else ("out", self._out)
        counts = self._scheduler.take_counts() if self._scheduler else NO_COUNTS
        if told == self._told and not any(counts.values()):
            return None
        self._told = told
        return EngineState.of(*told, counts)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request. The answer is the router's text for the next engine. Saves never hold the request's blocks."""
        return False, self._scheduler.finished(request) if self._scheduler else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Has the ranks state their weights again; deletes nothing, and equal weights find their kept blocks."""
        if self._scheduler:
            self._scheduler.weights_may_have_changed()
        return True
