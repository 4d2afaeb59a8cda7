"""What the GPU benchmarks share: modes, their servers, one process per engine, and the last line.

A benchmark is a module with `BENCH`, and `rig.main(BENCH)` runs it. The parent starts one process for each mode, all at
once, so that they import vLLM side by side; then one after the other builds its engine, measures, prints one JSON line
and ends, so that no engine is measured beside another. The first mode's answers are what the others' are held against.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import engine as engines

BEGUN = time.monotonic()
# Watchdogs only: a mode that hangs must leave time for the others.
IMPORT_WATCHDOG_S = 180
SERVER_WATCHDOG_S = 120
END_WATCHDOG_S = 15
LOG_TAIL_BYTES = 4000
GIB = 1 << 30
RIVALS = ("none", "idle", "roomy", "offloading", "pegaflow")
# Modes that keep nothing outside the device.
CACHELESS = ("none", "idle", "roomy")

# Llama-3.1-8B, and a shape that vLLM's CPU build runs in seconds.
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
# Batch sizes whose CUDA graphs are captured: one request's decode, a reload's last block, and the benchmarks' batches.
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
BLOCK_TOKENS = 16
# CPU attention takes multiples of 32 alone.
BLOCK_TOKENS_TINY = 32


@dataclasses.dataclass(frozen=True)
class Bench:
    """One benchmark: its sizes, its engine, and what it measures."""

    name: str
    text: str
    # By scale: "full", "quick" (a smoke run) and "tiny" (on a CPU).
    sizes: dict[str, dict[str, int]]
    engine: Callable[[dict[str, int]], dict[str, Any]]
    measure: Callable[[engines.Engine, dict[str, int], argparse.Namespace, Any], dict[str, Any]]
    compare: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def arguments(bench: Bench) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=bench.text, formatter_class=argparse.RawDescriptionHelpFormatter)
    rivals = [rival for rival in RIVALS if rival != "roomy" or "roomy_mib" in bench.sizes["full"]]
    parser.add_argument("--rival", action="append", choices=rivals, default=[], help="measure this too; repeatable")
    parser.add_argument("--no-pillion", action="store_true", help="measure the rivals alone")
    parser.add_argument("--binary", default=os.environ.get("PILLION_BINARY", "pillion"), help="the sidecar's binary")
    parser.add_argument("--pillion", action="append", default=[], metavar="KEY=VALUE", help="as load=sync; repeatable")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="more of `pillion serve`; repeatable")
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs (otherwise eager)")
    parser.add_argument("--fragment", action="store_true", help="scatter the device's free blocks first")
    parser.add_argument("--invariant", action="store_true", help="vLLM's batch-invariant kernels: slow, for checking tokens")
    parser.add_argument("--size", action="append", default=[], metavar="KEY=N", help="another size, as prompts=4; repeatable")
    parser.add_argument("--limit-s", type=float, default=240.0, help="the longest a mode may take")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: gone at the end)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engine", dest="mode", help=argparse.SUPPRESS)
    return parser.parse_args()


Results = dict[str, Any]


def main(bench: Bench, run: Callable[[Bench, argparse.Namespace, list[str], Path], Results] | None = None) -> None:
    """Run a benchmark, or one engine of it. `run` measures its modes, if they are not measured one by one."""
    options = arguments(bench)
    options.scale = "tiny" if options.tiny else "quick" if options.quick else "full"
    options.sizes = sizes(bench, options)
    if options.mode:
        serve_engine(bench, options)
        return
    modes = list(dict.fromkeys(options.rival)) + ([] if options.no_pillion else ["pillion"])
    # What the others are held against goes first.
    modes.sort(key=lambda mode: mode != "none")
    if not modes:
        sys.exit("nothing to measure: --no-pillion without --rival")
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as folder:
        results = (run or measure_all)(bench, options, modes, Path(folder))
    line: dict[str, Any] = {"bench": f"gpu/{bench.name}", "scale": options.scale, "graphs": options.graphs}
    line |= {"fragment": options.fragment, "sizes": options.sizes, "modes": results}
    line["ok"] = all(result.get("ok") for result in results.values())
    print(json.dumps(line), flush=True)
    sys.exit(0 if line["ok"] else 1)


def sizes(bench: Bench, options: argparse.Namespace) -> dict[str, int]:
    """The sizes of the scale, with those of the command line."""
    given = dict(option.partition("=")[::2] for option in options.size)
    known = bench.sizes[options.scale]
    if unknown := given.keys() - known.keys():
        sys.exit(f"--size: unknown {', '.join(sorted(unknown))}; known are: {', '.join(known)}")
    return known | {key: int(value) for key, value in given.items()}


def say(text: str) -> None:
    """Progress, with the seconds since the start; the result is the last line of standard output."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", file=sys.stderr, flush=True)


# === The parent ===


def measure_all(bench: Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> dict[str, Any]:
    """Every mode in turn; one that fails is said and the others go on."""
    logs = options.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "model", shape(options))
    children: dict[str, Child] = {}
    results: dict[str, Any] = {}
    reference: Any = None
    try:
        for mode in modes:
            children[mode] = Child(mode, options, logs / f"{bench.name}-{mode}.log")
        for mode in modes:
            try:
                children[mode].read(IMPORT_WATCHDOG_S)
            except BenchError as error:
                results[mode] = failure(mode, error)
        for mode in [mode for mode in modes if mode not in results]:
            say(f"{mode}: starting")
            try:
                with server(mode, options, folder, logs) as transfer:
                    raw = children[mode].measure({"model": str(model), "transfer": transfer, "reference": reference})
            except (BenchError, OSError) as error:
                results[mode] = failure(mode, error)
                continue
            reference = reference or raw
            (logs / f"{bench.name}-{mode}.json").write_text(json.dumps(raw))
            result = bench.compare(raw, reference)
            results[mode] = result
            say(f"{mode}: {json.dumps(result)}")
    finally:
        for child in children.values():
            child.end()
    return results


def failure(mode: str, error: Exception) -> dict[str, Any]:
    """What is said of a mode that was not measured."""
    say(f"{mode}: {error}")
    lines = str(error).strip().splitlines()
    return {"ok": False, "error": f"{lines[0]}: {lines[-1]}"}


class BenchError(Exception):
    """A server or an engine did not do its part."""


class Child:
    """One engine's process: it imports vLLM at once, and becomes an engine when it is told to."""

    def __init__(self, mode: str, options: argparse.Namespace, log: Path) -> None:
        self.mode = mode
        self.log = log
        self.limit_s = options.limit_s
        log.touch()
        command = [sys.executable, *sys.argv, "--engine", mode, "--logs", str(log.parent)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(options),
            start_new_session=True,  # vLLM's own children end with it
        )
        self._unread = b""

    def measure(self, role: dict[str, Any]) -> Any:
        """Be an engine, measure, and be gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(role).encode() + b"\n")
        self._process.stdin.flush()
        try:
            return self.read(self.limit_s)
        finally:
            # Its device memory must be free before the next engine starts.
            self.end()

    def read(self, watchdog_s: float) -> Any:
        """Its next line."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + watchdog_s
        while b"\n" not in self._unread:
            patience_s = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._process.stdout], [], [], patience_s)
            chunk = os.read(self._process.stdout.fileno(), 1 << 20) if readable else b""
            if not chunk:
                why = "ended" if readable else f"no answer in {watchdog_s:.0f} s"
                raise BenchError(f"engine {self.mode}: {why}\n{tail(self.log)}")
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> None:
        """Wait for its own end, or end it and all that it started."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WATCHDOG_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_WATCHDOG_S)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What the engines' processes are started with."""
    settings = {
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if options.invariant:
        settings["VLLM_BATCH_INVARIANT"] = "1"
    if options.tiny:
        settings |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return os.environ | settings


def shape(options: argparse.Namespace) -> dict[str, int]:
    """The model that is measured."""
    return TINY if options.tiny else LLAMA_8B


def write_model(folder: Path, dimensions: dict[str, int]) -> Path:
    """A folder with a config.json and nothing else: the weights are made on the device."""
    folder.mkdir()
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **dimensions}
    config |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


# === Servers ===


@contextlib.contextmanager
def server(mode: str, options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[dict[str, Any] | None]:
    """What a mode needs beside its engine; yields vLLM's `kv_transfer_config`."""
    # The same for every mode.
    gib = options.sizes["host_gib"]
    if mode in ("none", "roomy"):
        yield None
    elif mode == "idle":
        yield transfer_config("IdleConnector", "idle_connector", {})
    elif mode == "offloading":
        # Answers too: by default it keeps prompts alone, and the others keep both.
        extra: dict[str, Any] = {"cpu_bytes_to_use": gib * GIB, "offload_prompt_only": False}
        yield {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    elif mode == "pegaflow":
        port, http = free_port(), free_port()
        command = [sys.executable, "-m", "pegaflow._server", "--addr", f"127.0.0.1:{port}", "--pool-size", f"{gib}gb"]
        command += ["--http-addr", f"127.0.0.1:{http}", "--devices", "0"]
        with serving(command, f"http://127.0.0.1:{http}/health", logs / "pegaflow-server.log"):
            extra = {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": port}
            yield transfer_config("PegaKVConnector", "pegaflow.connector", extra)
    else:
        path = folder / "pillion.sock"
        with sidecar(path, options, gib, logs / "pillion-serve.log") as http:
            yield pillion_transfer(path, options)
            (logs / "pillion-metrics.txt").write_text(fetch(f"{http}/metrics") or "")


@contextlib.contextmanager
def sidecar(path: Path, options: argparse.Namespace, gib: int, log: Path, *more: str) -> Iterator[str]:
    """A ready sidecar at a socket; yields the URL of its admin pages."""
    binary, http = shutil.which(options.binary), f"127.0.0.1:{free_port()}"
    if binary is None:
        raise BenchError(f"no binary {options.binary!r}: --binary PATH")
    command = [binary, "serve", "--socket", str(path), "--dram", f"{gib}GiB", "--http", http, *more, *options.serve]
    with serving(command, f"http://{http}/readyz", log):
        yield f"http://{http}"


def pillion_transfer(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`kv_transfer_config` of Pillion, with the sidecar at a socket."""
    extra = {"pillion.socket": str(path), "pillion.model_id": "bench"}
    return transfer_config("PillionConnector", "pillion.connector", extra | pillion_options(options))


def pillion_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the connector from the command line; whole numbers as such."""
    # On a busy machine of two cores an answer takes longer than the 2 ms that a query may.
    given = (["query_timeout_us=10000000"] if options.tiny else []) + options.pillion
    pairs = [option.partition("=")[::2] for option in given]
    return {f"pillion.{key}": int(value) if value.isdecimal() else value for key, value in pairs}


def transfer_config(connector: str, module: str, extra: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of a connector outside vLLM."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_connector_module_path": module, "kv_role": "kv_both"}
    return config | {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


@contextlib.contextmanager
def serving(command: list[str], health: str, log: Path) -> Iterator[None]:
    """A server that answers 200 at `health`, ended afterwards with all that it started."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + SERVER_WATCHDOG_S
        while fetch(health) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"not ready: {' '.join(command)}\n{tail(log)}")
            time.sleep(0.05)
        say(f"ready: {' '.join(command)}")
        yield
        if process.poll() is not None:
            raise BenchError(f"ended with {process.returncode} while it was measured: {' '.join(command)}\n{tail(log)}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_WATCHDOG_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_WATCHDOG_S)


def fetch(url: str) -> str | None:
    """The body of a page that answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def free_port() -> int:
    """A port that nobody uses now, and neither the next."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            other.bind(("127.0.0.1", port + 1))
            return port


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


# === The child ===


def serve_engine(bench: Bench, options: argparse.Namespace) -> None:
    """Import vLLM, wait to be told what engine to be, measure, and answer with one line."""
    answers = os.fdopen(os.dup(1), "w")
    progress = os.fdopen(os.dup(2), "w")
    log = os.open(options.logs / f"{bench.name}-{options.mode}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Seconds, spent while no engine is measured yet.
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # noqa: F401 - as above

    answer(answers, "imported")
    line = sys.stdin.readline()
    if not line:
        return
    role = json.loads(line)

    def tell(text: str) -> None:
        print(f"             {options.mode}: {text}", file=progress, flush=True)

    if options.mode == "roomy":
        options.sizes["kv_mib"] = options.sizes["roomy_mib"]
    settings = bench.engine(options.sizes) | engine_arguments(options) | {"model": role["model"]}
    if role["transfer"]:
        settings["kv_transfer_config"] = role["transfer"]
    measured = engines.Engine(settings, shape(options), tell)
    if options.fragment:
        measured.fragment()
        tell("free blocks scattered")
    result = bench.measure(measured, options.sizes, options, role["reference"])
    answer(answers, result | {"facts": measured.facts()})


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments that all benchmarks share."""
    settings: dict[str, Any] = {"enforce_eager": not options.graphs}
    settings["block_size"] = BLOCK_TOKENS_TINY if options.tiny else BLOCK_TOKENS
    if options.graphs:
        settings["compilation_config"] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    return settings


def answer(stream: TextIO, result: Any) -> None:
    """One line to the parent."""
    stream.write(json.dumps(result) + "\n")
    stream.flush()


# === Figures ===


def spread(samples: list[float]) -> dict[str, float]:
    """Median, least and most, and the quarters between, in the samples' unit, to a hundredth."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    figures = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    figures |= {"p25": ordered[round(last * 0.25)], "p75": ordered[round(last * 0.75)]}
    return {name: round(value, 2) for name, value in figures.items()}


def percentile(samples: list[float], part: float) -> float:
    """The value below which `part` of the samples lie, to a tenth."""
    ordered = sorted(samples)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 1)


def share_equal(left: list[list[int]], right: list[list[int]]) -> float:
    """Share of answers whose tokens are all equal."""
    return round(sum(a == b for a, b in zip(left, right, strict=True)) / len(left), 4)
