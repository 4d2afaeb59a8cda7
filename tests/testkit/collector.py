"""A receiver of OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from testkit.waiting import wait_for


@dataclass
class Collector:
    """The spans received; it answers with `status`, once `answers` is set."""

    url: str
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    spans: list[Any] = field(default_factory=list)
    # The attributes of the service that sent last.
    resource: dict[str, Any] = field(default_factory=dict)

    def records(self) -> dict[str, dict[str, Any]]:
        """The attributes of each span, by the request's id."""
        told = [_plain(span.attributes) for span in self.spans]
        assert len({one["gen_ai.request.id"] for one in told}) == len(told), "one record a request"
        return {one.pop("gen_ai.request.id"): one for one in told}

    def wait(self) -> None:
        """Waits until a record has come."""
        wait_for(lambda: bool(self.spans), "a record")

    def take(self, body: bytes) -> None:
        """Takes the body of one request."""
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _plain(sent.resource.attributes)
            for scope in sent.scope_spans:
                self.spans += scope.spans


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def collecting(status: int = 200, silent: bool = False) -> Iterator[Collector]:
    """Runs a receiver until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.answers.wait()
            if self.path == "/v1/traces" and collector.status == 200:
                collector.take(body)
            with contextlib.suppress(BrokenPipeError):
                self.send_response(collector.status)
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces", status)
        if not silent:
            collector.answers.set()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            thread.join()
