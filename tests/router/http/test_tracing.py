"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from pdserve.contracts.request import FinishReason
from tests.router.edge_server import running_edge

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry (pip install 'pdserve[tracing]')")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pdserve[tracing]")

TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's URL and the spans that it received."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(
                span for group in message.resource_spans for scope in group.scope_spans for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receive)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_is_a_span_of_its_clients_trace_and_each_phase_a_part_of_it() -> None:
    from pdserve.router.http.tracing import Tracer

    with collector() as (url, spans), running_edge(sinks=[Tracer(url)]) as edge:
        num_tokens = edge.say("an answer", FinishReason.LENGTH)
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-Id": "client-7"}
        body = {"prompt": "secret prompt", "max_tokens": num_tokens}
        httpx.post(f"{edge.url}/v1/completions", json=body, headers=headers).raise_for_status()
        refused = httpx.post(f"{edge.url}/v1/completions", json={"prompt": "x", "max_tokens": "many"})
        assert refused.status_code == 400
    [root] = [span for span in spans if span.trace_id.hex() == TRACE and span.name == "POST /v1/completions"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["pdserve.request_id"].string_value == "client-7"
    assert attributes["pdserve.outcome"].string_value == "finished"
    assert attributes["pdserve.completion_tokens"].int_value == num_tokens
    phases = [span for span in spans if span.parent_span_id == root.span_id]
    assert [span.name for span in phases] == ["queue", "prefill"]
    lengths = [span.end_time_unix_nano - span.start_time_unix_nano for span in phases]
    assert lengths == pytest.approx([1e6, 2e6], abs=1e3)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano for span in phases)
    assert len([span for span in spans if span.name == "POST /v1/completions"]) == 2
    assert not any("secret" in str(span) for span in spans)
