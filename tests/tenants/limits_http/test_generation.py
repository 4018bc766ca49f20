"""Limits on generation over HTTP: what is refused, how it says so, and that nothing of it stays behind."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from heddle.core.messages import EngineError

from ..conftest import TenantServer
from .conftest import complete, limiter, refused, tenant

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_requests_of_a_minute_are_counted_over_n_and_prompts(world: TenantServer, name: str):
    client = tenant(world, name, requests_per_minute=10)
    assert complete(client, n=2, prompt=["a", "b"]).status_code == 200
    assert complete(client, best_of=3, n=1, prompt=[[1], [2]]).status_code == 200
    assert len(world.server.engine.commands) == 10
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        refused(client.post(path, json=body), "requests_per_minute", 10)
        refused(client.post(path, json={**body, "stream": True}), "requests_per_minute", 10)
    assert len(world.server.engine.commands) == 10, "nothing was done"


def test_a_refused_request_reaches_neither_registry_nor_tokenizer(
    world: TenantServer, name: str, monkeypatch: pytest.MonkeyPatch
):
    client = tenant(world, name, requests_per_minute=1)
    assert complete(client).status_code == 200
    services = world.server.state.services

    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("work for a request that is refused")

    monkeypatch.setattr(services.prompts, "of_completion", unreachable)
    monkeypatch.setattr(services.adapters, "hold", unreachable)
    for fields in ({}, {"adapter": "nobodys"}, {"prompt": "x" * 100_000}):
        refused(complete(client, **fields), "requests_per_minute", 1)


def test_sequences_under_way_are_limited_and_let_in_again_when_they_end(world: TenantServer, name: str):
    client = tenant(world, name, concurrent_requests=3)
    engine = world.server.engine
    engine.hang_after = 1
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(complete, client, n=2)
        world.server.wait_until(lambda: len(engine.running) == 2)
        refused(complete(client, n=2), "concurrent_requests", 3)
        two = pool.submit(complete, client, stream=True)
        world.server.wait_until(lambda: len(engine.running) == 3)
        refused(complete(client), "concurrent_requests", 3)
        world.server.loop.call_soon_threadsafe(engine.released.set)
        assert one.result().status_code == two.result().status_code == 200
    engine.hang_after = None
    for _ in range(5):
        assert complete(client, n=3).status_code == 200, "the last byte of an answer comes after its end"
        assert complete(client, n=3, stream=True).status_code == 200


@pytest.mark.parametrize("limit", ["concurrent_requests", "queued_requests"])
def test_a_request_that_could_never_be_let_in_is_not_told_to_come_again(
    world: TenantServer, name: str, limit: str
):
    client = tenant(world, name, **{limit: 3})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n": 4}, "n"),
        ({"prompt": ["a", "b"], "n": 2}, "n"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"best_of": 4, "n": 2}, "best_of"),
    ]
    for fields, param in wrong:
        for stream in (False, True) if "best_of" not in fields else (False,):
            answer = complete(client, stream=stream, **fields)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_request", param)
            assert f"{limit} = 3" in error["message"]
            assert "retry-after" not in answer.headers
    assert not world.server.engine.commands
    assert complete(client, n=3).status_code == 200


@pytest.mark.parametrize(
    ("call", "body"), [("tokenize", {"prompt": "hi"}), ("detokenize", {"tokens": [1, 2]})]
)
def test_tokenising_counts_among_the_requests_of_a_minute(
    world: TenantServer, name: str, call: str, body: dict[str, Any]
):
    name, path = f"{call}-minute", f"/{call}"
    client = tenant(world, name, requests_per_minute=3)
    for wrong in ({**body, "model": "nobodys"}, {"prompt": None, "tokens": [9999]}):
        assert client.post(path, json=wrong).status_code in (400, 404), "this costs nothing"
    assert client.post(path, json=body).status_code == 200
    assert client.post(f"/tenants/{name}{path}", json=body).status_code == 200
    assert complete(client).status_code == 200
    refused(client.post(path, json=body), "requests_per_minute", 3)
    refused(complete(client), "requests_per_minute", 3)
    assert world.admin.post(path, json=body).status_code == 200, "as public"


def test_clients_that_leave_give_back_what_they_held(world: TenantServer, name: str):
    client = tenant(world, name, concurrent_requests=2, tokens_per_minute=240)
    engine = world.server.engine
    engine.hang_after = 1
    key = client.headers["authorization"]
    for stream in (False, True) * 3:
        body = json.dumps({"prompt": "hi", "n": 2, "max_tokens": 100, "stream": stream}).encode()
        connection = socket.create_connection(("127.0.0.1", world.server._listener.getsockname()[1]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        world.server.wait_until(lambda: len(engine.running) == 2)
        connection.close()
        world.server.wait_until(lambda: not engine.running and not limiter(world).running(name))
    engine.hang_after = None
    # Six times two sequences, each with a prompt of two tokens and at most one of the answer.
    refused(complete(client, max_tokens=240), "tokens_per_minute", 240)
    assert complete(client, max_tokens=240 - 6 * 2 * (2 + 1) - 2).status_code == 200


def test_tokens_are_reserved_for_every_sequence_and_the_rest_given_back(world: TenantServer, name: str):
    client = tenant(world, name, tokens_per_minute=120)
    refused_at = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 28}
    assert complete(client, **refused_at).status_code == 200, "4 x (2 + 28) is all of it"
    # Each answer is `hello` and its end: 6 tokens, behind 2 of the prompt.
    refused(complete(client, max_tokens=120 - 4 * 8 - 1), "tokens_per_minute", 120)
    assert complete(client, max_tokens=120 - 4 * 8 - 2).status_code == 200
    refused(complete(client, max_tokens=120 - 5 * 8 - 1), "tokens_per_minute", 120)


def test_what_nobody_asked_for_is_not_reserved_but_used(world: TenantServer, name: str):
    client = tenant(world, name, tokens_per_minute=20)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    prompt = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}).json()["usage"][
        "prompt_tokens"
    ]
    assert prompt == 5
    used = 5 + 6 + 5 + 1
    refused(complete(client, prompt="abc", max_tokens=1), "tokens_per_minute", 20)
    assert complete(client, prompt="abc").status_code == 200, f"{used} and 3 are there for the prompt"
    refused(complete(client, prompt="a"), "tokens_per_minute", 20)


@pytest.mark.parametrize("stream", [False, True])
def test_failed_requests_leave_the_books_balanced(world: TenantServer, name: str, stream: bool):
    client = tenant(world, name, requests_per_minute=4, concurrent_requests=2, tokens_per_minute=40)
    engine = world.server.engine
    wrong: list[dict[str, Any]] = [
        {"adapter": "nobodys"}, {"prompt": ""}, {"prompt": [99999]}, {"temperature": 9}, {"prompt": "x" * 400},
    ]  # fmt: skip
    for fields in wrong * 3:
        assert complete(client, stream=stream, **{"max_tokens": 30, **fields}).status_code in (400, 404)
    engine.refusal = EngineError("overloaded", "full")
    for _ in range(6):
        assert complete(client, stream=stream, max_tokens=30).status_code == 503
    engine.refusal = None
    engine.fail_after = 3
    assert complete(client, stream=stream, max_tokens=30, n=2, prompt="x").status_code in (200, 500)
    engine.fail_after = None
    assert limiter(world).running(name) == 0
    assert complete(client, n=2, prompt="x", max_tokens=10).status_code == 200, "2 of 4 requests are left"
    refused(complete(client, prompt="x", max_tokens=1), "requests_per_minute", 4)


def test_a_prompt_longer_than_what_is_left_is_refused_once_it_is_known(world: TenantServer, name: str):
    client = tenant(world, name, tokens_per_minute=50, requests_per_minute=3)
    assert complete(client, prompt="x" * 30).status_code == 200
    for _ in range(5):
        refused(complete(client, prompt="x" * 30), "tokens_per_minute", 50)
    assert complete(client, prompt="x").status_code == 200


def test_answers_longer_than_the_tenants_are_refused_and_unasked_ones_cut(world: TenantServer, name: str):
    client = tenant(world, name, max_tokens=3)
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        for field in ("max_tokens", "max_completion_tokens"):
            answer = client.post(path, json={**body, field: 4})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_request", field)
            assert "max_tokens = 3" in error["message"]
            assert client.post(path, json={**body, field: 3}).status_code == 200
        whole = client.post(path, json=body).json()
        assert whole["usage"]["completion_tokens"] == 3
        assert whole["choices"][0]["finish_reason"] == "length"
        assert client.post(path, json={**body, "min_tokens": 4}).json()["error"]["param"] == "min_tokens"


def test_limits_hold_from_the_moment_they_are_patched(world: TenantServer, name: str):
    client = tenant(world, name)
    for _ in range(3):
        assert complete(client).status_code == 200
    path = f"/tenants/{name}"
    assert world.admin.patch(path, json={"limits": {"requests_per_minute": 1}}).status_code == 200
    assert complete(client).status_code == 200
    refused(complete(client), "requests_per_minute", 1)
    assert world.admin.patch(path, json={"limits": {"requests_per_minute": None}}).status_code == 200
    assert complete(client).status_code == 200


def test_the_admin_inside_a_tenant_is_held_to_its_limits(world: TenantServer, name: str):
    tenant(world, name, requests_per_minute=1)
    for status in (200, 429):
        answer = world.admin.post(f"/tenants/{name}/v1/completions", json={"prompt": "x"})
        assert answer.status_code == status
    assert complete(world.admin).status_code == 200, "as public"


def test_the_engines_own_limit_is_a_429_too(world: TenantServer, name: str):
    client = tenant(world, name, queued_requests=1)
    message = "the limit queued_requests = 1 of this tenant is reached"
    world.server.engine.refusal = EngineError("rate_limit_exceeded", message)
    refused(complete(client), "queued_requests", 1)
    assert limiter(world).running(name) == 0


def test_two_hundred_refused_at_once_leave_others_and_the_books_alone(world: TenantServer, name: str):
    flooding, quiet = tenant(world, name, requests_per_minute=2), tenant(world, f"{name}-quiet")
    with ThreadPoolExecutor(8) as pool:
        flood = [pool.submit(complete, flooding) for _ in range(200)]
        assert complete(quiet).status_code == 200
        statuses = [answer.result().status_code for answer in flood]
    assert sorted(statuses) == [200] * 2 + [429] * 198
    assert len(world.server.engine.commands) == 3
