"""Prometheus metrics: what the front door counts, and the engine's gauges read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "steps": "model forwards",
    "prompt_tokens": "prompt tokens taken in",
    "generated_tokens": "tokens generated",
    "cached_tokens": "prompt tokens served from the prefix cache",
    "preemptions": "sequences that gave their blocks back for a while",
    "adapter_loads": "adapters brought to the device",
    "adapter_evictions": "adapters taken off the device",
}
GAUGES = {
    "running": "sequences in the running batch",
    "waiting": "sequences queued",
    "blocks_total": "blocks of the pool",
    "blocks_free": "blocks that hold nothing",
    "blocks_used": "blocks of running sequences",
    "blocks_cached": "idle blocks of the prefix cache",
    "blocks_adapters": "blocks of adapters",
}
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


class Metrics:
    """Of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "heddle_http_requests", "HTTP calls", ["method", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "heddle_http_request_seconds",
            "From a call's arrival to its answer's last byte",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._first_token = Histogram(
            "heddle_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )

    def watch_engine(self, stats: Callable[[], Stats], restarts: Callable[[], int]) -> None:
        self._registry.register(_EngineCollector(stats, restarts))

    def count_call(self, method: str, status: int, seconds: float) -> None:
        self._requests.labels(method, str(status)).inc()
        self._seconds.observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def expose(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Stats], restarts: Callable[[], int]) -> None:
        self._stats = stats
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        values = msgspec.structs.asdict(self._stats())
        for name, help_text in COUNTERS.items():
            yield CounterMetricFamily(f"heddle_{name}", help_text.capitalize(), value=values[name])
        for name, help_text in GAUGES.items():
            yield GaugeMetricFamily(f"heddle_{name}", help_text.capitalize(), value=values[name])
        yield CounterMetricFamily(
            "heddle_engine_restarts", "Engine processes that died", value=self._restarts()
        )
