"""A real trace replayed: how many prompt tokens are found, and when first tokens come.

Requests of Mooncake's conversation trace arrive as it says, `speed` times as fast; one conversation in `one_in` is kept. A
prompt's tokens are made of its blocks' ids, 512 of each, and those behind the last whole block of the request's number. The
clock of a first token starts when the request is due, also where a step delays its arrival.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine

TRACE = Path(__file__).resolve().parents[1] / "traces/mooncake-conversation.jsonl.gz"
ID_TOKENS = 512
# kv_mib: 15,000 blocks of 2 MiB; host_gib: 40,960 of them.
SIZES = {
    "full": {
        "one_in": 16, "seconds": 2400, "speed": 20, "prompt_max": 30_000, "output_max": 256,
        "batched_tokens": 8192, "kv_mib": 30_000, "host_gib": 80,
    },
    "quick": {
        "one_in": 16, "seconds": 300, "speed": 20, "prompt_max": 30_000, "output_max": 32,
        "batched_tokens": 8192, "kv_mib": 30_000, "host_gib": 16,
    },
    "tiny": {
        "one_in": 16, "seconds": 120, "speed": 20, "prompt_max": 4096, "output_max": 4,
        "batched_tokens": 8192, "kv_mib": 16, "host_gib": 1,
    },
}  # fmt: skip
# A room in which the host evicts nothing: these requests and their answers fill 69 GiB, and LMCache evicts from 77 GiB on.
# Those of "full" would fill 305 GiB.
SIZES["all"] = SIZES["full"] | {"seconds": 570, "host_gib": 96}
WARM_SEED = 30_000_000
WARM_TOKENS = (8192, 2048, 300, 17)
REQUEST_SEED = 40_000_000


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and when it is due, in seconds from the beginning."""

    due: float
    prompt: list[int]
    output: int


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["prompt_max"] + sizes["output_max"] + 64,
        "max_num_batched_tokens": sizes["batched_tokens"],
        "max_num_seqs": 256,
    }


def arrivals(sizes: dict[str, int], vocabulary: int) -> list[Arrival]:
    """The replayed part of the trace."""
    blocks: dict[int, list[int]] = {}

    def tokens(seed: int, count: int) -> list[int]:
        return random.Random(seed).choices(range(3, vocabulary), k=count)

    found = []
    with gzip.open(TRACE, "rt") as file:
        for number, line in enumerate(file):
            request = json.loads(line)
            ids, length = request["hash_ids"], request["input_length"]
            # The second id is a conversation's own; the first one is shared by nearly all.
            root = ids[min(1, len(ids) - 1)]
            if request["timestamp"] > sizes["seconds"] * 1000:
                break
            if (root * 2654435761 >> 7) % sizes["one_in"] or length > sizes["prompt_max"]:
                continue
            prompt: list[int] = []
            for block in ids[: length // ID_TOKENS]:
                prompt += blocks.setdefault(block, tokens(block, ID_TOKENS))
            prompt += tokens(REQUEST_SEED + number, length - len(prompt))
            due = request["timestamp"] / 1000 / sizes["speed"]
            found.append(Arrival(due, prompt, min(request["output_length"], sizes["output_max"])))
    return found


def measure(engine: Engine, sizes: dict[str, int], options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Every request, when it is due."""
    waiting = arrivals(sizes, engine.shape["vocab_size"])
    engine.say(f"{len(waiting)} requests of {sum(len(one.prompt) for one in waiting)} tokens in {waiting[-1].due:.0f} s")
    prompts = [engine.prompt(tokens, WARM_SEED + tokens) for tokens in WARM_TOKENS if tokens <= sizes["prompt_max"]]
    rig.warm_up(engine, prompts, sizes["output_max"], options.mode)
    asked: dict[str, int] = {}
    answers: dict[int, Answer] = {}
    begun, added = time.perf_counter(), 0
    while len(answers) < len(waiting):
        now = time.perf_counter() - begun
        while added < len(waiting) and waiting[added].due <= now:
            asked[engine.add(waiting[added].prompt, waiting[added].output)] = added
            added += 1
        if not engine.running:
            time.sleep(max(0.0, waiting[added].due - now))
            continue
        answers |= {asked[request]: answer for request, answer in engine.step()}
    elapsed_s = time.perf_counter() - begun
    engine.say(f"answered in {elapsed_s:.1f} s")
    return {
        "elapsed_s": elapsed_s,
        "tokens": [answers[number].tokens for number in range(len(waiting))],
        "requests": [requested(answers[number], begun + one.due) for number, one in enumerate(waiting)],
    }


def requested(answer: Answer, due: float) -> dict[str, Any]:
    """One request, in milliseconds from when it was due."""
    return {
        "tokens": answer.prompt_tokens,
        "found": answer.cached_tokens,
        "waited_ms": round((answer.scheduled - due) * 1e3, 1),
        "ttft_ms": round((answer.first - due) * 1e3, 1),
    }


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode, and the share of its first tokens equal to those of the first mode."""
    requests = raw["requests"]
    ttft = [request["ttft_ms"] for request in requests]
    first_equal = rig.first_tokens_equal(raw["tokens"], reference["tokens"])
    return {
        "facts": raw["facts"],
        "requests": len(requests),
        "prompt_tokens": sum(request["tokens"] for request in requests),
        "found": round(sum(request["found"] for request in requests) / sum(request["tokens"] for request in requests), 4),
        "ttft_mean_ms": round(statistics.fmean(ttft), 1),
        "ttft_p50_ms": harness.percentile(ttft, 0.5),
        "ttft_p99_ms": harness.percentile(ttft, 0.99),
        "waited_mean_ms": round(statistics.fmean(request["waited_ms"] for request in requests), 1),
        "elapsed_s": round(raw["elapsed_s"], 2),
        "first_tokens_equal": first_equal,
        "ok": first_equal >= rig.FIRST_TOKENS_EQUAL_MIN,
    }


BENCH = rig.Bench("trace", str(__doc__), SIZES, engine_settings, measure, compare)

if __name__ == "__main__":
    rig.main(BENCH)
