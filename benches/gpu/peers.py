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
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rig

from engine import Answer, Engine

OUTPUT_TOKENS = 8
# Modes, with what vLLM does about a load that fails. What the others ask for is computed by the first.
POLICIES = {"owner": "recompute", "early": "recompute", "whole": "fail"}
DIRECTORY_WATCHDOG_S = 30
METRICS = ("pillion_query_early_answers_total", "pillion_mesh_fetched_blocks_total", "pillion_mesh_faults_total")

SIZES = {
    "full": {"prompts": 8, "prompt_tokens": 10_240, "kv_mib": 8 * 1024, "host_gib": 16},
    "quick": {"prompts": 2, "prompt_tokens": 4_096, "kv_mib": 6 * 1024, "host_gib": 4},
    "tiny": {"prompts": 2, "prompt_tokens": 512, "kv_mib": 24, "host_gib": 1},
}


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments: a prompt is computed in one step."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["prompt_tokens"] + 256,
        "max_num_batched_tokens": 16_384,
        "max_num_seqs": 16,
    }


def measure(engine: Engine, sizes: dict[str, int], _options: argparse.Namespace, _reference: Any) -> dict[str, Any]:
    """Every prompt once, the first as a warm-up, then twice from the own sidecar's memory."""
    prompts = [engine.prompt(sizes["prompt_tokens"], seed) for seed in range(sizes["prompts"] + 1)]
    first = [engine.ask(prompt, OUTPUT_TOKENS) for prompt in prompts]
    engine.rest()
    engine.say("first answers done")
    again = []
    for prompt in prompts:
        engine.reset()
        again.append(engine.ask(prompt, OUTPUT_TOKENS))
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


@contextlib.contextmanager
def sidecar(name: str, options: argparse.Namespace, folder: Path, listen: str, peer: str) -> Iterator[tuple[Path, str]]:
    """A sidecar that knows one peer; yields its socket and the address of its metrics."""
    http, path = f"127.0.0.1:{rig.free_port()}", folder / f"{name}.sock"
    binary = shutil.which(options.binary) or sys.exit(f"no binary {options.binary!r}: --binary PATH")
    command = [binary, "serve", "--socket", str(path), "--dram", f"{options.sizes['host_gib']}GiB", "--http", http]
    command += ["--mesh-listen", listen, "--peer", peer, "--node-id", name, "--mesh-plaintext", *options.serve]
    with rig.serving(command, f"http://{http}/readyz", options.logs / f"serve-{name}.log"):
        yield path, http


def metric(http: str, name: str) -> float:
    """A counter or gauge of a sidecar, added up over its labels."""
    page = rig.fetch(f"http://{http}/metrics") or ""
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if line.partition(" ")[0].partition("{")[0] == name]
    return sum(float(value) for _, value in rows)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The owner, then each other mode beside the owner's sidecar."""
    options.logs = options.logs or folder
    options.logs.mkdir(parents=True, exist_ok=True)
    model = rig.write_model(folder / "model", rig.shape(options))
    children = {mode: rig.Child(mode, options, options.logs / f"peers-{mode}.log") for mode in POLICIES}
    results: dict[str, Any] = {}
    try:
        for child in children.values():
            child.read(rig.IMPORT_WATCHDOG_S)
        addresses = {name: f"127.0.0.1:{rig.free_port()}" for name in ("owner", "reader")}
        with sidecar("owner", options, folder, addresses["owner"], addresses["reader"]) as (owner_socket, owner_http):
            reference: Any = None
            for mode, policy in POLICIES.items():
                with contextlib.ExitStack() as stack:
                    socket, http = owner_socket, owner_http
                    if reference is not None:
                        reader = sidecar(mode, options, folder, addresses["reader"], addresses["owner"])
                        socket, http = stack.enter_context(reader)
                        wait_for_keys(http, metric(owner_http, "pillion_blocks"))
                    extra = {"pillion.socket": str(socket), "pillion.model_id": "bench", **rig.pillion_options(options)}
                    transfer = rig.transfer_config("PillionConnector", "pillion.connector", extra)
                    transfer["kv_load_failure_policy"] = policy
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


def main() -> None:
    """Run the benchmark, or one engine of it."""
    options = rig.arguments(BENCH)
    options.scale = "tiny" if options.tiny else "quick" if options.quick else "full"
    options.sizes = rig.sizes(BENCH, options)
    if options.mode:
        rig.serve_engine(BENCH, options)
        return
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        results = run(options, Path(folder))
    ok = all(result["ok"] for result in results.values())
    line = {"bench": "gpu/peers", "scale": options.scale, "graphs": options.graphs, "sizes": options.sizes}
    print(json.dumps(line | {"modes": results, "ok": ok}), flush=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
