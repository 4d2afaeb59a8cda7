"""What the two roles tell each other with every step, inside vLLM's own scheduler output and model runner output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pillion.vllm_compat import KVConnectorMetadata, KVConnectorWorkerMetadata

# Request id, plan made by the shim, whether the step waits for it.
Load = tuple[str, bytes, bool]
# A load whose lease was lost before it could be planned: request id, block ids, whether the step would wait for it.
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
    # The scheduler's step number, by which fences are counted.
    step: int
    # Whether the sidecar waits for this step's fences.
    urgent: bool = False
    # Whether the step computes nothing.
    idle: bool = False
    # Whether the scheduler role waits to learn that vLLM has taken the output of this step, or that of an earlier one.
    asks: bool = False
    # Several of a request whose blocks are still on their way.
    loads: list[Load] = field(default_factory=list)
    # The loads of earlier steps whose output vLLM has not taken yet: a rank that such a step never reached begins them.
    open_loads: Sequence[StepLoads] = ()
    # Steps that vLLM has passed over: what ranks reported with them is lost. A rank may be told of a step several times.
    passed: Sequence[int] = ()
    # Whether the last block of a synchronous load is partly full: the step itself writes behind what is loaded of it.
    fills_tail: bool = False
    lost: list[Lost] = field(default_factory=list)
    # How often the weights may have changed since the start: a rank that has not sampled them for this count does so now.
    weights: int = 0
    # The metadata of the engine's other cache groups for the same step, by group number.
    others: list[PillionMetadata] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput(KVConnectorWorkerMetadata):
    """Says with a step's output which step it is. vLLM hands it to the scheduler role only where it takes that output."""

    run: bytes
    step: int
    # Ranks that said so.
    ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutput:
        """The output of several ranks; of no rank where they name different steps."""
        if isinstance(other, StepOutput) and (other.run, other.step) == (self.run, self.step):
            return StepOutput(self.run, self.step, self.ranks + other.ranks)
        return StepOutput(self.run, self.step, ranks=0)
