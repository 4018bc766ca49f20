"""Traces: a span a completion or chat, in the caller's trace; and nothing at all where nobody asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from heddle.api.tracing import Tracing, from_environment
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

SECRET = "the prompt nobody may read"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def exporter(server) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.state.tracing = Tracing(provider)
    yield exporter
    server.state.tracing = None


def span(server, exporter: InMemorySpanExporter) -> ReadableSpan:
    server.wait_until(lambda: len(exporter.get_finished_spans()) == 1)
    (found,) = exporter.get_finished_spans()
    assert SECRET not in found.to_json()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_a_span_with_the_attributes_of_the_conventions(server, exporter, stream):
    server.engine.cached_tokens = 4
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "mine"}
    before = time.time_ns()
    body = {
        **CHAT,
        "adapter": "a",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stream": stream,
    }
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
    found = span(server, exporter)
    assert found.name == "chat tiny"
    assert found.kind is SpanKind.SERVER
    assert format(found.context.trace_id, "032x") == trace
    assert format(found.parent.span_id, "016x") == parent
    assert before <= found.start_time < found.end_time <= time.time_ns() + 10**9
    attributes = dict(found.attributes)
    first_token = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_token <= (found.end_time - found.start_time) / 1e9
    identity = attributes.pop("gen_ai.response.id")
    assert identity.startswith("chatcmpl-")
    assert identity in answer.text
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "heddle", "gen_ai.output.type": "text",
        "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny", "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"), "gen_ai.usage.input_tokens": 3 + len(SECRET),
        "gen_ai.usage.output_tokens": 8, "http.request.method": "POST", "http.response.status_code": 200,
        "heddle.request_id": "mine", "heddle.tenant": "public", "heddle.adapter": ("a@1",), "heddle.cached_tokens": 4,
    }  # fmt: skip
    assert found.status.status_code is StatusCode.UNSET


def test_without_a_traceparent_it_begins_a_trace(server, exporter):
    server.client.post("/v1/completions", json={"prompt": SECRET}, headers={"traceparent": "rubbish"})
    found = span(server, exporter)
    assert found.parent is None
    assert found.name == "text_completion tiny"
    assert found.attributes["gen_ai.usage.input_tokens"] == len(SECRET)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_marked(server, exporter, stream):
    server.engine.fail_after = 2
    server.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    found = span(server, exporter)
    assert found.attributes["error.type"] == "internal_error"
    assert found.status.status_code is StatusCode.ERROR
    assert found.attributes["gen_ai.usage.output_tokens"] == 2


def test_other_calls_make_no_spans(server, exporter):
    server.client.get("/v1/models")
    server.client.post("/v1/completions", json={"prompt": "x", "adapter": "nobodys"})
    server.client.post("/v1/completions", json={"prompt": "x"})
    assert span(server, exporter).attributes["http.response.status_code"] == 200


def test_spans_reach_the_endpoint_of_the_environment(monkeypatch):
    """By OTLP over HTTP, at the latest when tracing is closed."""
    from heddle.api.http.calls import Call, Generated

    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=testing")
    try:
        tracing = from_environment()
        assert tracing is not None
        generated = Generated("chat", "tiny", None, "chatcmpl-1", False, 1, 5, 1.0, 1.0)
        tracing.record(Call("req-77", "POST", "/v1/chat/completions", status=200, generated=generated))
        tracing.close()
    finally:
        collector.shutdown()
        collector.server_close()
    ((path, body),) = received
    assert path == "/v1/traces"
    for text in (b"chat tiny", b"req-77", b"heddle", b"deployment.environment.name"):
        assert text in body


def loaded(**environment: str) -> str:
    """What a server's start says of tracing, and whether OpenTelemetry was imported."""
    script = (
        "import sys, heddle.api.server; from heddle.api.tracing import from_environment; "
        "print(from_environment() is not None, 'opentelemetry' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported():
    assert loaded() == "False False"


def test_with_an_endpoint_it_is():
    assert loaded(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:1/v1/traces") == "True True"


def test_with_an_endpoint_and_without_the_packages_the_server_starts_and_says_so(monkeypatch):
    from heddle.api import tracing
    from structlog.testing import capture_logs

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry_that_is.not_there",))
    with capture_logs() as logs:
        assert from_environment() is None
    assert logs[0]["install"] == "heddle-serve[opentelemetry]"
