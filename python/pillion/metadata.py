"""What the scheduler role tells the worker role with every step, inside vLLM's own scheduler output."""

from __future__ import annotations

from dataclasses import dataclass, field

from pillion.vllm_compat import KVConnectorMetadata


@dataclass(slots=True)
class PillionMetadata(KVConnectorMetadata):
    """One step's work for every rank."""

    run: bytes
    # The scheduler's step number, by which fences are counted.
    step: int
    # Steps up to this one whose failed loads the scheduler knows of: their saves are void.
    resolved: int = 0
    # Whether the sidecar waits for this step's fences.
    urgent: bool = False
    # Whether the step computes nothing.
    idle: bool = False
    # (request id, plan made by the shim, synchronous); several of a request whose blocks are still on their way
    loads: list[tuple[str, bytes, bool]] = field(default_factory=list)
    # Whether the last block of a synchronous load is partly full: the step itself writes behind what is loaded of it.
    fills_tail: bool = False
    # Loads whose lease was lost before they could be planned: request id, block ids, synchronous.
    lost: list[tuple[str, list[int], bool]] = field(default_factory=list)
    # How often the weights may have changed since the start: a rank that has not sampled them for this count does so now.
    weights: int = 0
    # The metadata of the engine's other cache groups for the same step, by group number.
    others: list[PillionMetadata] = field(default_factory=list)
