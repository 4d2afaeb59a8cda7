"""Kernels that keep a GPU busy, and their slowdown beside copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benches import harness

# By scale: rows of the square matrices, kernels of a slice, slices. A slice of "full" takes some 0.3 s on an H200.
SCALES = {"full": (8192, 200, 16), "quick": (8192, 100, 3), "tiny": (64, 20, 2)}
# Matrix-vector products read their whole matrix, as a decode step does, in a fiftieth of a matrix product's time.
VECTORS_PER_PRODUCT = 40


def beside(transfer: Callable[[], int], scale: str) -> dict[str, Any]:
    """The ratio of launch rates with and without `transfer` again and again: of matrix products, bound by arithmetic, and of
    matrix-vector products, bound by the GPU's memory. Slices with and without transfers take turns, also in their order: a GPU
    that gets warmer gets slower."""
    rows, kernels, slices = SCALES[scale]
    matrix = torch.randn((rows, rows), device="cuda", dtype=torch.bfloat16)
    vector = torch.randn((rows, 1), device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    result: dict[str, Any] = {}
    for name, other, count in (("compute", matrix, kernels), ("memory", vector, kernels * VECTORS_PER_PRODUCT)):
        graph, launches = recorded(matrix, other, count, stream)
        ways = {"together": transfer, "alone": lambda: 0}
        samples = harness.turns(slices + 1, {way: partial(run, graph, stream, moves) for way, moves in ways.items()})
        alone, together = ([took for took, _, _ in samples[way]] for way in ("alone", "together"))
        moved, moved_s = (sum(each) for each in list(zip(*samples["together"], strict=True))[1:])
        # The first of each is a warm-up.
        pairs = [without / with_ for without, with_ in zip(alone[1:], together[1:], strict=True)]
        spread = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
        result[f"{name}_ratio"] = {key: round(value, 4) for key, value in spread.items()}
        result[f"{name}_launches_s"] = round(launches / statistics.median(alone[1:]))
        result[f"beside_{name}_gb_s"] = round(moved / moved_s / 1e9, 1)
    return result


def recorded(matrix: torch.Tensor, other: torch.Tensor, count: int, stream: torch.cuda.Stream) -> tuple[Any, int]:
    """A CUDA graph of so many products: one launch, so this process' threads do not count."""
    out = torch.empty((matrix.shape[0], other.shape[1]), device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        torch.mm(matrix, other, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(count):
            torch.mm(matrix, other, out=out)
    return graph, count


def run(graph: Any, stream: torch.cuda.Stream, transfer: Callable[[], int], _turn: int) -> tuple[float, int, float]:
    """Seconds on the GPU of one slice; the bytes moved by the transfers begun meanwhile, and their seconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin.record()
        graph.replay()
        end.record()
    moved, began = 0, time.perf_counter()
    while not end.query():
        moved += transfer()
    moving_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, moved, moving_s
