"""A router before two engines, of which the one that computes prompts is away."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from testkit import ports
from testkit.server import Server
from testkit.sidecar import find_binary

# More tokens than the engine that answers is left to compute alone.
PROMPT = list(range(300))


class Router(Server):
    """`pillion route`, and where its pages are."""

    def __init__(self, directory: Path, decode: str, *arguments: str) -> None:
        self.http = f"127.0.0.1:{ports.free_port()}"
        away = f"http://127.0.0.1:{ports.free_port()}"
        command = [find_binary(), "route", "--listen", self.http, "--prefill", away, "--decode", decode, *arguments]
        super().__init__(command, directory / "route.log", f"http://{self.http}/health")

    def ask(self, status: int = 200) -> None:
        """One prompt, which is answered with this status."""
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"http://{self.http}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            assert answer.status == status


class _Answers(http.server.BaseHTTPRequestHandler):
    """An engine's server, as far as a router asks it."""

    def do_POST(self) -> None:
        """An answer to whatever was asked."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def routing(directory: Path, *arguments: str) -> Iterator[Router]:
    """The router, ready, with these arguments beside those that it needs."""
    engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    router = Router(directory, f"http://127.0.0.1:{engine.server_port}", *arguments)
    try:
        router.wait_ready()
        yield router
    finally:
        router.kill()
        engine.shutdown()
