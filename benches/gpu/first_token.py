"""First tokens streamed by the router right after the prompt is computed, against those of the prefill engine itself.

Two `vllm serve`, on one GPU or two, with one sidecar, and `pillion route --first-token` before them. A client sends new prompts
as token ids and reads the answers' streams, by turns from the prefill engine and from the router. The extra time of the
router's first token is its cost; the gap behind that token is the time of the hand-over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from benches import harness
from benches.gpu import apart, handover, http, rig, weights
from testkit import metrics
from testkit.server import fetch

WARM_UPS, OUTPUT_TOKENS = 3, 16
ANSWER_WATCHDOG_S = 60
# The prefill engine has most of a prompt cached when it is asked again, and rounds the rest differently. With wrong KV no
# answer is equal.
EQUAL_LEAST = 0.5


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments."""
    return handover.engine_settings(sizes) | {"load_format": weights.LOAD_FORMAT}


def stream(url: str, model: Path, prompt: list[int]) -> tuple[list[float], str]:
    """Milliseconds from the request to each event with text, and the answer."""
    fields = {"model": str(model), "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    times, text = [], ""
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER_WATCHDOG_S) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (piece := json.loads(line[6:])["choices"][0]["text"]):
                times.append((time.perf_counter() - began) * 1e3)
                text += piece
    return times, text


def run(bench: rig.Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> rig.Results:
    """Runs the only mode."""

    def measure(mode: str, model: Path) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            (_, first), (_, second) = stack.enter_context(apart.pair(bench, mode, model, folder, options))
            url = stack.enter_context(apart.route(mode, first, second, options, ["--first-token"]))
            lengths = [options.sizes[name] for name in handover.LENGTHS]
            figures: dict[str, Any] = {str(tokens): measured(first, url, model, options, tokens) for tokens in lengths}
            at_once = metrics.totals(fetch(f"{url}/metrics") or "")["pillion_route_first_tokens_total"]
            asked = len(lengths) * (WARM_UPS + options.sizes["prompts"])
            return figures | {"ok": at_once == asked and all(of["ok"] for of in figures.values())}

    return http.run_modes(options, modes, folder, measure)


def measured(first: str, url: str, model: Path, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Prompts of one length."""
    source = random.Random(tokens)
    vocabulary = rig.shape(options)["vocab_size"]
    times: dict[str, list[float]] = {"alone": [], "routed": [], "gap": []}
    equal: list[bool] = []
    for _ in range(WARM_UPS + options.sizes["prompts"]):
        prompts = [[source.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(2)]
        alone, _ = stream(first, model, prompts[0])
        routed, answer = stream(url, model, prompts[1])
        times["alone"].append(alone[0])
        times["routed"].append(routed[0])
        times["gap"].append(routed[1] - routed[0])
        equal.append(answer == stream(first, model, prompts[1])[1])
    kept = {name: samples[WARM_UPS:] for name, samples in times.items()}
    added = statistics.median(kept["routed"]) - statistics.median(kept["alone"])
    figures: dict[str, Any] = {f"{name}_ms": harness.spread(samples) for name, samples in kept.items()}
    figures |= {"added_ms": round(added, 2), "equal": round(statistics.mean(equal[WARM_UPS:]), 4)}
    steady = options.scale != "full" or harness.is_steady(kept["alone"])
    return figures | {"ok": steady and figures["equal"] >= EQUAL_LEAST}


BENCH = rig.Bench("first_token", str(__doc__), handover.SIZES, engine_settings, rivals=(), options=rig.cards)

if __name__ == "__main__":
    rig.main(BENCH, run)
