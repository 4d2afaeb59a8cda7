"""The cost of the sample of live weights for an engine: at its start, and after each possible change of the weights.

The model is found, its rotary caches are read and the weights are sampled as at a start; then again and again. A sample must
repeat itself, and must change with a tensor changed by 1 %.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benches import harness
from benches.gpu import models, rig
from benches.gpu.engine import Engine

AGAIN = 20
Found = TypeVar("Found")


def timed(act: Callable[[], Found]) -> tuple[Found, float]:
    """The function's result, and its milliseconds; the device has no other work before and after."""
    import torch

    def finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    finish()
    begun = time.perf_counter()
    found = act()
    finish()
    return found, (time.perf_counter() - begun) * 1e3


def measure(engine: Engine) -> dict[str, Any]:
    """Measures an engine right after its start. Its objects are frozen after the first sample, as vLLM does it then."""
    import torch

    from pillion import identity
    from pillion.models import Models
    from pillion.sample import Sampler

    gc.unfreeze()
    layers = [layer for layer in engine.layers() if isinstance(layer, torch.nn.Module)]
    models, models_ms = timed(lambda: Models(layers))
    _, rotary_ms = timed(lambda: identity.describe_rotary(models.loaded, torch.bfloat16))
    sampler, sampler_ms = timed(lambda: Sampler(models))
    first, first_ms = timed(sampler.take)
    gc.freeze()
    again = [timed(sampler.take) for _ in range(AGAIN)]
    (model,) = models.loaded
    weight = dict(model.named_parameters())["model.layers.1.input_layernorm.weight"]
    with torch.inference_mode():
        weight.mul_(1.01)
    result: dict[str, Any] = {
        "tensors": len([*model.named_parameters(), *model.named_buffers()]),
        "weights_gib": round(sum(found.numel() * found.element_size() for found in model.parameters()) / rig.GIB, 2),
        "models_ms": round(models_ms, 2),
        "rotary_ms": round(rotary_ms, 2),
        "first_ms": round(sampler_ms + first_ms, 2),
        "again_ms": harness.spread([taken_ms for _, taken_ms in again]),
        "repeats": all(found == first for found, _ in again),
        "shows_a_change": sampler.take() != first,
    }
    return result | {"ok": result["repeats"] and result["shows_a_change"]}


def main() -> None:
    """Runs one engine, in this process."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model, on vLLM's CPU build too")
    options = parser.parse_args()
    os.environ |= rig.plain_environment(options.tiny)
    shape = models.tiny("llama-8b") if options.tiny else models.SHAPES["llama-8b"]
    settings = {"enforce_eager": True, "max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20 if options.tiny else rig.GIB}
    settings["block_size"] = rig.BLOCK_TOKENS_TINY if options.tiny else rig.BLOCK_TOKENS
    with tempfile.TemporaryDirectory(prefix="pillion-sample-") as folder:
        model = models.write(Path(folder) / "model", shape)
        engine = Engine({"model": str(model), **settings}, shape, harness.say)
        line = {"bench": "gpu/sample", **measure(engine), "facts": engine.facts()}
    harness.report(line)


if __name__ == "__main__":
    main()
