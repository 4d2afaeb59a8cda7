"""The worker role of a rank with several cache groups: one [pillion.worker][] for each. A request's load ends with the last
group's, and has failed where any group's did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pillion import groups
from pillion.config import Config
from pillion.metadata import PillionMetadata, StepOutput
from pillion.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SetWorker:
    """The workers of all groups, as one."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, beside_others: bool = False
    ) -> None:
        self._all: list[Worker] = []
        for group, view in groups.parts(kv_cache_config):
            self._all.append(Worker(config, vllm_config, view, group, next(iter(self._all), None), beside_others))
        # Requests of which a group's load has ended and another one's has not, and those of which one has failed.
        self._ended: set[str] = set()
        self._failing: set[str] = set()
        # Of those that `finished` returned last.
        self._failed: set[str] = set()

    @property
    def copies(self) -> bool:
        """Whether this process copies although the sidecar was to."""
        return any(part.copies for part in self._all)

    @property
    def out_reason(self) -> str:
        """Why this rank is not served."""
        return next((part.out_reason for part in self._all if part.out_reason), "")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Shows every group's memory to the sidecar, or none."""
        for part in self._all:
            part.register(kv_caches)
            if part.out_reason:
                return self.shutdown()
        return None

    def unregister(self) -> None:
        """The memory of every group goes."""
        for part in self._all:
            part.unregister()

    def restore(self) -> None:
        """The memory of every group is there again, or is shown for none."""
        for part in self._all:
            part.restore()
            if part.out_reason:
                return self.shutdown()
        return None

    def begin_step(self, metadata: PillionMetadata) -> None:
        """Loads of this step may be written."""
        for part, its in zip(self._all, [metadata, *metadata.others], strict=True):
            part.begin_step(its)

    def load(self, forward_context: ForwardContext) -> None:
        """Begins this step's loads."""
        for part in self._all:
            part.load(forward_context)

    def reach_layer(self, layer: str) -> None:
        """Nothing: no step waits for loads."""

    def end_step(self) -> None:
        """The step's KV is written."""
        for part in self._all:
            part.end_step()

    def step_output(self) -> StepOutput | None:
        """The step, by the run of the first group."""
        return self._all[0].step_output()

    def finished(self) -> set[str] | None:
        """Requests whose loads ended in all groups since the last call, well or not, each once."""
        for part in self._all:
            self._ended |= part.finished() or set()
            self._failing |= part.take_failed_requests()
        # The loads of all groups have begun with the first.
        ended = {request for request in self._ended if not any(part.is_loading(request) for part in self._all)}
        self._ended -= ended
        self._failed |= self._failing & ended
        self._failing -= ended
        return ended or None

    def take_failed_requests(self) -> set[str]:
        """Requests that vLLM computes from their beginning; each is among those `finished` that were returned last."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed(self) -> set[int]:
        """None: of a model with several groups vLLM takes no word of single blocks, and ends the engine."""
        return set()

    def take_failed_waiting(self) -> set[int]:
        """None, as of `take_failed`."""
        return set()

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        for part in self._all:
            part.shutdown()
