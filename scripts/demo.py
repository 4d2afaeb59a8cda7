#!/usr/bin/env python3
"""The demo: a vLLM engine's KV survives the engine.

Starts a sidecar and a real vLLM engine (its own processes), answers long prompts cold, kills the engine
with SIGKILL, starts a new one and answers the same prompts warm. Writes demo-out/demo.svg and demo-out/demo.json,
prints both times to the first token side by side, and fails if a token differs or nothing came from the cache.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from svg import Bar, Picture, charts

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from testkit import engine, model, prompts, sidecar  # noqa: E402 - found through the path above
from testkit.waiting import Failed  # noqa: E402

OUT = ROOT / "demo-out"
MODELS = ROOT / ".cache/models"
PROMPT_TOKENS = (1_500, 2_500, 3_500, 4_500, 5_500)
OUTPUT_TOKENS = 16
# With bfloat16 even vLLM's own prefix hits give other tokens than a cold run now and then: chunks of another length are rounded
# otherwise. In float32 the difference stays far below the distance of two tokens, so the demo demands equal tokens.
DTYPE: Literal["float32"] = "float32"
# Not one of the prompts: the first long request of a process also pays for its libraries' first use.
WARM_UP_TOKENS = 2_048
DRAM = "1GiB"
# vLLM's own KV cache on a CPU, in GiB. Without it vLLM takes 92 % of the machine's memory.
KV_SPACE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
# Free bytes for the demo: files of models, logs and pictures; in shared memory the sidecar's pool and vLLM's KV cache.
ROOM = {ROOT: 1 << 30, Path("/dev/shm"): 5 << 29}
BLOCK_BYTES = engine.BLOCK_TOKENS * model.DEMO.kv_bytes_per_token(dtype_bytes=4)
# An error in a log of `pillion`, or in one of vLLM.
ERROR = re.compile(r"(?:Z ERROR |\bERROR [^]]+\] (?=\w+Error: ))(.+)")
BEGAN = time.monotonic()


@dataclasses.dataclass
class Row:
    """The result of one prompt."""

    prompt_tokens: int
    cold_s: float
    warm_s: float
    hit_tokens: int
    loaded_bytes: int
    tokens_equal: bool
    logprobs_equal: bool


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def warm_up(running: engine.Engine, seed: int) -> None:
    """Let a new engine compute one unrelated prompt."""
    say("engine is up; one unrelated prompt to warm it up")
    running.generate([prompt(WARM_UP_TOKENS, seed)], max_tokens=OUTPUT_TOKENS)


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids below the demo model's vocabulary."""
    return prompts.prompt(tokens, seed, vocab=model.DEMO.vocab)


def ask_cold(running: engine.Engine) -> list[dict[str, Any]]:
    """Answer every prompt, computing all of it."""
    answers = []
    for tokens in PROMPT_TOKENS:
        answers.append(running.generate([prompt(tokens, seed=tokens)], max_tokens=OUTPUT_TOKENS)[0])
        say(f"cold: {tokens} tokens, first token after {answers[-1]['ttft_s']:.2f} s")
    return answers


def ask_local(running: engine.Engine) -> list[dict[str, Any]]:
    """The same prompts once more: hits in vLLM's own cache, to compare bits with."""
    say("the same prompts again, from vLLM's own prefix cache (the reference for the logprobs)")
    return [running.generate([prompt(tokens, seed=tokens)], max_tokens=OUTPUT_TOKENS)[0] for tokens in PROMPT_TOKENS]


def ask_warm(
    running: engine.Engine,
    keeper: sidecar.Sidecar,
    cold: list[dict[str, Any]],
    local: list[dict[str, Any]],
) -> list[Row]:
    """Answer the same prompts in a new engine and compare."""
    rows = []
    for tokens, first, reference in zip(PROMPT_TOKENS, cold, local, strict=True):
        hits, loaded = running.metrics()["external_hits"], keeper.metrics()["pillion_loaded_bytes_total"]
        warm = running.generate([prompt(tokens, seed=tokens)], max_tokens=OUTPUT_TOKENS)[0]
        # The engine goes on before the sidecar has counted its report.
        expected = prompts.hit_tokens(tokens) // engine.BLOCK_TOKENS * BLOCK_BYTES
        keeper.wait_metric("pillion_loaded_bytes_total", loaded + expected)
        row = Row(
            prompt_tokens=tokens,
            cold_s=first["ttft_s"],
            warm_s=warm["ttft_s"],
            hit_tokens=running.metrics()["external_hits"] - hits,
            loaded_bytes=keeper.metrics()["pillion_loaded_bytes_total"] - loaded,
            tokens_equal=warm["tokens"] == reference["tokens"] == first["tokens"],
            logprobs_equal=warm["logprobs"] == reference["logprobs"],
        )
        rows.append(row)
        say(f"warm: {tokens} tokens, first token after {row.warm_s:.3f} s, {row.hit_tokens} from the cache")
    return rows


def table(rows: list[Row]) -> str:
    """The result, for a terminal."""
    heads = ["prompt", "cold", "warm", "faster", "from cache", "loaded", "tokens", "logprobs"]
    body = [
        [
            f"{row.prompt_tokens} tokens",
            f"{row.cold_s * 1e3:.0f} ms",
            f"{row.warm_s * 1e3:.0f} ms",
            f"{row.cold_s / row.warm_s:.0f} x",
            f"{row.hit_tokens} tokens",
            f"{row.loaded_bytes / 2**20:.1f} MiB",
            "equal" if row.tokens_equal else "DIFFER",
            "bit-equal" if row.logprobs_equal else "DIFFER",
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [heads, *body]) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in [heads, *body]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def summary(rows: list[Row]) -> str:
    """The longest prompt's two times, and the comparison of all answers."""
    row = max(rows, key=lambda row: row.prompt_tokens)
    equal = sum(row.tokens_equal for row in rows)
    return (
        f"First token of {row.prompt_tokens} tokens: {row.cold_s * 1e3:,.0f} ms computed, {row.warm_s * 1e3:,.0f} ms "
        f"from the cache after the engine's restart ({row.cold_s / row.warm_s:.0f} x faster).\n"
        f"Equal answers before and after the restart: {equal} of {len(rows)}."
    )


def picture(rows: list[Row]) -> Picture:
    """The result as bars."""
    bars = []
    for row in rows:
        faster = f"{row.warm_s * 1e3:,.0f} ms ({row.cold_s / row.warm_s:.0f} x faster)"
        bars.append(Bar(f"{row.prompt_tokens} tokens, cold", row.cold_s, f"{row.cold_s * 1e3:,.0f} ms", "code"))
        bars.append(Bar("warm", row.warm_s, faster, "memory"))
    heading = "Time to first token: cold, and warm in a new engine, with KV that the sidecar kept"
    return charts("Time to first token, before and after the engine was killed", [(heading, bars)])


def faults(rows: list[Row]) -> list[str]:
    """The faults of a failed demo."""
    found = []
    for row in rows:
        expected = prompts.hit_tokens(row.prompt_tokens)
        if row.hit_tokens != expected:
            found.append(f"{row.prompt_tokens}: {row.hit_tokens} tokens from the cache, not {expected}")
        if row.loaded_bytes != expected // engine.BLOCK_TOKENS * BLOCK_BYTES:
            found.append(f"{row.prompt_tokens}: {row.loaded_bytes} bytes loaded for {expected} tokens")
        if not row.tokens_equal:
            found.append(f"{row.prompt_tokens}: the warm tokens differ")
        if not row.logprobs_equal:
            found.append(f"{row.prompt_tokens}: the warm logprobs differ from a local prefix hit")
    return found


def play(directory: Path) -> list[Row]:
    """The whole story: cold, kill, warm."""
    say("writing a random-weight model (about 100 M parameters)")
    demo_model = model.write(MODELS / "demo", model.DEMO)
    say(f"starting the sidecar with {DRAM} of DRAM")
    with sidecar.serving(directory, DRAM, log=OUT / "sidecar.log") as keeper:
        options = engine.Options(
            model=demo_model,
            socket=keeper.socket,
            load="auto",
            multiprocess=True,
            spawned=True,
            variables=KV_SPACE,
            batched_tokens=2048,
            omp_threads=2,
            dtype=DTYPE,
        )
        setting = " ".join(f"{name}={value}" for name, value in KV_SPACE.items())
        say(f"starting vLLM (first engine) with {setting}, the GiB of its own KV cache on a CPU")
        with engine.running(options, OUT / "first-engine.log") as first:
            warm_up(first, seed=1)
            cold, local = ask_cold(first), ask_local(first)
            asked = (WARM_UP_TOKENS, *PROMPT_TOKENS)
            stored = BLOCK_BYTES * sum(prompts.stored_blocks(tokens, OUTPUT_TOKENS) for tokens in asked)
            keeper.wait_metric("pillion_saved_bytes_total", stored)
            say(f"the sidecar holds {stored >> 20} MiB of KV; killing the engine")
        say("starting vLLM (second engine)")
        with engine.running(options, OUT / "second-engine.log") as second:
            warm_up(second, seed=2)
            rows = ask_warm(second, keeper, cold, local)
            second.exit()
    return rows


def check_room() -> None:
    """Fail if a folder has too little room."""
    for folder, needed in ROOM.items():
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise Failed(f"{folder} has {free >> 20} MiB free, and the demo needs {needed >> 20} MiB: make room, or enlarge it")


def explain(failure: Failed | OSError) -> str:
    """One line: the failure of a process with the error in its log, or the system's error."""
    if isinstance(failure, OSError):
        return f"{failure}: correct this, then run the demo again"
    reason = failure.reason.splitlines()[0]
    if failure.log is None:
        return reason
    errors = [error for error in ERROR.findall(failure.log.read_text(errors="replace")) if error not in reason]
    return f"{failure.log.stem}: {': '.join([reason, *errors[-1:]])} (log: {failure.log})"


def run() -> list[str]:
    """Play and show; the faults of the result."""
    check_room()
    OUT.mkdir(exist_ok=True)
    for old in OUT.glob("*.log"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="pillion-demo-") as directory:
        rows = play(Path(directory))
    (OUT / "demo.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    (OUT / "demo.svg").write_text(str(picture(rows)))
    print(f"\nTime to the first token: cold is computed, warm is from the cache after the engine's restart\n\n{table(rows)}\n")
    print(f"picture: {OUT}/demo.svg   figures: {OUT}/demo.json\n\n{summary(rows)}")
    return faults(rows)


def main() -> int:
    """The exit status: 1 after a line for each fault, or one for a failure that the reader can mend."""
    try:
        found = run()
    except (Failed, OSError) as failure:
        found = [explain(failure)]
    for fault in found:
        print(f"demo: FAILED: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
