#!/usr/bin/env python3
"""First token of a long prompt whose KV another sidecar holds, over TCP on loopback.

An engine computes the prompts and ends; its sidecar stays. Then a second engine with a sidecar of its own asks for each
once: `early`, where blocks go on to the device while later ones are still on the wire (`kv_load_failure_policy` is
`recompute`), and `whole`, where the wire comes first and the device after it (`fail`), each with a sidecar that has nothing
yet. The same prompt from the own sidecar's memory afterwards is the scale. All on one GPU, one engine at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import rig
from engine import Answer, Engine
from ttft import OUTPUT_TOKENS, engine_settings, reloads

# Modes, with what vLLM does about a load that fails. What the others ask for is computed by the first.
POLICIES = {"owner": "recompute", "early": "recompute", "whole": "fail"}
DIRECTORY_WATCHDOG_S = 30
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
    """What is kept of answers, the warm-up's left out."""
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
        "cold_ms" if owner else "peer_ms": rig.spread(raw["first"]["ttft_ms"]),
        "reload_ms": rig.spread(raw["again"]["ttft_ms"]),
        # Against reloads of the owner: a computed prompt rounds differently.
        "tokens_equal": rig.share_equal(raw["again" if owner else "first"]["tokens"], reference["again"]["tokens"]),
    }
    hits = raw["again"]["cached_tokens"] + ([] if owner else raw["first"]["cached_tokens"])
    result["full_hits"] = round(sum(tokens >= full for tokens in hits) / len(hits), 4)
    result["ok"] = result["tokens_equal"] == result["full_hits"] == 1.0
    return result


def metric(http: str, name: str) -> float:
    """A counter or gauge of a sidecar, added up over its labels."""
    page = rig.fetch(f"{http}/metrics") or ""
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if line.partition(" ")[0].partition("{")[0] == name]
    return sum(float(value) for _, value in rows)


def run(_bench: rig.Bench, options: argparse.Namespace, _modes: list[str], folder: Path) -> rig.Results:
    """The owner, then each other mode beside the owner's sidecar."""
    options.logs = options.logs or folder
    options.logs.mkdir(parents=True, exist_ok=True)
    model = rig.write_model(folder / "model", rig.shape(options))
    children = {mode: rig.Child(mode, options, options.logs / f"peers-{mode}.log") for mode in POLICIES}
    owner, reader = (f"127.0.0.1:{rig.free_port()}" for _ in range(2))
    results: rig.Results = {}

    def sidecar(mode: str, listen: str, peer: str) -> contextlib.AbstractContextManager[str]:
        mesh = ("--mesh-listen", listen, "--peer", peer, "--node-id", mode, "--mesh-plaintext")
        log = options.logs / f"serve-{mode}.log"
        return rig.sidecar(folder / f"{mode}.sock", options, options.sizes["host_gib"], log, *mesh)

    try:
        for child in children.values():
            child.read(rig.IMPORT_WATCHDOG_S)
        with sidecar("owner", owner, reader) as owner_http:
            reference: Any = None
            for mode, policy in POLICIES.items():
                with contextlib.ExitStack() as stack:
                    http = owner_http
                    if reference is not None:
                        http = stack.enter_context(sidecar(mode, reader, owner))
                        wait_for_keys(http, metric(owner_http, "pillion_blocks"))
                    transfer = rig.pillion_transfer(folder / f"{mode}.sock", options) | {"kv_load_failure_policy": policy}
                    raw = children[mode].measure({"model": str(model), "transfer": transfer, "reference": None})
                    reference = reference or raw
                    results[mode] = compare(raw, reference) | {name: metric(http, name) for name in METRICS}
                    rig.say(f"{mode}: {json.dumps(results[mode])}")
    except rig.BenchError as error:
        results["error"] = rig.failure("peers", error)
    finally:
        for child in children.values():
            child.end()
    return results


def wait_for_keys(http: str, keys: float) -> None:
    """Until a sidecar knows what its peer has."""
    deadline = time.monotonic() + DIRECTORY_WATCHDOG_S
    while metric(http, "pillion_mesh_peer_keys") < keys:
        if time.monotonic() > deadline:
            raise rig.BenchError(f"the peer's {keys:.0f} blocks are not known after {DIRECTORY_WATCHDOG_S} s")
        time.sleep(0.05)


BENCH = rig.Bench("peers", str(__doc__), SIZES, engine_settings, measure, compare)

if __name__ == "__main__":
    rig.main(BENCH, run)
