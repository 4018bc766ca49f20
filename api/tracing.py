"""OpenTelemetry, where its packages are installed and an endpoint is set: one span a completion or chat.

The attributes are those of OpenTelemetry's conventions for generative AI, and `heddle.*`. Prompts, answers and keys
are never in them. Without an endpoint nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import structlog

from .http.calls import Call, Generated

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What `pip install 'heddle-serve[opentelemetry]'` brings."""


def from_environment() -> Tracing | None:
    """Tracing to the endpoint of OTEL_EXPORTER_OTLP_ENDPOINT; None where none is set or the packages are missing."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    if not all(_installed(package) for package in PACKAGES):
        logger.warning("no traces: OpenTelemetry is not installed", install="heddle-serve[opentelemetry]")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: "heddle"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes spans of calls that are over, so that nothing of it is in a request's way."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("heddle")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Call) -> None:
        """One span from the call's arrival to now, a child of the caller's where it sent a `traceparent`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        generated = call.generated
        if generated is None:
            return
        sent = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        parent = self._propagator.extract({name: value for name, value in sent.items() if value is not None})
        span = self._tracer.start_span(
            f"{generated.operation} {generated.model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(call, generated),
            start_time=call.began_at,
        )
        if call.code is not None:
            span.set_attribute("error.type", call.code)
            if call.status >= 500 or call.status == 200:
                span.set_status(Status(StatusCode.ERROR))
        span.end(call.began_at + round(call.seconds * 1e9))

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def _attributes(call: Call, generated: Generated) -> dict[str, Any]:
    """Those that are known."""
    labels = generated.adapter
    attributes = {
        "gen_ai.operation.name": generated.operation,
        "gen_ai.provider.name": "heddle",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": generated.model,
        "gen_ai.request.max_tokens": generated.max_tokens,
        "gen_ai.request.temperature": generated.temperature,
        "gen_ai.request.top_p": generated.top_p,
        "gen_ai.request.choice.count": generated.sequences if generated.sequences > 1 else None,
        "gen_ai.response.id": generated.answer_id,
        "gen_ai.response.model": generated.model,
        "gen_ai.response.finish_reasons": generated.finish_reasons or None,
        "gen_ai.usage.input_tokens": generated.prompt_tokens,
        "gen_ai.usage.output_tokens": generated.completion_tokens,
        "gen_ai.response.time_to_first_chunk": generated.first_token_after,
        "http.request.method": call.method,
        "http.response.status_code": call.status,
        "heddle.request_id": call.request_id,
        "heddle.tenant": call.tenant,
        "heddle.adapter": [labels] if isinstance(labels, str) else labels,
        "heddle.cached_tokens": generated.cached_tokens,
        "heddle.aborted": True if call.left else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
