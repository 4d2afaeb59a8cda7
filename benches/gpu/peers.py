"""First token of a long prompt with its KV at another sidecar, over TCP on loopback, or on a disk.

An engine computes the prompts and ends; its sidecar stays. Then a second engine with a sidecar of its own asks for each once:
in `early` blocks go on to the device while later ones are still on the wire (`kv_load_failure_policy` is `recompute`), and in
`whole` the wire comes first and the device after it (`fail`), each with an empty sidecar. In `disk` the first sidecar has
ended, and the engine's own one has its disk. The same prompts asked again come from the own sidecar's memory, or, if a prompt
is larger than `pool_gib`, from where they came the first time. All on one GPU, one engine at a time.
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
POLICIES = {"owner": "recompute", "early": "recompute", "whole": "fail", "disk": "recompute"}
SOURCES = [mode for mode in POLICIES if mode != "owner"]
# The prompt that an engine computes before it asks for kept ones: from then on it is known how fast it computes.
COMPUTED_SEED = 2_000_000
METRICS = (
    "pillion_query_early_answers_total",
    "pillion_mesh_fetched_blocks_total",
    "pillion_mesh_faults_total",
    "pillion_ssd_read_blocks_total",
    "pillion_ssd_read_bytes_per_second",
    "pillion_ssd_dropped_blocks_total",
)

SIZES = {
    "full": {
        "prompts": 8,
        "prompt_tokens": 10_240,
        "again": 1,
        "kv_mib": 8 * 1024,
        "host_gib": 16,
        "pool_gib": 16,
        "disk_gib": 24,
    },
    "quick": {
        "prompts": 2,
        "prompt_tokens": 4_096,
        "again": 1,
        "kv_mib": 6 * 1024,
        "host_gib": 4,
        "pool_gib": 4,
        "disk_gib": 6,
    },
    "tiny": {"prompts": 2, "prompt_tokens": 512, "again": 1, "kv_mib": 24, "host_gib": 1, "pool_gib": 1, "disk_gib": 1},
}


def measure(engine: Engine, sizes: dict[str, int], _options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Another prompt, then every prompt once, the first as a warm-up, then again."""
    computed = engine.ask(engine.prompt(sizes["prompt_tokens"], COMPUTED_SEED), OUTPUT_TOKENS)
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"] + 1)]
    first = []
    for prompt in prompts:
        engine.reset()
        first.append(engine.ask(prompt, OUTPUT_TOKENS))
        # A reset drops saves under way.
        engine.rest(1)
    engine.rest()
    engine.say("first answers done")
    again = [answer for prompt in prompts[1:] for answer in reloads(engine, prompt, OUTPUT_TOKENS, sizes["again"])]
    full = (sizes["prompt_tokens"] - 1) // engine.block_tokens * engine.block_tokens
    return {
        "full_hit_tokens": full,
        "computed_ms": computed.ttft_ms,
        "first": answered(first[1:]),
        "again": answered(again),
    }


def answered(answers: list[Answer]) -> dict[str, list[Any]]:
    """The recorded parts of answers."""
    return {
        "ttft_ms": [answer.ttft_ms for answer in answers],
        "cached_tokens": [answer.cached_tokens for answer in answers],
        "tokens": [answer.tokens for answer in answers],
    }


def compare(raw: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode: its first answers come from elsewhere (the owner's are computed)."""
    owner, full = raw is reference, raw["full_hit_tokens"]
    again = len(raw["again"]["tokens"]) // len(raw["first"]["tokens"])
    # The owner's first reloads: a computed prompt rounds differently.
    right = reference["again"]["tokens"][::again]
    hits = [] if owner else list(zip(raw["first"]["cached_tokens"], raw["first"]["tokens"], right, strict=True))
    rights = [tokens for tokens in right for _ in range(again)]
    hits += zip(raw["again"]["cached_tokens"], raw["again"]["tokens"], rights, strict=True)
    result = {
        "facts": raw["facts"],
        "computed_ms": round(raw["computed_ms"], 1),
        "cold_ms" if owner else "first_ms": harness.spread(raw["first"]["ttft_ms"]),
        "again_ms": harness.spread(raw["again"]["ttft_ms"]),
        "each_ms": [round(ms, 1) for ms in raw["first"]["ttft_ms"] + raw["again"]["ttft_ms"]],
        "each_found": raw["first"]["cached_tokens"] + raw["again"]["cached_tokens"],
        "tokens_equal": round(sum(tokens == wanted for _, tokens, wanted in hits) / len(hits), 4),
        "full_hits": round(sum(cached >= full for cached, _, _ in hits) / len(hits), 4),
    }
    result["ok"] = result["tokens_equal"] == result["full_hits"] == 1.0
    return result


def wait_for_news(keeper: Sidecar, blocks: int) -> None:
    """Waits until a sidecar knows so many blocks of its peer."""
    keeper.wait_for(lambda: keeper.metrics().get("pillion_mesh_peer_keys", 0) >= blocks, "news of the owner's blocks")


def run(_bench: rig.Bench, options: argparse.Namespace, _modes: list[str], folder: Path) -> rig.Results:
    """Runs the owner, then the modes beside the owner's sidecar, then the one with its disk."""
    chosen = ["owner", *(options.source or SOURCES)]
    children = {mode: rig.EngineProcess("peers", mode, options, options.logs / f"peers-{mode}.log") for mode in chosen}
    owner, reader = (f"127.0.0.1:{free_port()}" for _ in range(2))
    results: rig.Results = {}

    disk = folder / "log"
    disk.mkdir()
    disks = (f"--ssd={disk}:{options.sizes['disk_gib']}GiB:create",)

    def served(mode: str, gib: int, *more: str) -> contextlib.AbstractContextManager[Sidecar]:
        (folder / mode).mkdir()
        return rig.sidecar(folder / mode, options, gib, options.logs / f"serve-{mode}.log", *more)

    def at(mode: str, listen: str, peer: str) -> tuple[str, ...]:
        return ("--mesh-listen", listen, "--peer", peer, "--node-id", mode, "--mesh-plaintext")

    def measure(mode: str, keeper: Sidecar) -> None:
        transfer = rig.pillion_transfer(keeper, options) | {"kv_load_failure_policy": POLICIES[mode]}
        raw = children[mode].measure({"model": str(options.model_folder), "transfer": transfer, "reference": None})
        reference = raws.setdefault("owner", raw)
        counts = keeper.metrics()
        (options.logs / f"metrics-{mode}.txt").write_text(keeper.get("/metrics") or "")
        results[mode] = compare(raw, reference) | {name: counts.get(name, 0) for name in METRICS}
        harness.say(f"{mode}: {json.dumps(results[mode])}")

    raws: dict[str, Any] = {}
    pool_gib = options.sizes["pool_gib"]
    try:
        for child in children.values():
            child.hear(rig.IMPORT_WATCHDOG_S)
        with served("owner", options.sizes["host_gib"], *at("owner", owner, reader), *disks) as first:
            measure("owner", first)
            for mode in [mode for mode in chosen if mode in ("early", "whole")]:
                with served(mode, pool_gib, *at(mode, reader, owner)) as keeper:
                    wait_for_news(keeper, first.metrics()["pillion_blocks"])
                    measure(mode, keeper)
            first.wait_for(lambda: first.metrics()["pillion_ssd_queued_blocks"] == 0, "every block on the disk")
        if "disk" in chosen:
            with served("disk", pool_gib, *disks) as keeper:
                keeper.wait_for(lambda: keeper.metrics()["pillion_ssd_recovering"] == 0, "the disk's blocks")
                measure("disk", keeper)
    except Failed as error:
        results["error"] = rig.failure("peers", error)
    finally:
        for child in children.values():
            child.end()
    return results


def choose_sources(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the modes."""
    parser.add_argument("--source", action="append", choices=SOURCES, help="the mode to measure; repeatable (default: all)")


BENCH = rig.Bench("peers", str(__doc__), SIZES, engine_settings, measure, compare, UNCHECKED, options=choose_sources)

if __name__ == "__main__":
    rig.main(BENCH, run)
