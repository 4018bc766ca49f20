"""`/metrics` over HTTP: what each kind of call changes, and that the documentation names everything there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from heddle.core.messages import AdapterState, EngineError, Stats
from prometheus_client.parser import text_string_to_metric_families

from .conftest import RunningServer

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: RunningServer) -> Values:
    text = server.client.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Change:
    """Of every value between two scrapes."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._before = scrape(server)

    def __call__(self, name: str, **labels: str) -> float:
        key = (f"heddle_{name}", frozenset(labels.items()))
        return scrape(self._server).get(key, 0) - self._before.get(key, 0)


@pytest.fixture
def change(server: RunningServer) -> Change:
    return Change(server)


def test_the_content_type_is_that_of_prometheus_text_format(server):
    assert server.client.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_request_is_in_every_count_it_belongs_to(server, change):
    server.engine.cached_tokens = 1
    server.complete(prompt=["ab", "cde"], n=2, adapter="a")
    assert change("tenant_requests_total", tenant="public") == 1
    assert change("tenant_prompt_tokens_total", tenant="public") == 5
    assert change("tenant_generated_tokens_total", tenant="public") == 4 * 7
    assert change("adapter_requests_total", tenant="public", adapter="a") == 1
    assert change("adapter_generated_tokens_total", tenant="public", adapter="a") == 4 * 7
    assert change("adapter_requests_total", tenant="public", adapter="b") == 0
    assert change("time_to_first_token_seconds_count") == 1
    assert change("inter_token_seconds_count") == 4 * 6
    assert change("request_seconds_count") == 1
    assert change("prefix_queries_total") == change("prefix_hits_total") == 4
    assert change("refused_requests_total", code="invalid_request") == 0
    assert change("aborted_requests_total") == 0


def test_a_request_on_the_base_alone_is_its_tenants_and_no_adapters(server, change):
    server.engine.cached_tokens = 0
    server.complete(stream=True)
    assert change("tenant_requests_total", tenant="public") == 1
    assert change("prefix_queries_total") == 1
    assert change("prefix_hits_total") == 0
    assert sum(v for (name, _), v in scrape(server).items() if name == "heddle_adapter_requests_total") == (
        sum(v for (name, _), v in change._before.items() if name == "heddle_adapter_requests_total")
    )


def test_an_adapter_that_is_named_twice_counts_once(server, change):
    weighted = [{"name": "a", "weight": 0.5}, {"name": "a@1", "weight": 0.5}, {"name": "b"}]
    assert server.complete(adapter=weighted).status_code == 200
    for adapter in "ab":
        assert change("adapter_requests_total", tenant="public", adapter=adapter) == 1
    assert change("tenant_requests_total", tenant="public") == 1


def test_inter_token_times_are_those_of_one_sequence(server, change):
    server.engine.delay = 0.03
    server.complete(prompt=["a", "b"], max_tokens=4)
    count = change("inter_token_seconds_count")
    assert count == 6
    assert 0.03 <= change("inter_token_seconds_sum") / count < 0.3
    assert change("time_to_first_token_seconds_sum") >= 0.03


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_counted_by_their_codes(server, change, stream):
    server.complete(n=0, stream=stream)
    server.complete(adapter="nobodys", stream=stream)
    server.engine.refusal = EngineError("overloaded", "full")
    server.complete(stream=stream)
    server.engine.refusal = None
    server.engine.fail_after = 2
    server.complete(stream=stream)
    server.client.get("/nowhere")
    assert change("refused_requests_total", code="invalid_request") == 2
    for code in ("model_not_found", "overloaded", "internal_error"):
        assert change("refused_requests_total", code=code) == 1
    assert change("tenant_requests_total", tenant="public") == 1, "the one that had begun"
    assert change("request_seconds_count") == 1


def test_keys_that_are_wrong_are_counted(base, serve, tmp_path):
    with serve(tmp_path, base, admin_key="k") as server:
        server.client.get("/v1/models")
        server.client.headers["authorization"] = "Bearer k"
        values = scrape(server)
        assert values["heddle_refused_requests_total", frozenset({("code", "invalid_api_key")})] == 1


def test_a_stream_that_is_cut_is_counted_as_aborted(server, change):
    server.engine.hang_after = 2
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        next(answer.iter_lines())
    server.wait_until(lambda: not server.engine.running and not server.state.in_flight)
    assert change("aborted_requests_total") == 1
    assert change("tenant_generated_tokens_total", tenant="public") == 2
    assert change("refused_requests_total", code="invalid_request") == 0, "it is no mistake of the client's"


def test_the_engines_state_is_read_at_each_scrape(server):
    stats, adapters, restarts = server.engine.stats, server.engine.adapters, server.engine.restarts
    ready = server.engine.ready
    try:
        server.engine.stats = Stats(
            running=3, waiting=4, blocks_total=64, blocks_used=10, blocks_cached=5, blocks_adapters=7,
            blocks_free=42, preemptions=2, cached_tokens=11, prompt_tokens=30, adapter_loads=6, adapter_evictions=1,
        )  # fmt: skip
        server.engine.adapters = {
            name: AdapterState(digest=name, residency=place, error=error)
            for name, place, error in [
                ("1", "device", None), ("2", "device", None), ("3", "host", None), ("4", "disk", "gone"),
            ]
        }  # fmt: skip
        server.engine.restarts = 5
        values = {(name, *sorted(labels)): value for (name, labels), value in scrape(server).items()}
        expected = {
            ("running",): 3, ("waiting",): 4, ("preemptions_total",): 2, ("cached_tokens_total",): 11,
            ("prompt_tokens_total",): 30, ("adapter_loads_total",): 6, ("adapter_evictions_total",): 1,
            ("engine_restarts_total",): 5, ("engine_up",): 1, ("adapters_failed",): 1,
            ("adapters", ("residency", "device")): 2, ("adapters", ("residency", "host")): 1,
            ("adapters", ("residency", "disk")): 1, ("pool_bytes", ("use", "used")): 10 * 4096,
            ("pool_bytes", ("use", "cached")): 5 * 4096, ("pool_bytes", ("use", "adapters")): 7 * 4096,
            ("pool_bytes", ("use", "free")): 42 * 4096,
        }  # fmt: skip
        for (name, *labels), value in expected.items():
            assert values[f"heddle_{name}", *labels] == value, name
        server.engine.ready = None
        assert scrape(server)["heddle_engine_up", frozenset()] == 0
    finally:
        server.engine.stats, server.engine.adapters, server.engine.restarts = stats, adapters, restarts
        server.engine.ready = ready


def test_while_the_engine_restarts_nothing_is_held_and_no_gauge_is_missing(server):
    """The client's own counts of that time are tested with the client."""
    ready, stats, pid = server.engine.ready, server.engine.stats, server.engine.pid
    before = scrape(server)
    gauges = ("heddle_weight_bytes", "heddle_bytes_per_weight", "heddle_host_budget_bytes")
    try:
        server.engine.ready, server.engine.pid = None, None
        server.engine.stats = Stats(blocks_total=64, blocks_free=64)
        values = scrape(server)
        assert values.keys() == before.keys()
        pool = {
            dict(labels)["use"]: value
            for (name, labels), value in values.items()
            if name == "heddle_pool_bytes"
        }
        assert pool == {"free": 64 * 4096, "used": 0, "cached": 0, "adapters": 0}
        assert values["heddle_resident_bytes", frozenset({("process", "engine")})] == 0
        fixed = {key: value for key, value in values.items() if key[0] in gauges}
        assert fixed
        assert fixed == {key: before[key] for key in fixed}
    finally:
        server.engine.ready, server.engine.stats, server.engine.pid = ready, stats, pid


def test_the_documentation_names_every_metric_with_its_kind_and_labels(server):
    server.complete(adapter="a")
    server.complete(n=0)
    rows = re.findall(r"^\| `(heddle_\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(documented) == len(rows), "each once"
    exposed = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels}
        exposed[family.name + suffix] = (family.type, frozenset(labels - {"le"}))
    assert exposed == documented
