"""First token of a long prompt with its KV at another sidecar, over TCP on loopback.

An engine computes the prompts and ends; its sidecar stays. Then a second engine with a sidecar of its own asks for each once:
in `early` blocks go on to the device while later ones are still on the wire (`kv_load_failure_policy` is `recompute`), and in
`whole` the wire comes first and the device after it (`fail`), each with an empty sidecar. The same prompt from the own
sidecar's memory afterwards is the scale. All on one GPU, one engine at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from benches import harness
from benches.gpu import rig
from benches.gpu.engine import Answer, Engine
from benches.gpu.ttft import OUTPUT_TOKENS, UNCHECKED, engine_settings, reloads
from testkit.ports import free_port
from testkit.sidecar import Sidecar
from testkit.waiting import Failed

# Modes, with vLLM's policy for a failed load. The first one computes the prompts of the others.
POLICIES = {"owner": "recompute", "early": "recompute", "whole": "fail"}
METRICS = ("pillion_query_early_answers_total", "pillion_mesh_fetched_blocks_total", "pillion_mesh_faults_total")

SIZES = {
    "full": {"prompts": 8, "prompt_tokens": 10_240, "kv_mib": 8 * 1024, "host_gib": 16},
    "quick": {"prompts": 2, "prompt_tokens": 4_096, "kv_mib": 6 * 1024, "host_gib": 4},
    "tiny": {"prompts": 2, "prompt_tokens": 512, "kv_mib": 24, "host_gib": 1},
}


def measure(engine: Engine, sizes: dict[str, int], _options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Every prompt once, the first as a warm-up, then once from the own sidecar's memory."""
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"] + 1)]
    first = [engine.ask(prompt, OUTPUT_TOKENS) for prompt in prompts]
    engine.rest()
    engine.say("first answers done")
    again = [answer for prompt in prompts for answer in reloads(engine, prompt, OUTPUT_TOKENS, 1)]
    full = (sizes["prompt_tokens"] - 1) // engine.block_tokens * engine.block_tokens
    return {"full_hit_tokens": full, "first": answered(first), "again": answered(again)}


def answered(answers: list[Answer]) -> dict[str, list[Any]]:
    """The recorded parts of answers, without the warm-up."""
    timed = answers[1:]
    return {
        "ttft_ms": [answer.ttft_ms for answer in timed],
        "cached_tokens": [answer.cached_tokens for answer in timed],
        "tokens": [answer.tokens for answer in timed],
    }


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode: its first answers come from the peer (the owner's are computed), the others from memory."""
    owner = raw is reference
    full = raw["full_hit_tokens"]
    result = {
        "facts": raw["facts"],
        "cold_ms" if owner else "peer_ms": harness.spread(raw["first"]["ttft_ms"]),
        "reload_ms": harness.spread(raw["again"]["ttft_ms"]),
        # Against reloads of the owner: a computed prompt rounds differently.
        "tokens_equal": rig.share_equal(raw["again" if owner else "first"]["tokens"], reference["again"]["tokens"]),
    }
    hits = raw["again"]["cached_tokens"] + ([] if owner else raw["first"]["cached_tokens"])
    result["full_hits"] = round(sum(tokens >= full for tokens in hits) / len(hits), 4)
    result["ok"] = result["tokens_equal"] == result["full_hits"] == 1.0
    return result


def run(_bench: rig.Bench, options: argparse.Namespace, _modes: list[str], folder: Path) -> rig.Results:
    """Runs the owner, then each other mode beside the owner's sidecar."""
    children = {mode: rig.EngineProcess("peers", mode, options, options.logs / f"peers-{mode}.log") for mode in POLICIES}
    owner, reader = (f"127.0.0.1:{free_port()}" for _ in range(2))
    results: rig.Results = {}

    def served(mode: str, listen: str, peer: str) -> contextlib.AbstractContextManager[Sidecar]:
        mesh = ("--mesh-listen", listen, "--peer", peer, "--node-id", mode, "--mesh-plaintext")
        (folder / mode).mkdir()
        log = options.logs / f"serve-{mode}.log"
        return rig.sidecar(folder / mode, options, options.sizes["host_gib"], log, *mesh)

    try:
        for child in children.values():
            child.hear(rig.IMPORT_WATCHDOG_S)
        with served("owner", owner, reader) as first:
            reference: Any = None
            for mode, policy in POLICIES.items():
                with contextlib.ExitStack() as stack:
                    keeper = first
                    if reference is not None:
                        keeper = stack.enter_context(served(mode, reader, owner))
                        keeper.wait_metric("pillion_mesh_peer_keys", first.metrics()["pillion_blocks"])
                    transfer = rig.pillion_transfer(keeper, options) | {"kv_load_failure_policy": policy}
                    raw = children[mode].measure({"model": str(options.model_folder), "transfer": transfer, "reference": None})
                    reference = reference or raw
                    counts = keeper.metrics()
                    results[mode] = compare(raw, reference) | {name: counts[name] for name in METRICS}
                    harness.say(f"{mode}: {json.dumps(results[mode])}")
    except Failed as error:
        results["error"] = rig.failure("peers", error)
    finally:
        for child in children.values():
            child.end()
    return results


BENCH = rig.Bench("peers", str(__doc__), SIZES, engine_settings, measure, compare, UNCHECKED)

if __name__ == "__main__":
    rig.main(BENCH, run)
