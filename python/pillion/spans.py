"""Records as spans, sent by OTLP over HTTP. OpenTelemetry's own variables set headers and certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# The longest attempt to send a record: the next ones wait meanwhile.
TIMEOUT_S = 2


class _Exporter(SpanExporter):
    """Sends each span as it ends, and keeps the success."""

    def __init__(self, url: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self.taken = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends again within the time if the receiver is busy."""
        result = self._exporter.export(spans)
        self.taken = result is SpanExportResult.SUCCESS
        return result


class Spans:
    """The receiver of records."""

    def __init__(self, url: str, engine_id: str) -> None:
        self._exporter = _Exporter(url)
        named = Resource({"service.name": "pillion", "service.instance.id": engine_id})
        # Records were chosen before: a sampler of the environment would take some away.
        provider = TracerProvider(ALWAYS_ON, named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("pillion")

    def send(self, told: dict[str, Any], headers: Mapping[str, str] | None, begun_s: float, ended_s: float) -> bool:
        """True if the receiver has taken the record. A child of the span of the client's headers; seconds since 1970."""
        flat = {name: value for name, value in told.items() if not isinstance(value, dict) and name != "request"}
        flat |= {f"{name}.{key}": each for name in ("found", "hints") for key, each in told.get(name, {}).items()}
        attributes = {"gen_ai.request.id": told["request"]} | {f"pillion.{name}": value for name, value in flat.items()}
        parent = TraceContextTextMapPropagator().extract(headers or {})
        self._exporter.taken = False
        span = self._tracer.start_span("pillion.request", parent, attributes=attributes, start_time=int(begun_s * 1e9))
        span.end(int(ended_s * 1e9))
        return self._exporter.taken
