"""The time that `pillion route` itself adds to a first token, before engines with immediate answers.

Both engines are servers in this process, with the answers of vLLM 0.32 and without computation. A prompt is a list of token
ids, and each request has a connection of its own. The last line is one JSON object; times are medians in milliseconds.

    benches/run route [--binary PILLION]
"""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches import harness
from testkit import metrics
from testkit.ports import free_port
from testkit.server import Server, fetch
from testkit.sidecar import find_binary
from testkit.waiting import wait_for

LENGTHS = (512, 1790, 7070)
REQUESTS = 200
VOCABULARY = 150_000
WATCHDOG_S = 20
# The last event of the router's own question.
USAGE = b'data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":1}}\n\n'


def event(text: str, finish: str | None, prompt: list[int] | None) -> bytes:
    """One event of a stream; the prefill engine's event has the ids of its `prompt`."""
    ids = {"prompt_token_ids": prompt, "token_ids": None if prompt is None else [9]}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None} | ids
    said = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers of either engine; a request with `return_token_ids` is for prefill."""

    protocol_version = "HTTP/1.1"
    # An event is not to wait for the next one.
    disable_nagle_algorithm = True
    # The answer to each prefill request.
    computed = b""

    def do_GET(self) -> None:
        """The list of models; the router reads the longest prompt in it."""
        self._answer(json.dumps({"data": [{"id": "m", "max_model_len": 1 << 20}]}).encode())

    def do_POST(self) -> None:
        """An answer, at once."""
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if b'"sampling":true' in asked:
            stated = json.dumps({"defaults": {}, "counts": False})
            self._answer(json.dumps({"kv_transfer_params": {"pillion": {"sampling": stated}}}).encode())
            return
        if b'"include_usage":true' in asked:
            self._answer(event(" a", "length", [0]) + USAGE + b"data: [DONE]\n\n")
            return
        two = event(" a", None, None) + event(" b", "length", None)
        self._answer((type(self).computed if b'"return_token_ids":true' in asked else two) + b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The address of a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def first_token(url: str, prompt: list[int]) -> float:
    """Milliseconds from a request to its first event."""
    fields = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
        line = answer.readline()
        spent = (time.perf_counter() - began) * 1e3
        rest = answer.read()
    if not line.startswith(b"data: {") or not rest.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"not a stream: {line!r} {rest!r}")
    return spent


def main() -> None:
    """Measures by turns an engine, and the router before two."""
    parser = harness.parser(__doc__)
    parser.add_argument("--binary", help="the sidecar's executable")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pillion-bench-")))
        alone, answers = stack.enter_context(engine()), stack.enter_context(engine())
        routed = f"http://127.0.0.1:{free_port()}"
        by_kind = ["--decode-prompt-share", "0"]
        command = [find_binary(options.binary), "route", "--listen", routed.removeprefix("http://"), *by_kind]
        router = Server([*command, "--prefill", alone, "--decode", answers], folder / "route.log", f"{routed}/health")
        stack.callback(router.kill)
        router.wait_ready()
        Engine.computed = event(" a", "length", [0])

        def warm_up() -> list[int]:
            # The second engine has answered every earlier prompt.
            return [random.randrange(VOCABULARY) for _ in range(LENGTHS[0])]

        def passed_on() -> int:
            return metrics.totals(fetch(f"{routed}/metrics") or "").get("pillion_route_first_tokens_total", 0)

        # Until the router has asked both engines for their terms, first tokens come from the second one.
        wait_for(
            lambda: bool(first_token(routed, warm_up()) and passed_on()), "a first token that is passed on at once", WATCHDOG_S
        )
        before = passed_on()
        for tokens in LENGTHS:
            prompts = [[random.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(REQUESTS)]
            Engine.computed = event(" a", "length", prompts[0])
            times = [(first_token(alone, prompt), first_token(routed, prompt)) for prompt in prompts]
            one, two = (statistics.median(each) for each in zip(*times, strict=True))
            results[str(tokens)] = {"alone": round(one, 3), "routed": round(two, 3), "added": round(two - one, 3)}
        if passed_on() - before != REQUESTS * len(LENGTHS):
            raise SystemExit("not every first token was passed on at once")
    harness.report({"bench": "route", "requests": REQUESTS, "tokens_ms": results})


if __name__ == "__main__":
    main()
