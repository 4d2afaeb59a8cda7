"""The messages between the two roles in every step, inside vLLM's own scheduler output and model runner output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pillion.vllm_compat import KVConnectorMetadata, KVConnectorWorkerMetadata

# Request id, plan made by the shim, True if the step waits for it.
Load = tuple[str, bytes, bool]
# A load whose lease was lost before its plan: request id, block ids, True if the step would have waited for it.
Lost = tuple[str, list[int], bool]


class StepLoads(NamedTuple):
    """The loads of one step."""

    step: int
    loads: list[Load]
    lost: list[Lost]


@dataclass(slots=True)
class PillionMetadata(KVConnectorMetadata):
    """One step's work for every rank."""

    run: bytes
    # The scheduler's step number, for counts of fences.
    step: int
    # True if the sidecar waits for this step's fences.
    urgent: bool = False
    # True if the step computes no tokens.
    idle: bool = False
    # True if the scheduler role waits until vLLM takes the output of this step or of an earlier one.
    asks: bool = False
    # Several loads of a request with blocks still under way.
    loads: list[Load] = field(default_factory=list)
    # The loads of earlier steps without a taken output: a rank without such a step begins them.
    open_loads: Sequence[StepLoads] = ()
    # Steps passed over by vLLM: the ranks' reports with them are lost. A rank may get a step's number several times.
    passed: Sequence[int] = ()
    # True if the last block of a synchronous load is partly full: the step itself writes behind the loaded part.
    fills_tail: bool = False
    lost: list[Lost] = field(default_factory=list)
    # Count of possible changes of the weights since the start: a rank without a sample for this count takes one now.
    weights: int = 0
    # The metadata of the engine's other cache groups for the same step, by group number.
    others: list[PillionMetadata] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput(KVConnectorWorkerMetadata):
    """Names the step in its output. vLLM passes it to the scheduler role only if it takes that output."""

    run: bytes
    step: int
    # Ranks with this output.
    ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutput:
        """The output of several ranks; of no rank if they name different steps."""
        if isinstance(other, StepOutput) and (other.run, other.step) == (self.run, self.step):
            return StepOutput(self.run, self.step, self.ranks + other.ranks)
        return StepOutput(self.run, self.step, ranks=0)
