"""The standing check's limits: the distance of right KV, and of wrong KV, from the same KV computed again.

One engine a case, several side by side: they are not timed. Each prints its JSON lines as soon as it has them (`recomputed.py`
explains them); the last line sums up: by case, the largest distance of right KV, and the smallest of each kind of wrong KV.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from benches import harness
from benches.gpu import models, rig
from testkit.child import python, python_path

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
}
# As deep as a model of 70B.
DEEP = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 80,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32_000,
}
SHAPES = {"8b": models.SHAPES["llama-8b"], "deep": DEEP, "small": SMALL, "tiny": models.TINY}
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the measurement."""

    prompts: int
    prompt_tokens: int
    # Requests with compared decoded tokens.
    outputs: int
    # Prompts of comparisons with wrong KV and with other engines.
    some: int
    # The most checks that are a step of their own.
    checks_alone: int
    beside: int
    # The size of 16-bit KV.
    kv_mib: int


GPU_SIZE = Size(prompts=8, prompt_tokens=2048, outputs=448, some=3, checks_alone=120, beside=300, kv_mib=5 << 10)
CPU_SIZE = Size(prompts=16, prompt_tokens=2048, outputs=640, some=4, checks_alone=496, beside=600, kv_mib=256)
QUICK_SIZE = Size(prompts=2, prompt_tokens=512, outputs=160, some=2, checks_alone=8, beside=60, kv_mib=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine. Cases of one `reference` run the same model; the case with that name keeps its KV for the others."""

    name: str
    model: Literal["8b", "deep", "small", "tiny"] = "8b"
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    backend: str = "FLASH_ATTN"
    runner: int = 2
    graphs: Literal["eager", "graphs", "compiled"] = "eager"
    calm: bool = False
    wrong: bool = False
    reference: str = ""
    block_tokens: int = rig.BLOCK_TOKENS
    # GiB of the device's memory: weights, KV and the rest.
    gib: int = 26
    quick: bool = False

    def size(self) -> Size:
        """How much is computed."""
        size = CPU_SIZE if self.on_cpu() else GPU_SIZE
        return dataclasses.replace(QUICK_SIZE, kv_mib=size.kv_mib) if self.quick else size

    def on_cpu(self) -> bool:
        """True for vLLM's CPU build."""
        return self.backend == "CPU"

    def shape(self) -> dict[str, int]:
        """The model's shape."""
        return SHAPES[self.model]

    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments."""
        size, wide = self.size(), self.dtype == "float32"
        arguments: dict[str, Any] = {
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_dtype,
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": size.kv_mib << 20 + wide,
            "max_model_len": size.prompt_tokens + 1024,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 32,
            "enforce_eager": self.graphs == "eager",
        }
        if not self.on_cpu():
            arguments |= {"attention_backend": self.backend, "gpu_memory_utilization": 0.15}
        if self.graphs != "eager":
            arguments["compilation_config"] = {"cudagraph_capture_sizes": GRAPH_SIZES}
        if self.graphs == "graphs":
            arguments["compilation_config"] |= {"mode": 0}
        return arguments

    def environment(self) -> dict[str, str]:
        """Variables of the engine's process."""
        return rig.plain_environment(self.on_cpu()) | {"VLLM_USE_V2_MODEL_RUNNER": str(self.runner - 1)}


# References of other cases come first; cases that may fail on a machine come last.
CASES = [
    Case("8b bf16", wrong=True, reference="8b bf16"),
    Case("8b fp8", kv_dtype="fp8", wrong=True, reference="8b fp8"),
    Case("8b f16", dtype="float16", wrong=True, reference="8b f16"),
    Case("8b bf16 triton", backend="TRITON_ATTN", reference="8b bf16 triton"),
    Case("8b bf16 compiled", graphs="compiled", reference="8b bf16"),
    Case("8b bf16 graphs", graphs="graphs", reference="8b bf16"),
    Case("8b bf16 runner 1", runner=1, reference="8b bf16"),
    Case("8b bf16 runner 1 graphs", runner=1, graphs="graphs", reference="8b bf16"),
    Case("8b bf16 calm", calm=True, wrong=True),
    Case("8b fp8_per_token_head", kv_dtype="fp8_per_token_head", backend="TRITON_ATTN", wrong=True),
    Case("8b int8_per_token_head", kv_dtype="int8_per_token_head", backend="TRITON_ATTN", wrong=True),
    Case("8b int4_per_token_head", kv_dtype="int4_per_token_head", backend="TRITON_ATTN", wrong=True),
    Case("8b fp8 triton", kv_dtype="fp8", backend="TRITON_ATTN"),
    Case("8b fp8_e5m2 triton", kv_dtype="fp8_e5m2", backend="TRITON_ATTN", wrong=True),
    Case("deep bf16", model="deep", wrong=True, reference="deep bf16", gib=20),
    Case("deep bf16 compiled", model="deep", graphs="compiled", reference="deep bf16", gib=20),
    Case("deep bf16 calm", model="deep", calm=True, gib=20),
    Case("8b f16 compiled", dtype="float16", graphs="compiled", reference="8b f16"),
    Case("8b fp8 compiled", kv_dtype="fp8", graphs="compiled", reference="8b fp8"),
    Case("8b f32 triton", dtype="float32", backend="TRITON_ATTN", wrong=True, gib=46),
    Case("small bf16", model="small", gib=12),
    Case("small f16", model="small", dtype="float16", gib=12),
    Case("small f32 triton", model="small", dtype="float32", backend="TRITON_ATTN", gib=12),
    Case("small fp8", model="small", kv_dtype="fp8", gib=12),
    Case("8b bf16 flashinfer", backend="FLASHINFER", reference="8b bf16"),
]


def cpu_case(name: str, dtype: str, calm: bool) -> Case:
    """A case of vLLM's CPU build."""
    return Case(name, "tiny", dtype, backend="CPU", runner=1, calm=calm, wrong=True, block_tokens=rig.BLOCK_TOKENS_TINY, gib=0)


CPU_CASES = [
    cpu_case("cpu bf16", "bfloat16", calm=False),
    cpu_case("cpu f32", "float32", calm=False),
    cpu_case("cpu bf16 calm", "bfloat16", calm=True),
    cpu_case("cpu f32 calm", "float32", calm=True),
]


class Running:
    """A case's process."""

    def __init__(self, case: Case, folder: Path, logs: Path) -> None:
        self.case = case
        self.begun = time.monotonic()
        stem = case.name.replace(" ", "-")
        self.log, self._lines = logs / f"{stem}.log", folder / f"{stem}.jsonl"
        command = python("benches.gpu.recomputed", json.dumps(dataclasses.asdict(case)), str(folder))
        environment = os.environ | python_path([rig.ROOT]) | case.environment()
        with self.log.open("wb") as log, self._lines.open("wb") as lines:
            self._process = subprocess.Popen(command, stdout=lines, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        self._said = 0

    def new_lines(self) -> list[str]:
        """The lines found since the last call."""
        text = self._lines.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()[self._said :]
        self._said += len(lines)
        return lines

    def ended(self, limit_s: float) -> int | None:
        """Its exit status, or None while it runs; kills a process that takes too long."""
        if self._process.poll() is None and time.monotonic() - self.begun > limit_s:
            self.kill()
        return self._process.poll()

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()


def run(cases: list[Case], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs every case; the end of each, and a summary of its findings."""
    for model in {case.model for case in cases}:
        if not (folder / model).exists():
            models.write(folder / model, SHAPES[model])
    waiting, running, results = list(cases), list[Running](), dict[str, Any]()
    begun = time.monotonic()
    while waiting or running:
        for one in list(running):
            status = one.ended(options.limit_s)
            result = results.setdefault(one.case.name, {"right": 0.0, "wrong": {}})
            for line in one.new_lines():
                print(line, flush=True)
                add(result, json.loads(line))
            if status is not None:
                running.remove(one)
                result["status"] = status
                harness.say(f"{one.case.name}: {time.monotonic() - one.begun:.0f} s, {one.log}: {json.dumps(result)}")
        for case in list(waiting):
            if time.monotonic() - begun > options.all_s:
                waiting.remove(case)
                results[case.name] = {"status": "no time left"}
            elif has_room(case, running, options) and has_reference(case, cases, results, folder):
                waiting.remove(case)
                running.append(Running(case, folder, options.logs or folder))
        time.sleep(0.5)
    return results


def add(result: dict[str, Any], line: dict[str, Any]) -> None:
    """Adds a line: the largest distance of right KV, and the smallest of each wrong one."""
    if "kept" in line:
        result["right"] = max(result["right"], line["rms"]["max"])
    elif "wrong" in line:
        result["wrong"][line["wrong"]] = line["rms"]["min"]


def has_room(case: Case, running: list[Running], options: argparse.Namespace) -> bool:
    """True if the case fits beside the running ones."""
    fits: bool = sum(one.case.gib for one in running) + case.gib <= options.gib
    return fits and len(running) < options.at_once


def has_reference(case: Case, cases: list[Case], results: dict[str, Any], folder: Path) -> bool:
    """True if the KV to compare with exists, or never will."""
    awaited = {other.name for other in cases if "status" not in results.get(other.name, {})} - {case.name}
    return case.reference not in awaited or (folder / f"{case.reference}.pt").exists()


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--cpu", action="store_true", help="the cases of vLLM's CPU build")
    parser.add_argument("--cases", default="", help="those whose names have this regular expression in them")
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--at-once", type=int, default=5, help="engines side by side")
    parser.add_argument("--gib", type=int, default=132, help="of device memory, for all of them")
    parser.add_argument("--limit-s", type=float, default=240.0, help="the longest a case may take")
    parser.add_argument("--all-s", type=float, default=1e9, help="no case begins later")
    parser.add_argument("--folder", type=Path, help="for models and KV that a later run may use (default: gone at the end)")
    parser.add_argument("--logs", type=Path, help="for logs (default: beside the models)")
    options = parser.parse_args()
    known = CPU_CASES if options.cpu else CASES
    cases = [dataclasses.replace(case, quick=options.quick) for case in known if re.search(options.cases, case.name)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return
    with tempfile.TemporaryDirectory(prefix="pillion-limits-") as scratch:
        folder = options.folder or Path(scratch)
        for needed in filter(None, (folder, options.logs)):
            needed.mkdir(parents=True, exist_ok=True)
        results = run(cases, options, folder)
    ok = all(result["status"] == 0 for result in results.values())
    harness.report({"bench": "gpu/limits", "cases": results, "ok": ok})


if __name__ == "__main__":
    main()
