"""Long prompts and short answers: an engine that computes and one that answers, against two engines that do both.

Two `vllm serve` on two GPUs with one sidecar, `pillion route` before them, and vLLM's own client: `rate` requests a second of
`input_tokens` random tokens in and `output_tokens` out. `mixed` asks the same two engines by turns: no prompt is long enough to
be computed elsewhere. With `--strike` the engine that computes is killed, or frozen, in the middle of it.
The weights are vLLM's dummy ones: times are measured, answers are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches.gpu import http, rig
from testkit import metrics
from testkit.ports import free_port
from testkit.server import Server, fetch
from testkit.sidecar import find_binary

SIZES = {
    "full": {
        "input_tokens": 5000, "output_tokens": 200, "requests": 160, "rate": 4,
        "batched_tokens": 2048, "kv_mib": 24 * 1024, "host_gib": 32,
    },
    "quick": {
        "input_tokens": 5000, "output_tokens": 200, "requests": 60, "rate": 4,
        "batched_tokens": 2048, "kv_mib": 24 * 1024, "host_gib": 32,
    },
    "tiny": {
        "input_tokens": 500, "output_tokens": 8, "requests": 8, "rate": 1,
        "batched_tokens": 256, "kv_mib": 16, "host_gib": 1,
    },
}  # fmt: skip
STRIKES = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
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
        "load_format": "dummy",
    }


def run(bench: rig.Bench, options: argparse.Namespace, modes: list[str], folder: Path) -> rig.Results:
    """Every mode in turn."""
    return http.run_modes(options, modes, folder, lambda mode, model: measured(bench, mode, model, folder, options))


def measured(bench: rig.Bench, mode: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The client's figures of one mode."""
    gib, struck = options.sizes["host_gib"], mode != "mixed" and options.strike is not None
    rig.wait_for_memory(gib)
    with contextlib.ExitStack() as stack:
        keeper = stack.enter_context(rig.sidecar(folder, options, gib, options.logs / f"apart-{mode}-serve.log"))
        settings = bench.engine(options.sizes) | rig.engine_arguments(options)
        settings["kv_transfer_config"] = rig.pillion_transfer(keeper, options)
        started = [http.start(f"{mode}-{side}", model, settings, options) for side in ("p", "d")]
        for server, _ in started:
            stack.enter_context(rig.measured(server, http.START_WATCHDOG_S, kills=struck))
        (computes, first), (_, second) = started
        url = stack.enter_context(route(mode, first, second, options))
        # Both engines have computed once, and the router has asked both.
        few = argparse.Namespace(**vars(options) | {"sizes": options.sizes | {"requests": WARM_UPS}})
        http.client(url, model, few, options.logs / f"apart-{mode}-warm.json", dataset(few))
        if struck:
            after = options.sizes["requests"] / options.sizes["rate"] / 2
            timer = threading.Timer(after, computes.signal, [STRIKES[options.strike]])
            timer.start()
            stack.callback(timer.cancel)
        raw = http.client(url, model, options, options.logs / f"apart-{mode}.json", dataset(options))
        routed = metrics.totals(fetch(f"{url}/metrics") or "")
        if struck:
            computes.signal(signal.SIGCONT)
        return http.figures(raw) | {name: routed[name] for name in routed if name.startswith("pillion_route_")}


def dataset(options: argparse.Namespace) -> list[str]:
    """Of the client: no prompt begins as another one."""
    sizes = options.sizes
    lengths = ["--random-input-len", str(sizes["input_tokens"]), "--random-output-len", str(sizes["output_tokens"])]
    return ["--dataset-name", "random", "--random-range-ratio", "0", *lengths]


@contextlib.contextmanager
def route(mode: str, first: str, second: str, options: argparse.Namespace) -> Iterator[str]:
    """A ready router; yields its address."""
    url = f"http://127.0.0.1:{free_port()}"
    command: list[object] = [find_binary(options.binary), "route", "--listen", url.removeprefix("http://"), "--prefill", first]
    command += ["--decode", second, *options.route]
    if mode == "mixed":
        command += ["--decode", first, "--min-remote-tokens", NEVER]
    with rig.measured(Server(command, options.logs / f"apart-{mode}-route.log", f"{url}/health")):
        yield url


def command_line(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    rig.cards(parser)
    parser.add_argument("--strike", choices=STRIKES, help="what happens to the engine that computes, in the middle")
    parser.add_argument("--route", action="append", default=[], metavar="OPTION", help="more of `pillion route`; repeatable")


BENCH = rig.Bench("apart", str(__doc__), SIZES, engine_settings, rivals=("mixed",), options=command_line)

if __name__ == "__main__":
    rig.main(BENCH, run)
