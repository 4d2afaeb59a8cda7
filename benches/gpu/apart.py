"""Long prompts and short answers: a prefill engine and a decode engine, against two engines that do both.

Two `vllm serve` on two GPUs with one sidecar, `pillion route` before them, and vLLM's own client: `rate` requests a second of
`input_tokens` random tokens in and `output_tokens` out. The decode engine has shorter steps, `decode_batched_tokens`, for
prompts that would wait. `mixed` asks two engines of equal steps by turns: no prompt is long enough to be computed elsewhere.
`kill` and `freeze` strike the prefill engine in the middle of all requests. Answers equal those of the first mode, as far as
steps of other sizes round alike: always with `--invariant`. The size `output_chunk` is `VLLM_V1_OUTPUT_PROC_CHUNK_SIZE` of both
engines, and `rust_frontend=1` takes vLLM's front end in Rust.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches.gpu import http, rig, weights
from testkit import metrics
from testkit.ports import free_port
from testkit.server import Server, fetch
from testkit.sidecar import find_binary

SIZES = {
    "full": {
        "input_tokens": 5000, "output_tokens": 200, "requests": 160, "rate": 4,
        "batched_tokens": 2048, "decode_batched_tokens": 256, "kv_mib": 24 * 1024, "host_gib": 32,
        "output_chunk": 1, "rust_frontend": 0,
    },
    "quick": {
        "input_tokens": 5000, "output_tokens": 200, "requests": 60, "rate": 4,
        "batched_tokens": 2048, "decode_batched_tokens": 256, "kv_mib": 24 * 1024, "host_gib": 32,
        "output_chunk": 1, "rust_frontend": 0,
    },
    "tiny": {
        "input_tokens": 500, "output_tokens": 8, "requests": 8, "rate": 1,
        "batched_tokens": 256, "decode_batched_tokens": 128, "kv_mib": 16, "host_gib": 1,
        "output_chunk": 1, "rust_frontend": 0,
    },
}  # fmt: skip
STRIKES = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
# `kv_role` of each.
SIDES = {"p": "kv_producer", "d": "kv_consumer"}
WARM_UPS = 4
# No prompt of a mixed pair is so long.
NEVER = 1 << 40


def engine_settings(sizes: dict[str, int]) -> dict[str, Any]:
    """vLLM's arguments."""
    return {
        "kv_cache_memory_bytes": sizes["kv_mib"] << 20,
        "max_model_len": sizes["input_tokens"] + sizes["output_tokens"] + 64,
        "max_num_batched_tokens": sizes["batched_tokens"],
        "max_num_seqs": 64,
        "load_format": weights.LOAD_FORMAT,
    }


def run(bench: rig.Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> rig.Results:
    """Runs every mode in turn; the results have the share of answers equal to those of the first mode."""
    answers: list[list[list[str]]] = []

    def measure(mode: str, model: Path) -> dict[str, Any]:
        raw, more = asked(bench, mode, model, folder, options)
        answers.append([text.split() for text in raw["generated_texts"]])
        equal = {"answers_equal": rig.share_equal(answers[-1], answers[0]), "words_equal": leading(answers[-1], answers[0])}
        return http.figures(raw) | more | equal

    return http.run_modes(options, modes, folder, measure)


def leading(answers: list[list[str]], right: list[list[str]]) -> float:
    """The mean share of an answer's words before the first wrong one."""
    shares = []
    for words, others in zip(answers, right, strict=True):
        same = [word == other for word, other in zip(words, others, strict=False)]
        shares.append([*same, False].index(False) / max(1, len(others)))
    return round(statistics.mean(shares), 4)


def asked(
    bench: rig.Bench, mode: str, model: Path, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, float]]:
    """The client's own figures of one mode, and the router's counters."""
    struck = mode in STRIKES
    with contextlib.ExitStack() as stack:
        (computes, first), (_, second) = stack.enter_context(pair(bench, mode, model, folder, options, struck))
        more = [*options.route, *(["--decode", first, "--min-remote-tokens", NEVER] if mode == "mixed" else [])]
        url = stack.enter_context(route(mode, first, second, options, more))
        # Both engines have computed once, and the router has asked both.
        few = argparse.Namespace(**vars(options) | {"sizes": options.sizes | {"requests": WARM_UPS}})
        http.client(url, model, few, options.logs / f"apart-{mode}-warm.json", dataset(few))
        if struck:
            after = options.sizes["requests"] / options.sizes["rate"] / 2
            timer = threading.Timer(after, computes.signal, [STRIKES[mode]])
            timer.start()
            stack.callback(timer.cancel)
        raw = http.client(url, model, options, options.logs / f"apart-{mode}.json", dataset(options))
        routed = metrics.totals(fetch(f"{url}/metrics") or "")
        if struck:
            computes.signal(signal.SIGCONT)
        return raw, {name: routed[name] for name in routed if name.startswith("pillion_route_")}


@contextlib.contextmanager
def pair(
    bench: rig.Bench, mode: str, model: Path, folder: Path, options: argparse.Namespace, kills: bool = False
) -> Iterator[list[tuple[Server, str]]]:
    """A prefill and a decode engine, or in `mixed` two engines that do both, and the sidecar beside them."""
    gib = options.sizes["host_gib"]
    rig.wait_for_memory(gib)
    with contextlib.ExitStack() as stack:
        keeper = stack.enter_context(rig.sidecar(folder, options, gib, options.logs / f"{bench.name}-{mode}-serve.log"))
        started = []
        for side, role in SIDES.items():
            settings = bench.engine(options.sizes) | rig.engine_arguments(options)
            if side == "d" and mode != "mixed":
                # Not every benchmark has shorter steps there.
                tokens = options.sizes.get("decode_batched_tokens", settings["max_num_batched_tokens"])
                settings["max_num_batched_tokens"] = tokens
            transfer = rig.pillion_transfer(keeper, options, rig.BOTH if mode == "mixed" else role)
            if options.tiny:
                # On a CPU an engine with its own copies loads nothing before all blocks are kept.
                transfer["kv_connector_extra_config"]["pillion.copy"] = "sidecar"
            started.append(http.start(f"{mode}-{side}", model, settings | {"kv_transfer_config": transfer}, options))
        for server, _ in started:
            stack.enter_context(rig.measured(server, http.START_WATCHDOG_S, kills=kills))
        yield started


def dataset(options: argparse.Namespace) -> list[str]:
    """The client's data set: no prompt begins as another one."""
    sizes = options.sizes
    lengths = ["--random-input-len", str(sizes["input_tokens"]), "--random-output-len", str(sizes["output_tokens"])]
    return ["--dataset-name", "random", "--random-range-ratio", "0", *lengths]


@contextlib.contextmanager
def route(mode: str, first: str, second: str, options: argparse.Namespace, more: list[object]) -> Iterator[str]:
    """A ready router with `more` options; yields its address."""
    url = f"http://127.0.0.1:{free_port()}"
    command: list[object] = [find_binary(options.binary), "route", "--listen", url.removeprefix("http://"), "--prefill", first]
    command += ["--decode", second, *more]
    with rig.measured(Server(command, options.logs / f"{mode}-route.log", f"{url}/health")):
        yield url


def command_line(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    rig.cards(parser)
    parser.add_argument("--route", action="append", default=[], metavar="OPTION", help="more of `pillion route`; repeatable")


BENCH = rig.Bench("apart", str(__doc__), SIZES, engine_settings, rivals=("mixed", *STRIKES), options=command_line)

if __name__ == "__main__":
    rig.main(BENCH, run)
