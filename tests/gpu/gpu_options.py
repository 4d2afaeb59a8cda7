"""Options of vLLM in the GPU tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from testkit import engine
from testkit import model as models

# Pages of 32 KiB in blocks of 32 tokens: cuts of 4, 12 and 4 layers.
SHAPE = models.Shape(
    layers=20,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=1024,
    vocab=1024,
    attention_scale=2.0,
)
# 640 KiB a block of the tests' model: 400 blocks, more than three of its longest requests.
KV_BYTES = 256 << 20
# Room beside an engine that has just been killed, and the sidecar.
MEMORY_PART = 0.3
# Few graphs are captured in a few seconds.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32]
# Ranks add up through NCCL alone, point to point: always in the same order, and without NVLink's multicast, which some machines
# forbid. Read where vLLM is imported, too early for the engine's own settings.
NCCL_ALONE = ("env", "NCCL_NVLS_ENABLE=0", "VLLM_ALLREDUCE_USE_FLASHINFER=0", "VLLM_ALLREDUCE_USE_SYMM_MEM=0")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run the engine."""

    runner: Literal[1, 2]
    graphs: bool
    load: Literal["auto", "sync", "async"] = "auto"
    layout: Literal["auto", "none"] = "auto"
    # No sidecar without a GPU can copy.
    copy: Literal["auto", "engine", "sidecar"] = "sidecar"
    # The number of GPUs, too.
    tensor_parallel: int = 1

    def __str__(self) -> str:
        ranks = f"tp{self.tensor_parallel}-" if self.tensor_parallel > 1 else ""
        return f"{ranks}v{self.runner}-{'graphs' if self.graphs else 'eager'}-{self.load}-layout-{self.layout}-copy-{self.copy}"


def options(model: Path, mode: Mode, socket: Path | None, **more: Any) -> engine.Options:
    """vLLM with its own processes and asynchronous scheduling, its default on a GPU."""
    arguments: dict[str, Any] = {
        "enforce_eager": not mode.graphs,
        "gpu_memory_utilization": MEMORY_PART,
        "async_scheduling": True,
    }
    if mode.graphs:
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": CAPTURE_SIZES,
        }
    if mode.tensor_parallel > 1:
        arguments["disable_custom_all_reduce"] = True
        more = {"prefix": NCCL_ALONE, "tensor_parallel": mode.tensor_parallel} | more
    given: dict[str, Any] = {
        "model": model,
        "socket": socket,
        "load": mode.load,
        "copy": mode.copy,
        "multiprocess": True,
        "kv_bytes": KV_BYTES,
        "extra": {"pillion.layout": mode.layout},
        "arguments": arguments,
        "variables": {
            "VLLM_USE_V2_MODEL_RUNNER": str(mode.runner - 1),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # Kernels of states are chosen by their times, and round differently: later engines choose as the first one did.
            "TRITON_CACHE_AUTOTUNING": "1",
        },
    }
    return engine.Options(**given | more)
