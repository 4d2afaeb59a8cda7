"""Time to the first token of a long prompt: cold, with its KV on the device, and reloaded from the host.

Modes run one after the other in processes of their own; `--rival none --rival offloading --rival pegaflow` adds them.
After the timed rounds each mode must show that its answers depend on the KV: a zeroed block must change log probabilities,
a zeroed layer must change tokens; and reloaded KV must give tokens and log probabilities bit-equal to the device's own hit.
`waited_ms` is the part of a first token's time before the request's first place in a step.
Asynchronous vLLM launches the next step before it looks at a first token, unless one token is asked.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine, runs

# Answers are compared by so many tokens; the timed part ends with the first. Asynchronous scheduling launches the step after
# it before it is looked at; a request for one token has no such step.
OUTPUT_TOKENS = 8
ONE_TOKEN = 1
EXACT_OUTPUT_TOKENS = 16
EXACT_LOGPROBS = 5
# The prompt of the exact check; the timed ones are 0 (warm-up), 1, 2, ...
EXACT_SEED = 1_000_000
PHASES = ("cold", "hit", "hit1", "reload", "reload1")

# kv_mib: every prompt of a full run takes 641 blocks of 2 MiB and vLLM reuses the longest free ones first, so a prompt finds
# its own old ids only after 22 others.
SIZES = {
    "full": {"prompts": 8, "prompt_tokens": 10_240, "hits": 5, "reloads": 3, "kv_mib": 28 * 1024, "host_gib": 24},
    "quick": {"prompts": 2, "prompt_tokens": 4_096, "hits": 2, "reloads": 2, "kv_mib": 6 * 1024, "host_gib": 4},
    "tiny": {"prompts": 3, "prompt_tokens": 512, "hits": 3, "reloads": 2, "kv_mib": 24, "host_gib": 1},
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
    """Cold and hits for every prompt, then every prompt from the host; the first prompt is a warm-up."""
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"] + 1)]
    # By phase, for every prompt the answers to it.
    answers: dict[str, list[list[Answer]]] = {"cold": [], "hit": [], "hit1": []}
    for prompt in prompts:
        answers["cold"].append([engine.ask(prompt, OUTPUT_TOKENS)])
        engine.rest(1)
        answers["hit"].append([engine.ask(prompt, OUTPUT_TOKENS) for _ in range(sizes["hits"])])
        answers["hit1"].append([engine.ask(prompt, ONE_TOKEN) for _ in range(sizes["hits"])])
    engine.say("cold and hit done")
    if options.mode not in rig.CACHELESS:
        engine.rest()
        for phase, tokens in (("reload", OUTPUT_TOKENS), ("reload1", ONE_TOKEN)):
            answers[phase] = [reloads(engine, prompt, tokens, sizes["reloads"]) for prompt in prompts]
        engine.say("reloads done")
    result: dict[str, Any] = {"full_hit_tokens": (sizes["prompt_tokens"] - 1) // engine.block_tokens * engine.block_tokens}
    for phase, asked in answers.items():
        timed = [answer for answers_of_prompt in asked[1:] for answer in answers_of_prompt]
        result[phase] = {
            "ttft_ms": [answer.ttft_ms for answer in timed],
            "waited_ms": [answer.waited_ms for answer in timed],
            "cached_tokens": [answer.cached_tokens for answer in timed],
            "runs": [runs(answer.block_ids) for answer in timed],
            "tokens": [[answer.tokens for answer in answers_of_prompt] for answers_of_prompt in asked[1:]],
        }
    return result | {"exact": exact(engine, sizes, options)}


def reloads(engine: Engine, prompt: list[int], tokens: int, count: int) -> list[Answer]:
    """Answers to a prompt that the device has just forgotten."""
    answers = []
    for _ in range(count):
        engine.reset()
        answers.append(engine.ask(prompt, tokens))
    return answers


def exact(engine: Engine, sizes: dict[str, int], options: argparse.Namespace) -> dict[str, bool]:
    """Checks that reloaded KV is bit-equal to the device's KV, and that wrong KV changes answers."""
    prompt = engine.prompt(sizes["prompt_tokens"], EXACT_SEED)

    def ask() -> Answer:
        return engine.ask(prompt, EXACT_OUTPUT_TOKENS, EXACT_LOGPROBS)

    ask()
    engine.rest()
    right = ask()
    checks: dict[str, bool] = {}
    if options.mode not in rig.CACHELESS:
        engine.reset()
        reloaded = ask()
        checks["reload_tokens_equal"] = reloaded.tokens == right.tokens
        checks["reload_logprobs_equal"] = reloaded.logprobs == right.logprobs
        # vLLM's own cache has whole blocks; a connector's hit may end within the last one.
        checks["reload_was_a_hit"] = reloaded.cached_tokens >= right.cached_tokens
    held = ask()
    engine.spoil_block(held.block_ids[len(held.block_ids) // 2])
    checks["wrong_block_is_seen"] = ask().logprobs != right.logprobs
    engine.spoil_layer()
    checks["wrong_layer_changes_tokens"] = ask().tokens != right.tokens
    return checks


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode; its answers against its own and against those of the first mode."""
    result: dict[str, Any] = {"facts": raw["facts"]}
    for phase in [phase for phase in PHASES if phase in raw]:
        measured = raw[phase]
        result[f"{phase}_ms"] = harness.spread(measured["ttft_ms"])
        result[f"{phase}_waited_ms"] = round(statistics.median(measured["waited_ms"]), 2)
        if phase in ("cold", "hit", "reload"):
            result[f"{phase}_runs"] = max(measured["runs"])
        if phase != "cold":
            # A shorter hit is no reload.
            full = sum(tokens >= raw["full_hit_tokens"] for tokens in measured["cached_tokens"])
            result[f"{phase}_full_hits"] = round(full / len(measured["cached_tokens"]), 4)
    hit = first_answers(raw["hit"])
    if "reload" in raw:
        # Every one of them, each against its prompt's first hit.
        equal = [tokens == first for first, all_ in zip(hit, raw["reload"]["tokens"], strict=True) for tokens in all_]
        result["reload_equals_hit"] = round(sum(equal) / len(equal), 4)
    result["hit_equals_cold"] = rig.share_equal(hit, first_answers(raw["cold"]))
    for phase in ("cold", "hit"):
        result[f"{phase}_equals_first_mode"] = rig.share_equal(first_answers(raw[phase]), first_answers(reference[phase]))
    result["exact"] = raw["exact"]
    result["prompts"] = len(hit)
    result["ok"] = all(raw["exact"].values()) and result.get("reload_equals_hit", 1.0) == 1.0
    result["ok"] = result["ok"] and all(result.get(f"{phase}_full_hits", 1.0) == 1.0 for phase in ("reload", "reload1"))
    return result


def first_answers(phase: dict[str, Any]) -> list[list[int]]:
    """Tokens of every prompt's first answer in a phase."""
    return [answers[0] for answers in phase["tokens"]]


# The first hit after a reset is computed in part, to be compared: here every reload is one.
UNCHECKED = ("check_every=0",)
BENCH = rig.Bench("ttft", str(__doc__), SIZES, engine_settings, measure, compare, UNCHECKED)

if __name__ == "__main__":
    rig.main(BENCH)
