#!/usr/bin/env python3
"""Time to the first token of a long prompt: cold, with its KV on the device, and reloaded from the host.

Modes run one after the other in processes of their own; `--rival none --rival offloading --rival pegaflow` adds them.
After the timed rounds each mode must show that its answers depend on the KV: a zeroed block must change log probabilities,
a zeroed layer must change tokens; and reloaded KV must give tokens and log probabilities bit-equal to the device's own hit.
"""

from __future__ import annotations

import argparse
from typing import Any

import rig

from engine import Answer, Engine, runs

# Answers are compared by so many tokens; the timed part ends with the first.
OUTPUT_TOKENS = 8
EXACT_OUTPUT_TOKENS = 16
EXACT_LOGPROBS = 5
# The prompt of the exact check; the timed ones are 0 (warm-up), 1, 2, ...
EXACT_SEED = 1_000_000

# kv_mib: every prompt of a full run takes 641 blocks of 2 MiB, 10 prompts twice, so no id is used twice: 12,820 blocks.
SIZES = {
    "full": {"prompts": 8, "prompt_tokens": 10_240, "kv_mib": 28 * 1024, "host_gib": 24},
    "quick": {"prompts": 2, "prompt_tokens": 4_096, "kv_mib": 6 * 1024, "host_gib": 4},
    "tiny": {"prompts": 3, "prompt_tokens": 512, "kv_mib": 24, "host_gib": 1},
}


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments: a prompt is computed in one step."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["prompt_tokens"] + 256,
        "max_num_batched_tokens": 16_384,
        "max_num_seqs": 256,
    }


def measure(engine: Engine, sizes: dict[str, int], options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Cold and hit for every prompt, then every prompt from the host; the first of each is a warm-up."""
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"] + 1)]
    answers: dict[str, list[Answer]] = {"cold": [], "hit": []}
    for prompt in prompts:
        answers["cold"].append(engine.ask(prompt, OUTPUT_TOKENS))
        engine.rest(1)
        answers["hit"].append(engine.ask(prompt, OUTPUT_TOKENS))
    engine.say("cold and hit done")
    if options.mode != "none":
        engine.rest()
        answers["reload"] = []
        for prompt in prompts:
            engine.reset()
            answers["reload"].append(engine.ask(prompt, OUTPUT_TOKENS))
        engine.say("reloads done")
    result: dict[str, Any] = {"full_hit_tokens": (sizes["prompt_tokens"] - 1) // engine.block_tokens * engine.block_tokens}
    for phase, asked in answers.items():
        result[phase] = {
            "ttft_ms": [answer.ttft_ms for answer in asked[1:]],
            "cached_tokens": [answer.cached_tokens for answer in asked[1:]],
            "runs": [runs(answer.block_ids) for answer in asked[1:]],
            "tokens": [answer.tokens for answer in asked[1:]],
        }
    return result | {"exact": exact(engine, sizes, options)}


def exact(engine: Engine, sizes: dict[str, int], options: argparse.Namespace) -> dict[str, bool]:
    """Whether reloaded KV is bit-equal to the device's, and whether wrong KV would have been seen."""
    prompt = engine.prompt(sizes["prompt_tokens"], EXACT_SEED)

    def ask() -> Answer:
        return engine.ask(prompt, EXACT_OUTPUT_TOKENS, EXACT_LOGPROBS)

    ask()
    engine.rest()
    right = ask()
    checks: dict[str, bool] = {}
    if options.mode != "none":
        engine.reset()
        reloaded = ask()
        checks["reload_tokens_equal"] = reloaded.tokens == right.tokens
        checks["reload_logprobs_equal"] = reloaded.logprobs == right.logprobs
        checks["reload_was_a_hit"] = reloaded.cached_tokens == right.cached_tokens
    held = ask()
    engine.spoil_block(held.block_ids[len(held.block_ids) // 2])
    checks["wrong_block_is_seen"] = ask().logprobs != right.logprobs
    engine.spoil_layer()
    checks["wrong_layer_changes_tokens"] = ask().tokens != right.tokens
    return checks


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode; its answers against its own and against the first mode's."""
    result: dict[str, Any] = {"facts": raw["facts"]}
    for phase in ("cold", "hit", "reload"):
        if phase not in raw:
            continue
        measured = raw[phase]
        result[f"{phase}_ms"] = rig.spread(measured["ttft_ms"])
        result[f"{phase}_runs"] = max(measured["runs"])
        if phase != "cold":
            # A reload that hit less is no reload.
            result[f"{phase}_full_hits"] = sum(tokens >= raw["full_hit_tokens"] for tokens in measured["cached_tokens"])
    if "reload" in raw:
        result["reload_equals_hit"] = rig.share_equal(raw["reload"]["tokens"], raw["hit"]["tokens"])
    result["hit_equals_cold"] = rig.share_equal(raw["hit"]["tokens"], raw["cold"]["tokens"])
    for phase in ("cold", "hit"):
        result[f"{phase}_equals_first_mode"] = rig.share_equal(raw[phase]["tokens"], reference[phase]["tokens"])
    result["exact"] = raw["exact"]
    result["prompts"] = len(raw["cold"]["tokens"])
    result["ok"] = all(raw["exact"].values()) and result.get("reload_equals_hit", 1.0) == 1.0
    result["ok"] = result["ok"] and result.get("reload_full_hits", result["prompts"]) == result["prompts"]
    return result


BENCH = rig.Bench("ttft", str(__doc__), SIZES, engine_settings, measure, compare)

if __name__ == "__main__":
    rig.main(BENCH)
