"""A router before a prefill engine, which may be away, and a decode engine."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from testkit import ports
from testkit.server import Server, fetch
from testkit.sidecar import find_binary

# More tokens than the decode engine computes alone.
PROMPT = list(range(300))


class Router(Server):
    """`pillion route`, with the address of its pages in `http`."""

    def __init__(self, directory: Path, prefill: str, decode: str, *arguments: str) -> None:
        self.http = f"127.0.0.1:{ports.free_port()}"
        # No prompt goes to one engine because of the times of this machine.
        arguments = ("--decode-prompt-share", "0", *arguments)
        command = [find_binary(), "route", "--listen", self.http, "--prefill", prefill, "--decode", decode, *arguments]
        self._begins = itertools.count()
        super().__init__(command, directory / "route.log", f"http://{self.http}/health")

    def page(self) -> str:
        """The router's metrics."""
        page = fetch(f"http://{self.http}/metrics")
        assert page is not None
        return page

    def ask(self, status: int = 200) -> None:
        """Sends a new prompt; the answer must have this status."""
        begin = next(self._begins)
        body = json.dumps({"prompt": [begin + token for token in PROMPT], "max_tokens": 1}).encode()
        request = urllib.request.Request(f"http://{self.http}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            assert answer.status == status


class _Engine(http.server.ThreadingHTTPServer):
    """An engine's server, with the calls of a router alone. It states this number of cached tokens."""

    def __init__(self, cached: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        usage = {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": cached}}
        self.answer = json.dumps({"usage": usage, "kv_transfer_params": {}}).encode()


class _Answers(http.server.BaseHTTPRequestHandler):
    """The handler of requests to an engine."""

    def do_POST(self) -> None:
        """Answers each request alike."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        assert isinstance(self.server, _Engine)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def routing(
    directory: Path, *arguments: str, computes: bool = False, cached: int = 0, prefill: str | None = None
) -> Iterator[Router]:
    """The router, ready, with these arguments beside the necessary ones. One engine answers, and if `computes` also computes.

    Otherwise the prefill engine is at the address `prefill`, or away.
    """
    engine = _Engine(cached)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    answers, away = (f"http://127.0.0.1:{port}" for port in (engine.server_port, ports.free_port()))
    router = Router(directory, answers if computes else prefill or away, answers, *arguments)
    try:
        router.wait_ready()
        yield router
    finally:
        router.kill()
        engine.shutdown()
