"""Prometheus metrics: what the front door and the requests count, and the engine's gauges read at each scrape."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from ...core.client import EngineClient
from .engine import EngineCollector
from .ranked import RankedCounters
from .series import Counts, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4"
"""Prometheus' text format; the framework adds the charset."""

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """Of one server. Belongs to the event loop."""

    def __init__(self) -> None:
        self._calls = Counts("heddle_http_requests", "HTTP calls", ["method", "status"])
        self._refused = Counts(
            "heddle_refused_requests", "Calls that ended with an error, by its code", ["code"]
        )
        self._aborted = Counts(
            "heddle_aborted_requests",
            "Completions and chats cut before their end: the client left, or their time was over",
        )
        self._http_seconds = Histogram(
            "heddle_http_request_seconds", "From a call's arrival to its answer's last byte", SECONDS
        )
        self._request_seconds = Histogram(
            "heddle_request_seconds", "From the arrival of a completion or chat to its last token", SECONDS
        )
        self._first_token = Histogram(
            "heddle_time_to_first_token_seconds", "From a request's arrival to its first token", SECONDS
        )
        self._inter_token = Histogram(
            "heddle_inter_token_seconds", "From one token of a sequence to its next", TOKEN_SECONDS
        )
        self._loop_lag = Histogram(
            "heddle_event_loop_lag_seconds", "By how much the event loop came late to a timer", LAG_SECONDS
        )
        self._prefix_queries = Counts(
            "heddle_prefix_queries", "Sequences whose prompt was looked up in the prefix cache"
        )
        self._prefix_hits = Counts(
            "heddle_prefix_hits", "Of these, sequences that found a beginning of theirs there"
        )
        self._tenants = RankedCounters(
            {
                "heddle_tenant_requests": "Completions and chats of a tenant",
                "heddle_tenant_prompt_tokens": "Their prompt tokens",
                "heddle_tenant_generated_tokens": "Their generated tokens",
            },
            ["tenant"],
        )
        self._adapters = RankedCounters(
            {
                "heddle_adapter_requests": "Completions and chats on an adapter, whose label `tenant` is its owner",
                "heddle_adapter_prompt_tokens": "Their prompt tokens",
                "heddle_adapter_generated_tokens": "Their generated tokens",
            },
            ["tenant", "adapter"],
        )
        self._registry = CollectorRegistry()
        every: tuple[Collector, ...] = (
            self._calls,
            self._refused,
            self._aborted,
            self._http_seconds,
            self._request_seconds,
            self._first_token,
            self._inter_token,
            self._loop_lag,
            self._prefix_queries,
            self._prefix_hits,
            self._tenants,
            self._adapters,
        )
        for series in every:
            self._registry.register(series)

    def watch_engine(self, engine: EngineClient) -> None:
        self._registry.register(EngineCollector(engine))

    def count_call(self, method: str, status: int, seconds: float, code: str | None = None) -> None:
        """An HTTP call is over; `code`: of the error it ended with."""
        self._calls.add(method, str(status))
        self._http_seconds.observe(seconds)
        if code is not None:
            self._refused.add(code)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_token(self, seconds: float) -> None:
        """Since the same sequence's token before it."""
        self._inter_token.observe(seconds)

    def observe_loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def count_prefixes(self, queries: int, hits: int) -> None:
        self._prefix_queries.add(amount=queries)
        self._prefix_hits.add(amount=hits)

    def count_end(self, seconds: float) -> None:
        """A completion or chat that brought a token is over, at its end or before."""
        self._request_seconds.observe(seconds)

    def count_cut(self) -> None:
        """A completion or chat was cut before its end, whether it had brought a token or not."""
        self._aborted.add()

    def count_use(
        self, tenant: str, adapters: Sequence[tuple[str, str]], prompt_tokens: int, generated_tokens: int
    ) -> None:
        """What a completion or chat of `tenant` used, on these adapters (owner, name)."""
        amounts = (1, prompt_tokens, generated_tokens)
        self._tenants.count((tenant,), amounts)
        for adapter in adapters:
            self._adapters.count(adapter, amounts)

    def expose(self) -> bytes:
        return generate_latest(self._registry)
