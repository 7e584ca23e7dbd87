"""OpenTelemetry spans of requests: one for the request, and one for each phase on its way, as the router timed them.

Sent in batches, by a thread, to a collector that speaks OTLP over HTTP. Needs the extra ``pdserve[tracing]``.
"""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.router.record import RequestRecord

_propagator = TraceContextTextMapPropagator()


class Tracer:
    """Spans of one router."""

    def __init__(self, collector: str) -> None:
        """``collector``: URL without a path, such as ``http://127.0.0.1:4318``."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "pdserve"}),
            sampler=ParentBased(ALWAYS_ON),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=f"{collector.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve.router")

    def write(self, record: RequestRecord) -> None:
        """Emit the spans of a request that ends now."""
        now_s, now_ns = time.monotonic(), time.time_ns()

        def at_ns(time_s: float) -> int:
            return now_ns - round((now_s - time_s) * 1e9)

        root = self._tracer.start_span(
            f"POST {record.path}",
            context=_propagator.extract({"traceparent": record.traceparent}),
            kind=SpanKind.SERVER,
            start_time=at_ns(record.began_s),
            attributes={
                f"pdserve.{name}": value
                for name, value in record.line().items()
                if name not in ("time", "phases_s") and value is not None
            },
        )
        if record.status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(root)
        for number, journey in enumerate(record.first_journeys):
            for span in journey.spans:
                child = self._tracer.start_span(
                    span.phase,
                    context=context,
                    start_time=at_ns(span.end_s - span.seconds),
                    attributes={"pdserve.prompt": number},
                )
                child.end(at_ns(span.end_s))
        root.end(now_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
