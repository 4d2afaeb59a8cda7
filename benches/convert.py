"""The cost of reading blocks in a decoder other than vLLM: 64 blocks are loaded from a real sidecar, and K and V read from
them.

Loading is `Engine.load`: keys, query, and the copy into the engine's memory. Converting is `Engine.read`: K and V as arrays,
with numpy, which has one thread, and with torch, which has one a core: in place where possible (`read_ms`), and copied into the
decoder's memory (`out_ms`). Read arrays are compared with the saved ones. Medians.

    benches/run convert
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch

from benches import harness, rig
from pillion.engine import Engine, Namespace
from testkit import namespaces

BLOCKS, TOKENS, ROUNDS = 64, 32, 40
DRAM = "512MiB"
# Layers, heads and the elements of a key or a value, of 4 bytes: the model of the tests, and blocks of 1 MiB.
MODELS = {"96k": (3, 2, 64), "1m": (8, 4, 128)}
# True if each element of a key has its tokens side by side.
FORMS = {"plain": False, "transposed": True}
PROMPT = list(range(BLOCKS * TOKENS))


def measure(socket: Path, name: str, namespace: Namespace, arrays: Any, kv: Any) -> dict[str, float]:
    """Medians of all rounds."""
    times: dict[str, list[float]] = {"load_ms": [], "read_ms": [], "out_ms": []}
    out = tuple(arrays.zeros_like(part) for part in kv)
    with Engine(socket, name, namespace, BLOCKS, arrays, check_every=0) as engine:
        with engine.load(PROMPT) as request:
            if engine.save(request, PROMPT, *kv) != BLOCKS:
                sys.exit("not all blocks were kept")
        for _ in range(ROUNDS):
            engine.memory[:] = 0
            for part in out:
                part[:] = 0
            at = [time.perf_counter()]
            # The last token of a prompt is left to compute.
            request = engine.load([*PROMPT, 0])
            at.append(time.perf_counter())
            read = engine.read(request)
            at.append(time.perf_counter())
            engine.read(request, out)
            at.append(time.perf_counter())
            for spent, (before, after) in zip(times.values(), pairwise(at), strict=True):
                spent.append(1000 * (after - before))
            if not all(bool((one == other).all()) for found in (out, read) for one, other in zip(found, kv, strict=True)):
                sys.exit("what was read is not what was saved")
            engine.end(request)
    result = {name: harness.median(spent, 2) for name, spent in times.items()}
    return result | {"read_to_load": round(result["read_ms"] / result["load_ms"], 2)}


def main() -> None:
    """Prints one JSON line last."""
    harness.parser(__doc__).parse_args()
    result: dict[str, Any] = {"blocks": BLOCKS, "rounds": ROUNDS, "torch_threads": torch.get_num_threads()}
    with rig.sidecar(DRAM) as sidecar:
        for size, (layers, heads, dim) in MODELS.items():
            kv = numpy.random.default_rng(1).standard_normal((2, layers, heads, len(PROMPT), dim), dtype=numpy.float32)
            for form, transposed in FORMS.items():
                known = namespaces.new(
                    layers=layers, heads=heads, tokens=TOKENS, dim=dim, transposed=transposed, algorithm="xxhash_cbor"
                )
                for library, arrays, given in (("numpy", numpy, kv), ("torch", torch, torch.from_numpy(kv))):
                    name = f"{size}_{form}_{library}"
                    result[name] = measure(sidecar.socket, name, known, arrays, given)
    harness.report(result)


if __name__ == "__main__":
    main()
