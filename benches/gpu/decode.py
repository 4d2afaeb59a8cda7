"""The cost of saves in an engine without loads: cold prompts together, then their decode, against no connector.

Every round has prompts of its own, so nothing is found in any cache; each mode saves all of them. `--rival none` gives the
engine without a connector.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine

# kv_mib: 64 x 2,177 tokens are 8,768 blocks of 2 MiB, and the device may still hold blocks of unfinished saves. A round is 17
# GiB of KV: beyond host_gib a round evicts blocks of an earlier one.
SIZES = {
    "full": {"rounds": 5, "requests": 64, "prompt_tokens": 2048, "output": 129, "kv_mib": 22 * 1024, "host_gib": 40},
    "quick": {"rounds": 2, "requests": 8, "prompt_tokens": 1024, "output": 33, "kv_mib": 4 * 1024, "host_gib": 8},
    "tiny": {"rounds": 2, "requests": 4, "prompt_tokens": 128, "output": 16, "kv_mib": 24, "host_gib": 1},
}
WARM_SEED = 20_000_000
WARM_OUTPUT_TOKENS = 8


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments: all requests of a round fit the device."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["prompt_tokens"] + sizes["output"] + 64,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": sizes["requests"],
    }


def measure(engine: Engine, sizes: dict[str, int], _options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Plays rounds of requests that begin together."""
    requests = range(sizes["requests"])
    warm = [engine.prompt(sizes["prompt_tokens"], WARM_SEED + index) for index in requests]
    engine.ask_all(warm, [WARM_OUTPUT_TOKENS] * len(warm))
    rounds = []
    for number in range(sizes["rounds"]):
        engine.rest()
        engine.reset()
        prompts = [engine.prompt(sizes["prompt_tokens"], number * 1000 + index) for index in requests]
        begun = time.perf_counter()
        answers = engine.ask_all(prompts, [sizes["output"]] * len(prompts))
        rounds.append(figures(answers, begun, time.perf_counter()))
        engine.say(f"round {number + 1}: prefill {rounds[-1]['prefill_s']:.2f} s, decode {rounds[-1]['decode_s']:.2f} s")
    return {"rounds": rounds}


def figures(answers: list[Answer], begun: float, ended: float) -> dict[str, Any]:
    """One round: until the last request has its first token, and from there to the end."""
    prefilled = max(answer.first for answer in answers)
    decoded = sum(sum(at > prefilled for at in answer.times) for answer in answers)
    return {
        "prefill_s": prefilled - begun,
        "decode_s": ended - prefilled,
        "decoded": decoded,
        "gaps_ms": [gap for answer in answers for gap in answer.gaps_ms],
        "ttft_ms": [answer.ttft_ms for answer in answers],
        "tokens": [answer.tokens for answer in answers],
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
    }


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode, and the share of its answers equal to those of the first mode."""
    rounds = raw["rounds"]
    tokens = [answer for measured in rounds for answer in measured["tokens"]]
    theirs = [answer for measured in reference["rounds"] for answer in measured["tokens"]]
    gaps = [gap for measured in rounds for gap in measured["gaps_ms"]]
    first_equal = rig.first_tokens_equal(tokens, theirs)
    cold = sum(measured["cached_tokens"] for measured in rounds) == 0

    def medians(key: str) -> list[float]:
        return [statistics.median(measured[key] for measured in mode["rounds"]) for mode in (raw, reference)]

    (prefill, prefill_first), (decode, decode_first) = medians("prefill_s"), medians("decode_s")
    return {
        "facts": raw["facts"],
        "prefill_s": harness.spread([measured["prefill_s"] for measured in rounds]),
        "prefill_ratio": round(prefill / prefill_first, 4),
        "decode_s": harness.spread([measured["decode_s"] for measured in rounds]),
        "decode_ratio": round(decode / decode_first, 4),
        "decode_tok_s": harness.spread([measured["decoded"] / measured["decode_s"] for measured in rounds]),
        "ttft_p50_ms": harness.percentile([ttft for measured in rounds for ttft in measured["ttft_ms"]], 0.5),
        "itl_p50_ms": harness.percentile(gaps, 0.5),
        "itl_p99_ms": harness.percentile(gaps, 0.99),
        "all_cold": cold,
        "answers_equal": rig.share_equal(tokens, theirs),
        "first_tokens_equal": first_equal,
        "ok": cold and first_equal >= rig.FIRST_TOKENS_EQUAL_MIN,
    }


BENCH = rig.Bench("decode", str(__doc__), SIZES, engine_settings, measure, compare)

if __name__ == "__main__":
    rig.main(BENCH)
