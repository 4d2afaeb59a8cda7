"""The worker role: stores fence words, loads blocks, and reports the ends of loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pillion import _shim, groups, vllm_compat
from pillion.config import Config
from pillion.memory import GroupMemory
from pillion.metadata import Load, Lost, PillionMetadata, StepLoads, StepOutput

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A step without tokens waits so long for the end of a load: vLLM looks once in a millisecond.
LINGER_S = 0.002
logger = vllm_compat.init_logger("vllm.pillion")


class Worker:
    """One rank's worker role, over the memory of all of the engine's cache groups."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, beside_others: bool = False
    ) -> None:
        self._parts: list[GroupMemory] = []
        for group, view in groups.split_groups(kv_cache_config):
            first = next(iter(self._parts), None)
            self._parts.append(GroupMemory(config, vllm_config, view, group, first, beside_others))
        # True if a failing load must fail as a whole: vLLM frees blocks before windows, and does not distinguish groups.
        self._whole = len(self._parts) > 1 or bool(vllm_compat.find_window(kv_cache_config))
        self._loads = _shim.RankLoads(self._whole)
        # The exception being handled at this step's beginning: another one at its end comes from its own forward.
        self._handled: BaseException | None = None
        # True if the next hook of the step's forward may have an effect.
        self._hooked = False

    @property
    def copies(self) -> bool:
        """True if this process copies instead of the sidecar."""
        return any(part.copies for part in self._parts)

    @property
    def out_reason(self) -> str:
        """The reason if this rank is not served."""
        return next((part.out_reason for part in self._parts if part.out_reason), "")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Shows every group's memory to the sidecar, or none."""
        self._show(lambda part: part.register(kv_caches))

    def restore(self) -> None:
        """Shows the KV memory again, at the same address with other content; all of it or none."""
        self._show(GroupMemory.restore)

    def _show(self, show: Callable[[GroupMemory], None]) -> None:
        for part in self._parts:
            show(part)
            if part.out_reason:
                return self.shutdown()
        return None

    def unregister(self) -> None:
        """Ends all use of the KV memory. RuntimeError if copies go on for too long."""
        for part in self._parts:
            part.unregister()
            self._loads.end_group(part.group.place)

    def shutdown(self) -> None:
        """Leaves the sidecar."""
        for part in self._parts:
            if part.session:
                part.session.disconnect()

    # --- one step ---

    def begin_step(self, metadata: PillionMetadata) -> None:
        """Begins a step: the engine's blocks are as the scheduler meant them, so loads of this step may be written."""
        self._loads.begin_step(metadata.step, metadata.passed)
        self._handled, self._hooked = sys.exc_info()[1], True
        for part, its in zip(self._parts, [metadata, *metadata.others], strict=True):
            late = _missed_loads(part.metadata, its)
            part.metadata = its
            if part.session:
                part.begin_step(part.session, its)
                if part.waits:
                    self._wait(part, part.waits.begin_step())
                part.session.start(its.step, part.stream())
                for planned in late:
                    self._begin(part, planned.loads)
                    self._lose(planned.lost)
                part.say_notices()

    def load(self, forward_context: ForwardContext) -> None:
        """Begins this step's loads. The forward's blocks are loaded, or on a GPU waited for, before the forward reads them."""
        for part in self._parts:
            metadata = part.metadata
            if metadata is None:
                return
            lost, metadata.lost = metadata.lost, []
            self._lose(lost)
            loads, metadata.loads = metadata.loads, []
            # A layer writes its KV before its hook is called, maybe into a block with its copy still to come.
            by_cuts = not metadata.fills_tail and _may_wait_by_cuts(part, loads, forward_context)
            self._begin(part, loads, by_cuts)

    def _begin(self, part: GroupMemory, loads: list[Load], by_cuts: bool = False) -> None:
        if loads and part.session is None:
            raise RuntimeError("pillion: a load was planned for a rank that has not registered its memory")
        for req_id, plan, sync in loads:
            assert part.session is not None
            failed = part.session.load(plan, part.stream(), by_cuts and sync)
            if failed is None:
                self._loads.begin_load(part.group.place, req_id, plan)
            else:
                self._loads.fail_blocks(failed)

    def _lose(self, lost: list[Lost]) -> None:
        for req_id, blocks, sync in lost:
            if sync:
                self._loads.fail_blocks(blocks)
            else:
                self._loads.lose_load(req_id, blocks)

    def _wait(self, part: GroupMemory, cuts: Iterable[int]) -> None:
        for cut in cuts:
            assert part.session is not None
            part.session.wait_cut(cut, part.stream())

    def reach_layer(self, layer: str) -> None:
        """Waits for the blocks of a layer before the forward launches it."""
        part = self._parts[0]
        if self._hooked and part.waits and part.session:
            cuts = part.waits.reach_layer(layer)
            self._hooked = cuts is not None
            self._wait(part, cuts or ())

    def end_step(self) -> None:
        """Reports this rank's written KV of the step, unless its forward raised: vLLM calls this then, too."""
        raised = sys.exc_info()[1]
        for part in self._parts:
            part.last_step_s = time.monotonic()
            metadata = part.metadata
            # Loads not waited for by a forward that raised are waited for by the next step.
            if metadata is None or part.session is None or (raised is not None and raised is not self._handled):
                continue
            if part.waits and (unawaited := part.waits.end_step(part.session.loading)):
                cuts, blocks = unawaited
                self._wait(part, cuts)
                logger.error(
                    "pillion: step %d did not call the hooks of all its layers, so it may have read %d blocks before they were "
                    "loaded. These are computed again, and from now on every step waits for its whole load",
                    metadata.step,
                    len(blocks),
                )
                self._loads.fail_blocks(blocks)
            part.session.done(metadata.step, metadata.urgent, part.stream())

    def step_output(self) -> StepOutput | None:
        """The step begun by this rank, for its output; None if the scheduler role does not wait for it."""
        metadata = self._parts[0].metadata
        return StepOutput(metadata.run, metadata.step) if metadata is not None and metadata.asks else None

    # --- the ends of loads ---

    def take_ended(self) -> set[str] | None:
        """Requests with an asynchronous load ended in all groups since the last call, well or not, each once."""
        # A step without tokens waits for an end: it can bring nothing else.
        metadata = self._parts[0].metadata
        idle = metadata is not None and metadata.idle and not self._whole
        for part in self._parts:
            if part.session:
                self._loads.look_for_ends(part.group.place, part.session, int(LINGER_S * 1e6) if idle else 0)
        return self._loads.take_ended()

    def take_failed(self) -> set[str]:
        """Requests for vLLM to compute from their beginning; each is among the last ones returned by `take_ended`."""
        return self._loads.take_failed()

    def take_failed_blocks(self) -> set[int]:
        """Blocks not loaded. Empty for several groups: for single blocks of such a model vLLM ends the engine."""
        return self._loads.take_failed_blocks() if len(self._parts) == 1 else set()


def _missed_loads(last: PillionMetadata | None, metadata: PillionMetadata) -> list[StepLoads]:
    """Loads of earlier steps not begun by this rank, although the sidecar may copy them: such a step was skipped, or raised
    before it got there. vLLM waits for their ends, and this step for their blocks."""
    last = last or PillionMetadata(metadata.run, 0)
    if not (metadata.open_loads or last.loads or last.lost):
        return []
    unbegun = StepLoads(last.step, last.loads, last.lost)
    return [unbegun, *(planned for planned in metadata.open_loads if planned.step > last.step)]


def _may_wait_by_cuts(part: GroupMemory, loads: list[Load], forward_context: ForwardContext) -> bool:
    """True if this forward waits for its loads cut by cut."""
    needed = [plan for _, plan, sync in loads if sync]
    if not needed or not part.waits or not part.waits.permits(vllm_compat.hook_mode(forward_context)):
        return False
    part.waits.expect_blocks([block for plan in needed for block in _shim.plan_blocks(plan)])
    return True
