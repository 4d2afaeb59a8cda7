"""`pillion.engine` asks a sidecar for its namespaces: at its control socket, or at its address with its token."""

from __future__ import annotations

import contextlib
import importlib
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from pillion import engine
from pillion.engine import Address, Difference, EngineError, Namespace

FORM = "layers=1 tokens=16 kv_heads=1 keys=8 values=8 dtype=float32 k=tokens*16+keys v=8+tokens*16+values packing=none"
KNOWN = {"namespace": "ab" * 16, "facts": {"page_form": FORM, "dtype": "torch.float32"}, "block_bytes": 1024}
LISTED = {"namespaces": [KNOWN, {"namespace": "cd" * 16}]}
TOKEN = "0123456789abcdef"


@contextlib.contextmanager
def answering(path: Path | None, status: int, answer: Any) -> Iterator[tuple[Any, list[str | None]]]:
    """A sidecar with this answer at a path or an address, and the list of tokens that clients sent."""
    shown: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/namespaces"
            shown.append(self.headers["Authorization"])
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = socketserver.UnixStreamServer(str(path), Handler) if path else socketserver.TCPServer(("127.0.0.1", 0), Handler)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address, shown
        finally:
            server.shutdown()
            thread.join()


def token(folder: Path) -> Path:
    file = folder / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def test_the_control_socket_beside_the_other_one_is_asked(tmp_path: Path) -> None:
    with answering(tmp_path / "p.control.sock", 200, LISTED) as (_, shown):
        [found] = engine.find_namespaces(tmp_path / "p.sock", dtype="torch.float32")
    assert (found.digest, found.differs, shown) == (KNOWN["namespace"], (), [None])


def test_an_address_is_asked_with_its_token(tmp_path: Path) -> None:
    with answering(None, 200, LISTED) as ((host, port), shown):
        [found] = engine.find_namespaces(tmp_path / "p.sock", control=Address(f"{host}:{port}", token(tmp_path)), dtype="other")
    assert [difference.fact for difference in found.differs] == ["dtype"]
    assert shown == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("status", [401, 503, 504])
def test_what_the_sidecar_refuses_is_said_in_its_words(tmp_path: Path, status: int) -> None:
    refusal = {"error": "the data thread has not answered within 10 s"}
    with (
        answering(tmp_path / "p.control.sock", status, refusal),
        pytest.raises(EngineError, match=r"p\.control\.sock: the data thread has not answered"),
    ):
        engine.find_namespaces(tmp_path / "p.sock")


def test_who_cannot_ask_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"--control-socket.*or pass an Address"):
        engine.find_namespaces(tmp_path / "none.sock")
    with pytest.raises(EngineError, match=r"No such file.*--control-listen, and a file with its token"):
        engine.find_namespaces(tmp_path / "p.sock", control=Address("127.0.0.1:1", tmp_path / "none"))
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:x: .*--control-listen"):
        engine.find_namespaces(tmp_path / "p.sock", control=Address("127.0.0.1:x", token(tmp_path)))


def test_a_decoder_of_the_examples_joins_the_one_namespace_that_agrees() -> None:
    only = importlib.import_module("joining").only
    agrees, other = Namespace("aa", {}, 1), Namespace("bb", {}, 1, (Difference("dtype", "x", "y", "use the same dtype"),))
    assert only([agrees, other]) is agrees
    for found, text in [
        ([], "let vLLM answer one prompt first"),
        ([other], "bb: dtype is 'x' here and 'y' there: use the same dtype"),
        ([agrees, agrees], "state more facts"),
    ]:
        with pytest.raises(SystemExit, match=text):
            only(found)
