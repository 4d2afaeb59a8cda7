"""Prompts with common long beginnings, sent to `vllm serve` over HTTP by `vllm bench serve`, vLLM's own client.

The client's dataset is `prefix_repetition`: `prefixes` beginnings of `prefix_tokens`, each with several endings of
`suffix_tokens`, in a random order, `rate` requests a second. Engine, HTTP server and client are processes of their own. The
weights are vLLM's dummy ones: times are measured, answers are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benches.gpu import rig, weights
from testkit import metrics
from testkit.child import python_path
from testkit.ports import free_port
from testkit.server import Server, fetch

# kv_mib: a third of the beginnings; host_gib: all of them.
SIZES = {
    "full": {
        "prefixes": 48, "prefix_tokens": 8192, "suffix_tokens": 256, "output_tokens": 32, "requests": 288, "rate": 8,
        "kv_mib": 16 * 1024, "host_gib": 64,
    },
    "quick": {
        "prefixes": 8, "prefix_tokens": 4096, "suffix_tokens": 128, "output_tokens": 8, "requests": 24, "rate": 8,
        "kv_mib": 2 * 1024, "host_gib": 8,
    },
    "tiny": {
        "prefixes": 4, "prefix_tokens": 512, "suffix_tokens": 64, "output_tokens": 4, "requests": 12, "rate": 2,
        "kv_mib": 4, "host_gib": 1,
    },
}  # fmt: skip
UNKNOWN = "a-word-unknown"
# The watchdogs of a server's start and of a client.
START_WATCHDOG_S = 300
CLIENT_WATCHDOG_S = 300
# `vllm serve` and `vllm bench serve`; vLLM's CPU build has them without the command `vllm`.
SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
# The command `vllm serve`, needed for vLLM's front end in Rust; vLLM's CPU build lacks both.
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
CLIENT = (
    sys.executable,
    "-c",
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())",
)
# The client's options of the dataset, by the sizes above.
DATASET = {
    "num-prefixes": "prefixes",
    "prefix-len": "prefix_tokens",
    "suffix-len": "suffix_tokens",
    "output-len": "output_tokens",
}
# Counters of vLLM's own /metrics: prompt tokens, and the hits of its cache and of its connector.
COUNTERS = {
    "asked": "vllm:prefix_cache_queries_total",
    "device": "vllm:prefix_cache_hits_total",
    "connector": "vllm:external_prefix_cache_hits_total",
}


def write_tokenizer(model: Path, vocabulary: int) -> None:
    """A word for each token id: a prompt's text has as many tokens as the client wants."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    # vLLM refuses a text with more letters than its tokens could have, by the longest word: a space must count as one, too.
    words = {UNKNOWN: 0} | {f"w{token}": token for token in range(1, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "unk_token": UNKNOWN}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["prefix_tokens"] + sizes["suffix_tokens"] + sizes["output_tokens"] + 64,
        "max_num_seqs": 64,
        "load_format": "dummy",
    }


# The measurement of a started mode: its arguments are the mode, and the model's folder.
Measure = Callable[[str, Path], dict[str, Any]]


def run(bench: rig.Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> rig.Results:
    """Every mode in turn."""

    def measure(mode: str, model: Path) -> dict[str, Any]:
        with rig.server(mode, options, folder, options.logs) as transfer:
            settings = bench.engine(options.sizes) | rig.engine_arguments(options)
            if transfer:
                settings["kv_transfer_config"] = transfer
            with serving(mode, model, settings, options) as url:
                raw = ask(url, model, options, options.logs / f"http-{mode}-client.json")
                return figures(raw) | found(url)

    return run_modes(options, modes, folder, measure)


def run_modes(options: argparse.Namespace, modes: list[str], folder: Path, measure: Measure) -> rig.Results:
    """Runs every mode in turn; a failed mode is reported, and the others go on."""
    model = options.model_folder
    write_tokenizer(model, rig.shape(options)["vocab_size"])
    options.path = [weights.write_plugin(folder / "plugin"), rig.ROOT]
    return rig.each_mode(modes, lambda mode: measure(mode, model))


@contextlib.contextmanager
def serving(mode: str, model: Path, settings: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """A ready `vllm serve`; yields its address."""
    server, url = start(mode, model, settings, options)
    with rig.measured(server, START_WATCHDOG_S):
        yield url


def start(mode: str, model: Path, settings: dict[str, Any], options: argparse.Namespace) -> tuple[Server, str]:
    """`vllm serve`, still starting, and its address."""
    url = f"http://127.0.0.1:{free_port()}"
    serve = COMMAND if options.sizes.get("rust_frontend") else SERVE
    command = [*environment(options, mode), *serve, "--model", str(model), "--port", url.rpartition(":")[2]]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command += [flag] if value else []
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return Server(command, options.logs / f"http-{mode}.log", f"{url}/health"), url


def environment(options: argparse.Namespace, mode: str = "none") -> list[str]:
    """A prefix of a command: the engines' environment, with the engine in a process of its own, as users have it."""
    settings = rig.environment(options, mode) | python_path(options.path) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return ["env", *(f"{name}={value}" for name, value in settings.items())]


def ask(url: str, model: Path, options: argparse.Namespace, result: Path) -> dict[str, Any]:
    """All requests; the client's own figures."""
    dataset = ["--dataset-name", "prefix_repetition"]
    for flag, size in DATASET.items():
        dataset += [f"--prefix-repetition-{flag}", str(options.sizes[size])]
    return client(url, model, options, result, dataset)


def client(url: str, model: Path, options: argparse.Namespace, result: Path, dataset: list[str]) -> dict[str, Any]:
    """All requests of a dataset of vLLM's client; its own figures."""
    sizes = options.sizes
    command = [*environment(options), *CLIENT, "--base-url", url, "--model", str(model), *dataset]
    command += ["--seed", "1", "--ignore-eos", "--disable-tqdm"]
    command += ["--num-prompts", str(sizes["requests"]), "--request-rate", str(sizes["rate"]), "--temperature", "0"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name]
    with (result.with_suffix(".log")).open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=CLIENT_WATCHDOG_S, check=True)
    return dict(json.loads(result.read_text()))


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """The reported figures of the client: times in milliseconds, and requests a second."""
    names = ("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")
    report: dict[str, Any] = {name: round(raw[name], 1) for name in names}
    report |= {"requests_s": round(raw["request_throughput"], 2), "completed": raw["completed"]}
    return report | {"ok": raw["completed"] == raw["num_prompts"]}


def found(url: str) -> dict[str, float]:
    """The hits of the device's cache and of the connector, as shares of all prompt tokens."""
    page = metrics.totals(fetch(f"{url}/metrics") or "")
    counts = {name: page.get(counter, 0) for name, counter in COUNTERS.items()}
    return {f"found_{name}": round(counts[name] / max(1, counts["asked"]), 4) for name in ("device", "connector")}


BENCH = rig.Bench("http", str(__doc__), SIZES, engine_settings)

if __name__ == "__main__":
    rig.main(BENCH, run)
