"""`GET /tenants/{t}/usage`: what is counted, where, and that no end of a server loses it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from heddle.api.adapters import service as adapter_service
from heddle.core.messages import EngineError

from ..api.forked_server import ForkedServer, Forks
from .conftest import ADMIN_KEY, TenantServer, with_tenants

COUNTERS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens")


def usage(server: TenantServer, tenant: str) -> dict[str, Any]:
    answer = server.admin.get(f"/tenants/{tenant}/usage")
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_adapter(found: dict[str, Any]) -> dict[tuple[str | None, str | None], list[int]]:
    return {(one["tenant"], one["adapter"]): [one[name] for name in COUNTERS] for one in found["by_adapter"]}


def test_a_tenants_requests_are_counted_in_all_and_by_adapter(tenants: TenantServer):
    engine = tenants.server.engine
    acme, other = tenants.tenant("acme"), tenants.tenant("other")
    assert usage(tenants, "acme") == {
        "tenant": "acme", "requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0,
        "last_used_at": None, "adapters": 0, "adapter_bytes": 0, "by_adapter": [],
    }  # fmt: skip
    tenants.admin.post("/adapters", json={"name": "shared", "source": "a"})
    size = acme.post("/adapters", json={"name": "own", "source": "b"}).json()["size_bytes"]
    acme.post("/adapters", json={"name": "own", "source": "c", "replace": True})
    engine.cached_tokens = 1
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert acme.post("/v1/completions", json={"prompt": ["ab", "cde"], "n": 2}).status_code == 200
    assert (
        acme.post("/v1/chat/completions", json={**chat, "adapter": "own", "stream": True}).status_code == 200
    )
    assert acme.post("/v1/completions", json={"prompt": "x", "model": "own@1"}).status_code == 200
    both = [{"name": "own"}, {"name": "shared"}, {"name": "own", "weight": 0.5}]
    assert acme.post("/v1/completions", json={"prompt": "xyz", "adapter": both}).status_code == 200
    assert other.post("/v1/completions", json={"prompt": "x", "adapter": "shared"}).status_code == 200
    found = usage(tenants, "acme")
    # Answers: `hello` and its end, behind a letter for each adapter.
    assert [found[name] for name in COUNTERS] == [4, 5 + 5 + 1 + 3, 24 + 2 + 7 + 8, 2 + 1 + 1 + 1]
    assert by_adapter(found) == {
        (None, None): [1, 5, 24, 2],
        ("acme", "own"): [3, 9, 17, 3],
        ("public", "shared"): [1, 3, 8, 1],
    }
    assert (found["adapters"], found["adapter_bytes"]) == (1, 2 * size)
    assert found["last_used_at"] is not None
    assert by_adapter(usage(tenants, "other")) == {("public", "shared"): [1, 1, 7, 1]}
    assert usage(tenants, "public")["requests"] == 0
    assert tenants.admin.get("/adapters/shared").json()["requests"] == 2, "whoever used it"
    acme.delete("/adapters/own")
    after = usage(tenants, "acme")
    assert by_adapter(after) == by_adapter(found)
    assert (after["adapters"], after["adapter_bytes"]) == (0, 0)
    assert acme.get("/tenants/acme/usage").json() == after, "a tenant sees its own"


def test_what_brought_nothing_is_not_counted_and_what_was_cut_is_with_what_it_had(tenants: TenantServer):
    engine, acme = tenants.server.engine, tenants.tenant("acme")
    acme.post("/v1/completions", json={"prompt": "x", "n": 0})
    acme.post("/v1/completions", json={"prompt": "x", "adapter": "nobodys"})
    engine.refusal = EngineError("overloaded", "full")
    acme.post("/v1/completions", json={"prompt": "x"})
    engine.reset()
    assert usage(tenants, "acme")["requests"] == 0
    engine.fail_after = 3
    assert acme.post("/v1/completions", json={"prompt": "xy"}).status_code == 500
    engine.fail_after, engine.hang_after = None, 4
    with acme.stream("POST", "/v1/completions", json={"prompt": "xyz", "stream": True}) as answer:
        lines = answer.iter_lines()
        while "l" not in next(lines):
            pass
    tenants.server.wait_until(lambda: not engine.running and not tenants.server.state.in_flight)
    found = usage(tenants, "acme")
    assert (found["requests"], found["prompt_tokens"]) == (2, 5)
    assert found["completion_tokens"] in (3 + 3, 3 + 4)


def test_usage_survives_a_restart_and_goes_with_its_tenant(base: Path, sources: Path, tmp_path: Path):
    for expected in (1, 2):
        with with_tenants(tmp_path, base, adapter_roots=(sources,)) as server:
            client = server.tenant("acme") if expected == 1 else server.as_(server.key("acme")["key"])
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            if expected == 2:
                assert usage(server, "acme")["requests"] == 2
                assert server.admin.delete("/tenants/acme").status_code == 204
                server.tenant("acme")
                assert usage(server, "acme")["requests"] == 0


def test_two_servers_of_one_registry_add_up(base: Path, sources: Path, tmp_path: Path):
    database = f"sqlite:///{tmp_path}/shared.sqlite"
    with (
        with_tenants(tmp_path / "1", base, database=database, adapter_roots=(sources,)) as one,
        with_tenants(tmp_path / "2", base, database=database, adapter_roots=(sources,)) as two,
    ):
        key = one.tenant("acme").headers["authorization"].removeprefix("Bearer ")
        two.server.wait_until(lambda: two.as_(key).get("/v1/models").status_code == 200)
        clients = [one.as_(key), two.as_(key)]

        def work(number: int) -> None:
            for _ in range(5):
                assert clients[number % 2].post("/v1/completions", json={"prompt": "xy"}).status_code == 200
                usage((one, two)[number % 2], "acme")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        for server in (one, two):
            found = usage(server, "acme")
            assert [found[name] for name in COUNTERS] == [20, 40, 120, 0]
            assert by_adapter(found) == {(None, None): [20, 40, 120, 0]}


def test_usage_is_written_every_few_seconds_without_being_asked_for(
    base: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert adapter_service.FLUSH_SECONDS <= 10
    monkeypatch.setattr(adapter_service, "FLUSH_SECONDS", 0.05)
    database = f"sqlite:///{tmp_path}/shared.sqlite"
    with with_tenants(tmp_path / "1", base, database=database) as one:
        assert one.admin.post("/v1/completions", json={"prompt": "xy"}).status_code == 200
        with with_tenants(tmp_path / "2", base, database=database) as two:
            one.server.wait_until(lambda: usage(two, "public")["requests"] == 1)


@pytest.fixture
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def test_sigterm_writes_the_usage_of_requests_that_finish_while_the_server_drains(
    forks: Forks, base: Path, tmp_path: Path
):
    def start() -> ForkedServer:
        server = ForkedServer(
            forks,
            engine={"model": str(base)},
            served_model_name="tiny",
            data_dir=tmp_path,
            admin_key=ADMIN_KEY,
        )
        server.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        server.until_ready()
        return server

    server = start()
    assert server.complete().status_code == 200
    body = {"prompt": ["hi"] * 4, "n": 100, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(server._pid, signal.SIGTERM)
        other = httpx.Client(base_url=server.url, headers=server.client.headers)
        while other.get("/ready").status_code == 200:  # until the signal has arrived
            pass
        for _ in range(2):
            answer = other.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        metrics = other.get("/metrics").text
        by_ready_and_both = 'heddle_refused_requests_total{code="shutting_down"} 3.0'
        assert by_ready_and_both in metrics
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    while forks.hear() != "ended":
        pass
    server.client.close()
    again = start()
    try:
        found = again.client.get("/tenants/public/usage").json()
        assert [found[name] for name in COUNTERS] == [2, 2 + 4 * 2, 6 + 4 * 100 * 200, 0]
    finally:
        again.kill()
