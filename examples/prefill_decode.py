"""Start a prefill engine, a decode engine, a sidecar and a router, and print the first answer.

    python examples/prefill_decode.py MODEL [--dram SIZE] [--port PORT] [--once] [VLLM_OPTION...]

MODEL is a folder or a name, as for `vllm serve`; unknown options go to both engines. With two GPUs each engine has one,
with one GPU half of its memory. Ctrl-C ends all four programs. Logs are under pillion-pd/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

LOGS = Path("pillion-pd")
# Engines answer beside the router, whose port comes first.
PREFILL, DECODE = 1, 2
PROMPT = "One engine computes this prompt, and another one answers it. " * 40
OUTPUT_TOKENS = 32
POLL_S = 0.5
# Tokens of prompts found in the sidecar, by the decode engine.
LOADED = re.compile(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)


class Program:
    """A program with a log of its own, and its address for health checks."""

    def __init__(self, name: str, url: str, command: list[str], **variables: str) -> None:
        self.name, self.url, self.log = name, url, LOGS / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)

    def wait_ready(self) -> None:
        """Waits for status 200; if the program ends before, this program ends too."""
        while self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url):
                print(f"{self.name} is ready", flush=True)
                return
            time.sleep(POLL_S)
        tail = self.log.read_text(errors="replace").splitlines()[-20:]
        sys.exit("\n".join([*tail, f"{self.name} ended with status {self._process.returncode}: see {self.log}"]))

    def end(self) -> None:
        """Ends it as Kubernetes does."""
        self._process.terminate()
        self._process.wait()


def gpus() -> int:
    """GPUs of this machine."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
        return done.stdout.count("\n")
    return 0


def engine(options: argparse.Namespace, more: list[str], place: int) -> Program:
    """The prefill engine, or the decode engine."""
    name, port, count = ("prefill" if place == PREFILL else "decode"), options.port + place, gpus()
    transfer = {
        "kv_connector": "PillionConnector",
        "kv_connector_module_path": "pillion.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The sidecar copies on a CPU too: so the decode engine loads blocks before all of them are kept.
        "kv_connector_extra_config": {"pillion.socket": str(LOGS.resolve() / "pillion.sock"), "pillion.copy": "sidecar"},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model, "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    if count == 1:
        command += ["--gpu-memory-utilization", "0.45"]
    # Both derive the same keys. The second leaves the event loop free between the tokens of other answers.
    variables = {"PYTHONHASHSEED": "0", "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "1"}
    if count > 1:
        variables["CUDA_VISIBLE_DEVICES"] = str(place - 1)
    return Program(name, f"http://127.0.0.1:{port}/health", [*command, *more], **variables)


def fetch(url: str, body: dict[str, object] | None = None) -> str:
    """The text of an answer."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: status {error.code}: {error.read().decode(errors='replace')}")


def main() -> None:
    """Starts all four, asks once, and waits."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n")[2].strip())
    parser.add_argument("model")
    parser.add_argument("--dram", default="4GiB", help="memory of the sidecar")
    parser.add_argument("--port", type=int, default=8000, help="the router's; the engines take the next two")
    parser.add_argument("--once", action="store_true", help="end after the first answer")
    options, more = parser.parse_known_args()
    LOGS.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):

        def start(program: Program) -> Program:
            stack.callback(program.end)
            return program

        serve = ["pillion", "serve", "--dram", options.dram, "--socket", str(LOGS / "pillion.sock")]
        sidecar = start(Program("sidecar", "http://127.0.0.1:9440/healthz", serve))
        sidecar.wait_ready()
        engines = [start(engine(options, more, place)) for place in (PREFILL, DECODE)]
        for each in engines:
            each.wait_ready()
        prefill, decode = (f"http://127.0.0.1:{options.port + place}" for place in (PREFILL, DECODE))
        route = ["pillion", "route", "--prefill", prefill, "--decode", decode, "--listen", f"127.0.0.1:{options.port}"]
        url = f"http://127.0.0.1:{options.port}"
        start(Program("router", f"{url}/health", route)).wait_ready()

        asked: dict[str, object] = {"model": options.model, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        answer = json.loads(fetch(f"{url}/v1/completions", asked))
        loaded = sum(float(count) for count in LOADED.findall(fetch(f"{decode}/metrics")))
        print(f"answer: {answer['choices'][0]['text']!r}")
        print(f"the decode engine loaded {loaded:.0f} of the prompt's {answer['usage']['prompt_tokens']} tokens")
        if not options.once:
            print(f"{url} answers as vLLM's server does; Ctrl-C ends it", flush=True)
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
