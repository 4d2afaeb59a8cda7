"""The driver of an engine whose steps fail on purpose; it goes on as vLLM's fault tolerance does.

vLLM offers its fault tolerance for expert parallelism on several GPUs alone. This driver calls the same functions of vLLM
around the step of an engine in its own process: it aborts all requests, drops their state in the ranks, and hands the rest of
the batch queue to the scheduler.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.sentinel.gpu_worker_sentinel import WorkerSentinel

from pillion import _shim
from pillion.metadata import StepOutput
from testkit import engine_driver

# prepare: the step raises before vLLM calls the connector. first-layer: it raises before the first layer's hook. layer: it
# raises in the middle layer. output: it computes wrong KV, and its output is refused.
Kind = Literal["prepare", "first-layer", "layer", "output"]
# New tokens of a step for a part of a prompt.
PREFILL_TOKENS = 256
# The factor on attention's output where KV is to be wrong.
WRONG_FACTOR = -3.0


class Failure(Exception):
    """The fault of a step."""


@dataclasses.dataclass
class Fault:
    """A fault for a later step, and the facts observed there."""

    kind: Kind
    # It strikes in a step with loads, or in one with a part of a prompt, after `after` others of the same kind.
    on_load: bool
    after: int
    # A process frozen for `frozen_s` before it reads the failing step's loads; 0: none.
    frozen: int
    frozen_s: float
    struck: bool = False
    step: int = 0
    # Synchronous loads of the failing step, and the blocks of its loads.
    sync_loads: int = 0
    loaded: list[int] = dataclasses.field(default_factory=list)
    # True if the failing step was to wait for them cut by cut.
    by_cuts: bool = False
    # Blocks given by vLLM to requests of the next step.
    given_next: list[int] = dataclasses.field(default_factory=list)
    seen_next: bool = False


class Unwaiting:
    """Waits between layers, without the waits left by a failed forward."""

    def __init__(self, waits: Any) -> None:
        self._waits = waits

    def begin_step(self) -> list[int]:
        """Begins the step and drops those waits."""
        self._waits.begin_step()
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waits, name)


class FailingDriver(engine_driver.Driver):
    """Has steps fail, and goes on after them."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self._core = self._engine.engine_core.engine_core
        self._worker = self._core.model_executor.driver_worker.worker
        self._connector = self._core.scheduler.get_kv_connector()
        # The fault for a later step, the fault of the current step, and the last fault so far.
        self._fault: Fault | None = None
        self._striking: Fault | None = None
        self._last: Fault | None = None
        # True if the failed step's output is reported to the connector as taken.
        self._accepts_failed = False
        self._failed_metadata: Any = None
        self._wrap()

    # === Commands ===

    def fail(self, kind: Kind, on_load: bool = False, after: int = 0, frozen: int = 0, frozen_s: float = 0.0) -> None:
        """Has a later step fail."""
        self._fault = Fault(kind, on_load, after, frozen, frozen_s)

    def failed(self) -> dict[str, Any] | None:
        """Forgets and returns the last fault, and drops one for a later step; None if none struck."""
        last, self._last, self._fault = self._last, None, None
        return dataclasses.asdict(last) if last else None

    def accept_failed(self) -> None:
        """From now on outputs of failed steps are reported to the connector as taken."""
        self._accepts_failed = True

    def wait_for_nothing(self) -> None:
        """From now on no step waits for loads of an earlier step."""
        role = self._role()
        begin, (part,) = role._begin, role._parts
        role._begin = lambda part, loads, by_cuts=False: begin(part, loads, True)
        part.waits = Unwaiting(part.waits)

    def counter(self, metric: str) -> int:
        """A counter of vLLM's metrics, over its labels."""
        return int(sum(found.value for found in self._llm.get_metrics() if found.name == metric))

    # === Faults ===

    @staticmethod
    def _role() -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def _wrap(self) -> None:
        runner = self._worker.model_runner
        prepare = "prepare_inputs" if hasattr(runner, "prepare_inputs") else "_prepare_inputs"
        called = self._engine.vllm_config.compilation_config.static_forward_context.values()
        layers = [layer for layer in called if hasattr(layer, "kv_cache")]
        middle, first = layers[len(layers) // 2].impl, layers[0].impl
        if self._connector is not None:
            _behind(self._connector, "update_state_after_alloc", self._plans)
        _behind(runner, "execute_model", self._begins)
        _behind(runner, prepare, lambda *_: self._raise("prepare"))
        _behind(first, "do_kv_cache_update", lambda *_: self._raise("first-layer"))
        _behind(middle, "forward", lambda *_: self._raise("layer"))
        forward, sample, step = middle.forward, runner.sample_tokens, self._engine.step

        def forwarded(*arguments: Any, **named: Any) -> Any:
            result = forward(*arguments, **named)
            if self._strikes("output"):
                named["output"].mul_(WRONG_FACTOR)
            return result

        def sampled(*arguments: Any, **named: Any) -> Any:
            output = sample(*arguments, **named)
            if self._strikes("output"):
                if not hasattr(output, "get_output"):
                    self._raise("output")
                fault, self._striking = self._striking, None
                output.get_output = lambda: self._refuse(fault)
            return output

        def stepped() -> Any:
            try:
                return step()
            except Failure:
                self._go_on()
                return []

        middle.forward, runner.sample_tokens, self._engine.step = forwarded, sampled, stepped

    def _strikes(self, kind: Kind) -> bool:
        return self._striking is not None and self._striking.kind == kind

    def _begins(self, output: Any, *_: Any) -> None:
        """Notes the blocks of the next step, as a rank begins it."""
        if self._last is not None and not self._last.seen_next:
            self._last.seen_next = True
            tables = [new.block_ids for new in output.scheduled_new_reqs]
            tables += [given for given in output.scheduled_cached_reqs.new_block_ids if given]
            self._last.given_next = [block for table in tables for group in table for block in group]
        fault, metadata = self._fault, output.kv_connector_metadata
        if fault is None or metadata is None:
            return
        if not (metadata.loads if fault.on_load else output.total_num_scheduled_tokens >= PREFILL_TOKENS):
            return
        if fault.after:
            fault.after -= 1
            return
        self._fault, self._striking, self._failed_metadata = None, fault, metadata
        fault.step = metadata.step
        fault.sync_loads = sum(sync for _, _, sync in metadata.loads)
        fault.loaded = [block for _, plan, _ in metadata.loads for block in _shim.plan_blocks(plan)]

    def _plans(self, _request: Any, _blocks: Any, external_tokens: int) -> None:
        """Freezes the process of the fault before the connector plans a load."""
        fault = self._fault
        if external_tokens and fault is not None and fault.frozen:
            os.kill(fault.frozen, signal.SIGSTOP)
            threading.Timer(fault.frozen_s, os.kill, [fault.frozen, signal.SIGCONT]).start()

    def _raise(self, kind: Kind) -> None:
        if self._strikes(kind):
            fault, self._striking = self._striking, None
            self._refuse(fault)

    def _refuse(self, fault: Fault | None) -> None:
        assert fault is not None
        fault.struck = True
        (part,) = self._role()._parts
        fault.by_cuts = part.waits is not None and part.waits.waiting
        self._last = fault
        raise Failure(fault.kind)

    def _go_on(self) -> None:
        """Recovers as vLLM's engine core and its workers do after a fault."""
        fault, scheduler = self._last, self._core.scheduler
        assert fault is not None
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        processor = self._engine.output_processor
        processor.abort_requests(list(processor.request_states), internal=True)
        if not fault.frozen and torch.cuda.is_available():
            torch.cuda.synchronize()
        WorkerSentinel._clean_worker_state(SimpleNamespace(worker=self._worker))
        # A refused output is older than the outputs left in the queue; a raising step is younger.
        if fault.kind == "output":
            self._accept()
        if hasattr(EngineCoreSentinel, "_drain_batch_queue"):
            EngineCoreSentinel._drain_batch_queue(SimpleNamespace(engine=self._core))
        elif self._core.batch_queue:
            # As vLLM 0.32 does.
            self._core.batch_queue.clear()
        if fault.kind != "output":
            self._accept()

    def _accept(self) -> None:
        if self._accepts_failed:
            taken = StepOutput(self._failed_metadata.run, self._failed_metadata.step)
            self._connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=taken))


def _behind(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Has `act` called with the same arguments before each call of a method of one object."""
    method = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        act(*arguments)
        return method(*arguments, **named)

    setattr(owner, name, called)


if __name__ == "__main__":
    engine_driver.Driver = FailingDriver  # type: ignore[misc]
    engine_driver.main()
