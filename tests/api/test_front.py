"""The front door: routing, ids, keys, phases, metrics."""

from __future__ import annotations

import re

import psutil
import pytest
from heddle.api.config import ServerConfig
from heddle.api.errors import STATUS, ApiError
from heddle.api.state import Phase
from heddle.api.tenants.auth import Authenticator, is_loopback
from heddle.core.config import EngineConfig

CALLS = [
    ("GET", "/adapters"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/a"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/admin/memory"),
    ("GET", "/nowhere"),
    ("PUT", "/v1/models"),
]


def test_health_and_ready(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/adapters/a/b/c", 404),
        ("GET", "/adapters/%2e%2e/x", 404),
        ("GET", "/%00", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/adapters", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_paths_and_methods_that_are_none(server, method, path, status):
    answer = server.client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_request",
        "invalid_request_error",
        None,
    )
    assert method in error["message"]
    if status == 405:
        assert "allow" in answer.headers


def test_every_answer_has_a_request_id(server):
    given = server.client.get("/health", headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    for path in ("/health", "/nowhere", "/v1/models"):
        assert re.fullmatch("req-[0-9a-f]{32}", server.client.get(path).headers["x-request-id"])
    odd = server.client.get("/health", headers={"x-request-id": "a b\tc"})
    assert odd.headers["x-request-id"].startswith("req-")
    assert server.complete(stream=True).headers["x-request-id"].startswith("req-")


def test_a_name_of_a_hundred_thousand_characters_is_not_repeated_whole(server):
    answer = server.client.post("/v1/completions", json={"model": "x" * 100_000, "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(answer.content) < 5000


def test_every_code_has_its_status():
    expected = {
        400: ["invalid_request", "adapter_invalid", "context_length_exceeded", "capacity_exceeded"],
        401: ["invalid_api_key"],
        403: ["permission_denied"],
        404: ["model_not_found", "adapter_not_found", "tenant_not_found"],
        409: ["adapter_exists", "adapter_in_use", "tenant_exists", "pin_limit"],
        413: ["body_too_large"],
        429: ["rate_limit_exceeded"],
        500: ["internal_error"],
        503: ["overloaded", "shutting_down", "adapter_cold", "adapter_failed"],
    }
    assert {code: status for status, codes in expected.items() for code in codes} == STATUS


def test_with_a_key_every_call_needs_it(base, serve, sources, tmp_path):
    with serve(tmp_path, base, adapter_roots=(sources,), admin_key="s3cret") as server:
        for path in ("/health", "/ready"):
            assert server.client.get(path).status_code == 200
        wrong = [
            None,
            "s3cret",
            "Bearer",
            "Bearer s3cre",
            "Bearer S3cret",
            "Basic s3cret",
            "Bearer é",
        ]
        for method, path in [*CALLS, ("GET", "/metrics")]:
            for value in wrong:
                headers = {} if value is None else {"authorization": value.encode()}
                answer = server.client.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, value)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for value in ("Bearer s3cret", "bearer s3cret"):
            server.client.headers["authorization"] = value
            assert server.client.get("/v1/models").status_code == 200
            assert server.client.get("/metrics").status_code == 200
            assert server.client.get("/nowhere").status_code == 404
        # A key is as good as its holder: where it is needed, a web page cannot use someone else's browser.
        assert server.client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "host", "alone", "anyone"),
    [
        (None, None, True, True),
        (None, "127.0.0.1:8000", True, True),
        (None, "localhost", True, True),
        (None, "[::1]:8000", True, True),
        (None, "evil.example:8000", False, True),
        (None, "93.184.215.14", False, True),
        (None, "[2001:db8::1]:80", False, True),
        (None, "heddle:8000", True, True),
        (None, "printer.local", True, True),
        (None, "[broken", False, True),
        ("http://localhost:3000", "127.0.0.1:8000", True, True),
        ("http://127.0.0.1", "127.0.0.1:8000", True, True),
        ("http://[::1]:99", "x", True, True),
        ("http://models.lan", "models.lan:8000", False, True),
        ("https://evil.example", "127.0.0.1:8000", False, False),
        ("https://localhost.evil.example", "localhost", False, False),
        ("null", "localhost", False, False),
        ("http://[broken", "[broken", False, False),
    ],
)
def test_without_a_key_foreign_web_pages_are_refused(origin, host, alone, anyone):
    """`alone`: on a server of this machine's own; `anyone`: on one that was opened to all."""
    for authenticator, allowed in ((Authenticator(None), alone), (Authenticator(None, anyone=True), anyone)):
        if allowed:
            assert authenticator.authenticate(None, origin, host).is_admin
        else:
            with pytest.raises(ApiError) as caught:
                authenticator.authenticate(None, origin, host)
            assert caught.value.code == "permission_denied"


@pytest.mark.parametrize(
    ("host", "settings", "fine"),
    [
        ("127.0.0.1", {}, True),
        ("localhost", {}, True),
        ("::1", {}, True),
        ("127.8.8.8", {}, True),
        ("0.0.0.0", {}, False),
        ("::", {}, False),
        ("192.168.1.5", {}, False),
        ("models.example", {}, False),
        ("0.0.0.0", {"admin_key": "k"}, True),
        ("0.0.0.0", {"allow_anonymous": True}, True),
        ("127.0.0.1", {"admin_key": "  "}, False),
    ],
)
def test_who_may_listen_where(host, settings, fine):
    config = ServerConfig(engine=EngineConfig(model="m"), host=host, **settings)
    assert (config.problem() is None) == fine


def test_loopback_names():
    assert is_loopback("app.localhost")
    assert not is_loopback("localhost.example")
    assert not is_loopback("")


@pytest.mark.parametrize(
    ("phase", "code"), [(Phase.LOADING, "overloaded"), (Phase.DRAINING, "shutting_down")]
)
def test_while_loading_and_draining_calls_are_turned_away(server, phase, code):
    server.state.phase = phase
    try:
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        answer = server.client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        for method, path in CALLS:
            answer = server.client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
            assert int(answer.headers["retry-after"]) > 0
    finally:
        server.state.phase = Phase.SERVING


def test_ready_says_no_while_the_engine_restarts(server):
    ready, server.engine.ready = server.engine.ready, None
    try:
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/adapters").status_code == 200
    finally:
        server.engine.ready = ready


def test_metrics(server):
    server.complete()
    text = server.client.get("/metrics").text
    for name in (
        'heddle_http_requests_total{method="POST",status="200"}',
        "heddle_http_request_seconds_count",
        "heddle_time_to_first_token_seconds_count",
        "heddle_blocks_total 0.0",
        "heddle_generated_tokens_total 0.0",
        "heddle_engine_restarts_total 0.0",
        'heddle_weight_bytes{part="projections"} 101.0',
        'heddle_bytes_per_weight{part="projections"} 1.01',
        'heddle_bytes_per_weight{part="head"} 1.91',
        'heddle_pool_bytes{use="cached"} 0.0',
        'heddle_host_budget_bytes{part="adapter copies"} 5000.0',
        "heddle_host_copy_bytes 0.0",
    ):
        assert name in text
    assert 'heddle_bytes_per_weight{part="rotary tables"}' not in text, "they are no weights"
    for process in ("server", "engine"):
        (line,) = [
            x for x in text.splitlines() if x.startswith(f'heddle_resident_bytes{{process="{process}"}}')
        ]
        own = psutil.Process().memory_info().rss
        assert 0.5 * own < float(line.split()[-1]) < 2 * own, "the stand-in lives in this process"


def test_memory(server):
    report = server.client.get("/admin/memory").json()
    assert report["weights"][0] == {
        "part": "projections", "bytes": 101, "weights": 100, "bytes_per_weight": 1.01
    }  # fmt: skip
    assert report["host"] == [{"part": "adapter copies", "bytes": 0, "budget": 5000}]
    for name in ("weight", "pool", "process"):
        parts = report["weights" if name == "weight" else name]
        assert sum(part["bytes"] for part in parts) == report[f"{name}_bytes"]


def test_an_unforeseen_error_is_a_500_that_tells_nothing(server, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.state.services.prompts._tokenizer, "encode", broken)
    answer = server.complete()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
