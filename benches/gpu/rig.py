"""The common parts of the GPU benchmarks: modes, their servers, one process per engine, and the last line.

A benchmark is a module with `BENCH`, and `rig.main(BENCH)` runs it. The parent starts one process for each mode, all at once,
so they import vLLM side by side; then one after the other builds its engine, measures, prints one JSON line and ends, so no
engine is measured beside another. All answers are compared with those of the first mode.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benches import harness
from benches.gpu import engine as engines
from benches.gpu import models
from testkit.child import Child, Parent, python
from testkit.ports import free_port
from testkit.server import READY_WATCHDOG_S, Server
from testkit.sidecar import Sidecar, find_binary
from testkit.waiting import Failed, wait_for

ROOT = Path(__file__).resolve().parents[2]
# Watchdogs only: a hanging mode must leave time for the others.
IMPORT_WATCHDOG_S = 180
END_WATCHDOG_S = 15
GIB = 1 << 30
# 64 page-locked GiB take some seconds to be freed; beside a mode's host memory its processes need as much as this.
MEMORY_WATCHDOG_S = 60
MEMORY_SPARE_BYTES = 1 << 30
RIVALS = ("none", "idle", "roomy", "offloading", "pegaflow", "lmcache", "lmcache-v1", "kvbm")
# `kv_role` of an engine for prefill and decode.
BOTH = "kv_both"
# Modes without blocks outside the device.
CACHELESS = ("none", "idle", "roomy")
# Sizes from variables of vLLM's environment.
VARIABLES = {"output_chunk": "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "rust_frontend": "VLLM_USE_RUST_FRONTEND"}
# LMCache would report its use to its makers.
LMCACHE = {"LMCACHE_TRACK_USAGE": "false"}
# The reported lines of a failed mode's log: an exception, and its cause.
FAILED_LINES = 30
# The share of answers with the first token of the first mode: rounding spares nearly all, wrong KV nearly none. The end of an
# answer may differ, if a connector delays a request and so changes the batches.
FIRST_TOKENS_EQUAL_MIN = 0.9

# Batch sizes with captured CUDA graphs: one request's decode, a reload's last block, and the benchmarks' batches.
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
BLOCK_TOKENS = 16
# CPU attention needs multiples of 32.
BLOCK_TOKENS_TINY = 32


@dataclasses.dataclass(frozen=True)
class Bench:
    """One benchmark: its sizes, its engine, and its measurement."""

    name: str
    text: str
    # By scale: "full", "quick" (a smoke run) and "tiny" (on a CPU); others are rooms of --room.
    sizes: dict[str, dict[str, int]]
    engine: Callable[[dict[str, int]], dict[str, Any]]
    # None for a benchmark that gives `main` a `run` and starts no engine process of the rig.
    measure: Callable[[engines.Engine, dict[str, int], argparse.Namespace, Any], dict[str, Any]] | None = None
    compare: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
    # Options of the connector, as --pillion has them.
    pillion: tuple[str, ...] = ()
    rivals: tuple[str, ...] = RIVALS
    # True if the benchmark ends the servers of its modes: the end of one is then no failure.
    kills: bool = False
    # Adds options of its own to the command line.
    options: Callable[[argparse.ArgumentParser], None] | None = None


def cards(parser: argparse.ArgumentParser) -> None:
    """Adds an option of benchmarks with two engines at the same time."""
    parser.add_argument("--cards", type=int, choices=(1, 2), help="GPUs: with 2 the second engine has its own (default: 1)")


def arguments(bench: Bench) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(bench.text)
    rivals = [rival for rival in bench.rivals if rival != "roomy" or "roomy_mib" in bench.sizes["full"]]
    parser.add_argument("--rival", action="append", choices=rivals, default=[], help="measure this too; repeatable")
    parser.add_argument("--no-pillion", action="store_true", help="measure the rivals alone")
    harness.add_sidecar(parser)
    parser.add_argument("--pillion", action="append", default=[], metavar="KEY=VALUE", help="as load=sync; repeatable")
    parser.add_argument(
        "--model", choices=models.SHAPES, default="llama-8b", help="whose shape is measured (default: llama-8b)"
    )
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs (otherwise eager)")
    parser.add_argument("--fragment", action="store_true", help="scatter the device's free blocks first")
    parser.add_argument("--invariant", action="store_true", help="vLLM's batch-invariant kernels: slow, for checking tokens")
    parser.add_argument("--size", action="append", default=[], metavar="KEY=N", help="another size, as prompts=4; repeatable")
    parser.add_argument("--limit-s", type=float, default=240.0, help="the longest a mode may take")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: gone at the end)")
    parser.set_defaults(cards=1)
    if bench.options is not None:
        bench.options(parser)
    if bench.compare is not None:
        parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier call's NAME-MODE.json, as the first mode")
    harness.add_scale(parser, [name for name in bench.sizes if name not in harness.SCALES])
    parser.add_argument("--engine", dest="mode", help=argparse.SUPPRESS)
    return parser.parse_args()


Results = dict[str, Any]


def main(bench: Bench, run: Callable[[Bench, argparse.Namespace, list[str], Path], Results] | None = None) -> None:
    """Runs a benchmark, or one engine of it. `run` measures its modes, if they are not measured one by one."""
    options = arguments(bench)
    options.tiny = options.scale == "tiny"
    options.kills = bench.kills
    options.sizes = harness.changed(bench.sizes[options.scale], options.size)
    options.pillion = [*bench.pillion, *options.pillion]
    if options.mode:
        serve_engine(bench, options)
        return
    modes = list(dict.fromkeys(options.rival)) + ([] if options.no_pillion else ["pillion"])
    # The reference of the others comes first.
    modes.sort(key=lambda mode: mode != "none")
    if not modes:
        sys.exit("nothing to measure: --no-pillion without --rival")
    with tempfile.TemporaryDirectory(prefix="pillion-bench-") as scratch:
        folder = Path(scratch)
        options.logs = options.logs or folder
        options.logs.mkdir(parents=True, exist_ok=True)
        options.model_folder = models.write(folder / "model", shape(options))
        results = (run or measure_all)(bench, options, modes, folder)
    line: dict[str, Any] = {"bench": f"gpu/{bench.name}", "scale": options.scale, "graphs": options.graphs}
    line |= {"fragment": options.fragment, "sizes": options.sizes, "modes": results}
    line["ok"] = all(result.get("ok") for result in results.values())
    harness.report(line)


# === The parent ===


def measure_all(bench: Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> dict[str, Any]:
    """Measures every mode in turn; a failed mode is reported, and the others go on."""
    children: dict[str, EngineProcess] = {}
    results: Results = {}
    reference = json.loads(options.against.read_text()) if options.against else None
    compare = bench.compare
    assert compare is not None, "a benchmark without `compare` has a `run`"

    def measure(mode: str) -> dict[str, Any]:
        nonlocal reference
        with server(mode, options, folder, options.logs) as transfer:
            role = {"model": str(options.model_folder), "transfer": transfer, "reference": reference}
            raw = children[mode].measure(role)
        reference = reference or raw
        (options.logs / f"{bench.name}-{mode}.json").write_text(json.dumps(raw))
        return compare(raw, reference)

    try:
        for mode in modes:
            children[mode] = EngineProcess(bench.name, mode, options, options.logs / f"{bench.name}-{mode}.log")
        for mode in modes:
            try:
                children[mode].hear(IMPORT_WATCHDOG_S)
            except Failed as error:
                results[mode] = failure(mode, error)
        return results | each_mode([mode for mode in modes if mode not in results], measure)
    finally:
        for child in children.values():
            child.end()


def each_mode(modes: list[str], measure: Callable[[str], dict[str, Any]]) -> Results:
    """Measures every mode in turn; a failed mode is reported, and the others go on."""
    results: Results = {}
    for mode in modes:
        harness.say(f"{mode}: starting")
        try:
            results[mode] = measure(mode)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            results[mode] = failure(mode, error)
            continue
        harness.say(f"{mode}: {json.dumps(results[mode])}")
    return results


def failure(mode: str, error: Exception) -> dict[str, Any]:
    """The result of a mode without a measurement: the error, and the last lines of its log."""
    harness.say(f"{mode}: {error}")
    reason, *log = str(error).strip().splitlines()
    return {"ok": False, "rival": mode, "failed": "\n".join([reason, *log[-FAILED_LINES:]])}


class EngineProcess(Child):
    """One engine's process: it imports vLLM at once, and becomes an engine when it reads its role."""

    def __init__(self, bench: str, mode: str, options: argparse.Namespace, log: Path) -> None:
        log.touch()
        command = python(f"benches.gpu.{bench}", *sys.argv[1:], "--engine", mode, "--logs", str(log.parent))
        # The engine's progress goes to this process's standard error; vLLM's output goes to the log, opened by the engine.
        super().__init__(command, None, environment(options, mode), [ROOT])
        self.log = log
        self._limit_s = options.limit_s

    def measure(self, role: dict[str, Any]) -> Any:
        """Has the process run an engine, measure, and end."""
        self.tell(role)
        try:
            return self.hear(self._limit_s)
        finally:
            # Its device memory must be free before the next engine starts.
            self.end()

    def end(self) -> None:
        """Waits for its own end, or kills it and its descendants."""
        self.close_input()
        with contextlib.suppress(Failed):
            self.wait_exit(END_WATCHDOG_S)
        self.close()


def environment(options: argparse.Namespace, mode: str) -> dict[str, str]:
    """The environment of a mode's engine."""
    settings = plain_environment(options.tiny)
    if options.invariant:
        settings["VLLM_BATCH_INVARIANT"] = "1"
    settings |= {variable: str(options.sizes[size]) for size, variable in VARIABLES.items() if size in options.sizes}
    if mode.startswith("lmcache"):
        settings |= LMCACHE
    if options.cards > 1:
        settings["CUDA_VISIBLE_DEVICES"] = "1" if mode.endswith("-d") else "0"
    if mode.startswith("nixl"):
        # Each engine has its own: its peer asks there for the places of its blocks.
        settings["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    if mode == "kvbm":
        # It counts in 10^9 bytes, and has no option for this in `kv_transfer_config`.
        settings["DYN_KVBM_CPU_CACHE_GB"] = str(options.sizes["host_gib"] * GIB / 1e9)
    return settings


def plain_environment(tiny: bool) -> dict[str, str]:
    """The environment of every engine; `tiny`: on a CPU."""
    settings = {
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Every mode has the kernels that the first one chose by their times.
        "TRITON_CACHE_AUTOTUNING": "1",
    }
    return settings | ({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if tiny else {})


def shape(options: argparse.Namespace) -> dict[str, int]:
    """The shape of the measured model."""
    return models.tiny(options.model) if options.tiny else models.SHAPES[options.model]


# === Servers ===


@contextlib.contextmanager
def server(mode: str, options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[dict[str, Any] | None]:
    """The server beside a mode's engine; yields vLLM's `kv_transfer_config`."""
    # The same for every mode.
    gib, disk_gib = options.sizes["host_gib"], options.sizes.get("disk_gib", 0)
    disk = folder / f"disk-{mode}"
    wait_for_memory(gib)
    if mode in ("none", "roomy"):
        yield None
    elif mode == "idle":
        yield transfer_config("IdleConnector", "benches.gpu.idle_connector", {})
    elif mode == "offloading":
        # Answers too: by default it keeps prompts alone, and the others keep both.
        extra: dict[str, Any] = {"cpu_bytes_to_use": gib * GIB, "offload_prompt_only": False}
        if disk_gib:
            # vLLM limits no files of this tier.
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": str(disk)}]}
        name = f"bench-{os.getpid()}"
        try:
            yield {
                "kv_connector": "OffloadingConnector",
                "engine_id": name,
                "kv_role": BOTH,
                "kv_connector_extra_config": extra,
            }
        finally:
            # An engine ended by a signal leaves its memory there, and the next mode's memory would not fit beside it.
            for left in Path("/dev/shm").glob(f"vllm_offload_{name}*"):
                left.unlink()
            shutil.rmtree(disk, ignore_errors=True)
    elif mode == "pegaflow":
        port, http = free_port(), free_port()
        command = [sys.executable, "-m", "pegaflow._server", "--addr", f"127.0.0.1:{port}", "--pool-size", f"{gib}gb"]
        command += ["--http-addr", f"127.0.0.1:{http}", "--devices", "0"]
        with measured(Server(command, logs / "pegaflow-server.log", f"http://127.0.0.1:{http}/health"), kills=options.kills):
            extra = {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": port}
            yield transfer_config("PegaKVConnector", "pegaflow.connector", extra)
    elif mode == "lmcache":
        port, http = free_port(), free_port()
        command = ["env", *(f"{name}={value}" for name, value in LMCACHE.items())]
        command += [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1", "--port", str(port)]
        # Its GB are 2^30 bytes.
        command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", str(gib), "--eviction-policy", "LRU"]
        with measured(Server(command, logs / "lmcache-server.log", f"http://127.0.0.1:{http}/healthcheck")):
            # Answers too, as above.
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.save_decode_cache": True}
            yield transfer_config("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector", extra)
    elif mode == "lmcache-v1":
        extra = {"lmcache.max_local_cpu_size": gib, "lmcache.save_decode_cache": True}
        yield {"kv_connector": "LMCacheConnectorV1", "kv_role": BOTH, "kv_connector_extra_config": extra}
    elif mode == "kvbm":
        # Without Dynamo's runtime: leader and worker run in the engine, and its size is in the engine's environment.
        yield transfer_config("DynamoConnector", "kvbm.vllm_integration.connector", {})
    else:
        disks: tuple[str, ...] = ()
        if disk_gib:
            disk.mkdir()
            disks = (f"--ssd={disk}:{disk_gib}GiB:create",)
        with sidecar(folder, options, gib, logs / "pillion-serve.log", *disks, kills=options.kills) as keeper:
            yield pillion_transfer(keeper, options)
            if not options.kills:
                (logs / "pillion-metrics.txt").write_text(keeper.get("/metrics") or "")


def wait_for_memory(gib: int) -> None:
    """Waits until the page-locked memory of an earlier mode is free, some time after its processes have ended."""

    def available() -> bool:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10 >= gib * GIB + MEMORY_SPARE_BYTES

    def lacking(reason: str) -> Failed:
        left = ", ".join(sorted(path.name for path in Path("/dev/shm").iterdir()))
        return Failed(f"{reason}: free memory for host_gib={gib}, or say --size host_gib=N; /dev/shm has {left or 'no file'}")

    wait_for(available, f"{gib} GiB of memory", MEMORY_WATCHDOG_S, failed=lacking)


@contextlib.contextmanager
def measured(server: Server, start_s: float = READY_WATCHDOG_S, kills: bool = False) -> Iterator[None]:
    """A ready server, ended afterwards with its descendants; it must not end before, unless the benchmark `kills` it."""
    try:
        server.wait_ready(start_s)
        harness.say(f"ready: {' '.join(server.command)}")
        yield
        if not kills:
            server.check_running()
    finally:
        server.signal(signal.SIGTERM)
        with contextlib.suppress(Failed):
            server.wait_exit(END_WATCHDOG_S)
        server.kill()


@contextlib.contextmanager
def sidecar(
    folder: Path, options: argparse.Namespace, gib: int, log: Path, *more: str, kills: bool = False
) -> Iterator[Sidecar]:
    """A ready sidecar, with its socket in a folder and a pool of anonymous memory unless `more` names one. It
    reads `--binary` and `--serve` of the command line."""
    given = (*more, *options.serve)
    keeper = Sidecar(folder, f"{gib}GiB", anonymous=True, more=given, binary=find_binary(options.binary), log=log)
    with measured(keeper, kills=kills):
        yield keeper


def pillion_transfer(keeper: Sidecar, options: argparse.Namespace, role: str = BOTH) -> dict[str, Any]:
    """`kv_transfer_config` of Pillion."""
    extra = {"pillion.socket": str(keeper.socket), "pillion.model_id": "bench"}
    return transfer_config("PillionConnector", "pillion.connector", extra | pillion_options(options), role)


def pillion_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the connector from the command line; whole numbers as such."""
    # On a busy machine of two cores an answer takes longer than the 2 ms of a query.
    given = (["query_timeout_us=10000000"] if options.tiny else []) + options.pillion
    pairs = [option.partition("=")[::2] for option in given]
    return {f"pillion.{key}": int(value) if value.isdecimal() else value for key, value in pairs}


def transfer_config(connector: str, module: str, extra: dict[str, Any], role: str = BOTH) -> dict[str, Any]:
    """`kv_transfer_config` of a connector outside vLLM."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_connector_module_path": module, "kv_role": role}
    return config | {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


# === The child ===


def serve_engine(bench: Bench, options: argparse.Namespace) -> None:
    """Imports vLLM, waits for the engine's role, measures, and answers with one line."""
    assert bench.measure is not None, "a benchmark without `measure` starts no engine"
    parent, progress = Parent(), os.fdopen(os.dup(2), "w")
    options.parent = parent
    parent.log_to(options.logs / f"{bench.name}-{options.mode}.log")
    # Seconds, spent while no engine is measured yet.
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # noqa: F401 - as above

    parent.tell("imported")
    role = parent.hear()
    if role is None:
        return

    def tell(text: str) -> None:
        print(f"             {options.mode}: {text}", file=progress, flush=True)

    if options.mode == "roomy":
        options.sizes["kv_mib"] = options.sizes["roomy_mib"]
    settings = bench.engine(options.sizes) | engine_arguments(options) | {"model": role["model"]}
    if role["transfer"]:
        settings["kv_transfer_config"] = role["transfer"]
    engine = engines.Engine(settings, shape(options), tell)
    if options.fragment:
        engine.fragment()
        tell("free blocks scattered")
    result = bench.measure(engine, options.sizes, options, role["reference"])
    parent.tell(result | {"facts": engine.facts()})


def warm_up(engine: engines.Engine, prompts: list[list[int]], output: int, mode: str) -> None:
    """Plays every kind of step once: prefill, batched decode, and prompts that come back from the cache."""
    for _ in range(2):
        answers = engine.ask_all(prompts, [output] * len(prompts))
        engine.rest()
        engine.reset()
    # A rival with a failed start may go on without hits: its figures would be those of no connector.
    if mode not in CACHELESS and not any(answer.cached_tokens for answer in answers):
        raise Failed(f"{mode} gave back nothing of what the warm-up had it keep")


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments, common to all benchmarks."""
    settings: dict[str, Any] = {"enforce_eager": not options.graphs}
    settings["block_size"] = BLOCK_TOKENS_TINY if options.tiny else BLOCK_TOKENS
    if options.tiny:
        # vLLM's bfloat16 attention ends with an illegal instruction on a processor with AMX hidden by a virtual machine.
        settings["dtype"] = "float32"
    settings |= models.ARGUMENTS.get(models.SHAPES[options.model].get("model_type", ""), {})
    if options.graphs:
        settings["compilation_config"] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    return settings


# === Figures ===


def first_tokens_equal(left: Sequence[Sequence[object]], right: Sequence[Sequence[object]]) -> float:
    """The share of answers with equal first tokens."""
    return share_equal([answer[:1] for answer in left], [answer[:1] for answer in right])


def share_equal(left: Sequence[Sequence[object]], right: Sequence[Sequence[object]]) -> float:
    """The share of answers with all tokens equal."""
    return round(sum(a == b for a, b in zip(left, right, strict=True)) / len(left), 4)
