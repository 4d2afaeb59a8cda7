"""A real trace replayed: how many prompt tokens are found, and when first tokens come.

Requests of a trace arrive as it says, `speed` times as fast, from its second `begin` on; of the conversations, numbered by a
hash, each `one_in`-th is kept, the one at `residue`. A prompt's tokens are made of its blocks' ids, `id_tokens` of each, and
those behind the last whole block of the request's number. The clock of a first token starts when the request is due, also
where a step delays its arrival.

With `reset_s` the engine's own cache is emptied once so many seconds of the replay are over and all its requests are answered:
`found_after` is what the requests behind find, as after the engine's restart. `--room all` has fewer requests and more host
memory, so nothing is evicted. `disk_gib` adds a disk. `waited_mean_ms` is the time until a request's first place in a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import random
import statistics
import time
from typing import Any

from benches import harness, traces
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine

# Tokens of an id in the traces: with fewer of them all lengths are shorter.
ID_TOKENS = 512
PART = {"begin": 0, "residue": 0, "reset_s": 0, "id_tokens": ID_TOKENS, "disk_gib": 0}
# kv_mib: 15,000 blocks of 2 MiB; host_gib: 40,960 of them.
SIZES = {
    "full": PART | {
        "one_in": 16, "seconds": 2400, "speed": 20, "prompt_max": 30_000, "output_max": 256,
        "batched_tokens": 8192, "kv_mib": 30_000, "host_gib": 80,
    },
    "quick": PART | {
        "one_in": 16, "seconds": 300, "speed": 20, "prompt_max": 30_000, "output_max": 32,
        "batched_tokens": 8192, "kv_mib": 30_000, "host_gib": 16,
    },
    "tiny": PART | {
        "one_in": 16, "seconds": 120, "speed": 20, "prompt_max": 4096, "output_max": 4,
        "batched_tokens": 8192, "kv_mib": 32, "host_gib": 1,
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


def arrivals(name: str, sizes: dict[str, int], vocabulary: int) -> list[Arrival]:
    """The replayed part of a trace."""
    blocks: dict[int, list[int]] = {}

    def tokens(seed: int, count: int) -> list[int]:
        return random.Random(seed).choices(range(3, vocabulary), k=count)

    found = []
    with gzip.open(traces.FILES[name], "rt") as file:
        for number, line in enumerate(file):
            request = json.loads(line)
            ids, length = request["hash_ids"], request["input_length"] * sizes["id_tokens"] // ID_TOKENS
            # The second id is a conversation's own; the first one is shared by nearly all.
            root = request.get("session", ids[min(1, len(ids) - 1)])
            seconds = request["timestamp"] / 1000 - sizes["begin"]
            if seconds > sizes["seconds"]:
                break
            is_kept = (root * 2654435761 >> 7) % sizes["one_in"] == sizes["residue"]
            if seconds < 0 or not is_kept or length > sizes["prompt_max"]:
                continue
            prompt: list[int] = []
            for block in ids[: length // sizes["id_tokens"]]:
                prompt += blocks.setdefault(block, tokens(block, sizes["id_tokens"]))
            prompt += tokens(REQUEST_SEED + number, length - len(prompt))
            found.append(Arrival(seconds / sizes["speed"], prompt, min(request["output_length"], sizes["output_max"])))
    return found


def choose_trace(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the trace."""
    parser.add_argument("--trace", choices=traces.FILES, default="conversation", help="(default: conversation)")


def measure(engine: Engine, sizes: dict[str, int], options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Every request, when it is due."""
    waiting = arrivals(options.trace, sizes, engine.shape["vocab_size"])
    engine.say(f"{len(waiting)} requests of {sum(len(one.prompt) for one in waiting)} tokens in {waiting[-1].due:.0f} s")
    prompts = [engine.prompt(tokens, WARM_SEED + tokens) for tokens in WARM_TOKENS if tokens <= sizes["prompt_max"]]
    rig.warm_up(engine, prompts, sizes["output_max"], options.mode)
    asked: dict[str, int] = {}
    answers: dict[int, Answer] = {}
    begun, added, reset = time.perf_counter(), 0, 0
    due_at: list[float] = []
    while len(answers) < len(waiting):
        now = time.perf_counter() - begun
        if sizes["reset_s"] and not reset and now >= sizes["reset_s"]:
            while engine.running:
                answers |= {asked[request]: answer for request, answer in engine.step()}
            engine.reset()
            # The trace waits meanwhile.
            begun, reset = time.perf_counter() - now, added
            continue
        while added < len(waiting) and waiting[added].due <= now:
            asked[engine.add(waiting[added].prompt, waiting[added].output)] = added
            due_at.append(begun + waiting[added].due)
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
        "requests": [requested(answers[number], due) for number, due in enumerate(due_at)],
        "reset": reset,
    }


def requested(answer: Answer, due: float) -> dict[str, Any]:
    """One request, in milliseconds from when it was due."""
    return {
        "tokens": answer.prompt_tokens,
        "found": answer.cached_tokens,
        "waited_ms": round((answer.scheduled - due) * 1e3, 1),
        "ttft_ms": round((answer.first - due) * 1e3, 1),
    }


def found_share(requests: list[dict[str, Any]]) -> float:
    """The share of the prompts' tokens not computed."""
    found, tokens = (sum(int(request[name]) for request in requests) for name in ("found", "tokens"))
    return round(found / tokens, 4)


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode, and the share of its first tokens equal to those of the first mode."""
    requests = raw["requests"]
    ttft = [request["ttft_ms"] for request in requests]
    first_equal = rig.first_tokens_equal(raw["tokens"], reference["tokens"])
    return {
        "facts": raw["facts"],
        "requests": len(requests),
        "prompt_tokens": sum(request["tokens"] for request in requests),
        "found": found_share(requests),
        **({"found_after": found_share(requests[raw["reset"] :])} if raw["reset"] else {}),
        "ttft_mean_ms": round(statistics.fmean(ttft), 1),
        "ttft_p50_ms": harness.percentile(ttft, 0.5),
        "ttft_p99_ms": harness.percentile(ttft, 0.99),
        "waited_mean_ms": round(statistics.fmean(request["waited_ms"] for request in requests), 1),
        "elapsed_s": round(raw["elapsed_s"], 2),
        "first_tokens_equal": first_equal,
        "ok": first_equal >= rig.FIRST_TOKENS_EQUAL_MIN,
    }


BENCH = rig.Bench("trace", str(__doc__), SIZES, engine_settings, measure, compare, options=choose_trace)

if __name__ == "__main__":
    rig.main(BENCH)
