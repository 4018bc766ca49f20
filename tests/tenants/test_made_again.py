"""A tenant that is removed and made again under its name is another one, also while requests of the first go on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from .conftest import TenantServer

STREAM = {"prompt": "hi", "max_tokens": 4, "stream": True}


@contextmanager
def begun(client: httpx.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """A stream that has brought its first token; the rest of it."""
    with client.stream("POST", "/v1/completions", json={**STREAM, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def made_again(tenants: TenantServer, name: str, **fields: Any) -> httpx.Client:
    """Another tenant of that name, and a client with a key of it."""
    assert tenants.admin.delete(f"/tenants/{name}").status_code == 204
    return tenants.tenant(name, **fields)


def release(tenants: TenantServer) -> None:
    tenants.server.loop.call_soon_threadsafe(tenants.server.engine.released.set)


def usage(tenants: TenantServer, name: str) -> tuple[int, int, int]:
    found = tenants.admin.get(f"/tenants/{name}/usage").json()
    return found["requests"], found["prompt_tokens"], found["completion_tokens"]


def test_requests_of_the_removed_tenant_take_nothing_of_the_new_ones_concurrency(tenants: TenantServer):
    limits = {"concurrent_requests": 1, "requests_per_minute": 1, "tokens_per_minute": 6}
    tenants.server.engine.hang_after = 1
    with begun(tenants.tenant("a", limits=limits)) as old:
        client = made_again(tenants, "a", limits=limits)
        with begun(client) as new:
            refused = client.post("/v1/completions", json=STREAM)
            assert refused.status_code == 429
            assert "concurrent_requests = 1" in refused.json()["error"]["message"]
            assert "#" not in refused.text
            release(tenants)
            for lines in (old, new):
                assert [line for line in lines if line][-1] == "data: [DONE]"


def test_what_the_removed_tenants_requests_used_is_not_booked_to_the_new_one(tenants: TenantServer):
    tenants.server.engine.hang_after = 1
    with begun(tenants.tenant("a")) as old:
        client = made_again(tenants, "a")
        with begun(client, max_tokens=2) as new:
            release(tenants)
            for lines in (old, new):
                list(lines)
    assert usage(tenants, "a") == (1, 2, 2), "its own"
    assert client.post("/v1/completions", json={"prompt": "hey", "max_tokens": 3}).status_code == 200
    assert usage(tenants, "a") == (2, 5, 5)
    metrics = tenants.admin.get("/metrics").text
    assert 'heddle_tenant_requests_total{tenant="a"} 3.0' in metrics, (
        "labelled by the name, of all it ever meant"
    )


def test_the_engine_tells_the_two_apart(tenants: TenantServer):
    """By what it is told it keeps their cached prefixes, their queues and their shares."""
    engine = tenants.server.engine
    engine.hang_after = 1
    with begun(tenants.tenant("a", weight=2)) as old:
        client = made_again(tenants, "a", weight=3)
        with begun(client) as new:
            release(tenants)
            for lines in (old, new):
                list(lines)
    before, after = [command.tenant for command in engine.commands]
    assert before != after
    assert before not in engine.tenants
    assert engine.tenants[after].weight == 3
    assert tenants.admin.patch("/tenants/a", json={"weight": 4}).status_code == 200
    assert engine.tenants[after].weight == 4, "a changed tenant stays the same one"
    client.post("/v1/completions", json={"prompt": "hi"})
    tenants.admin.post("/tenants/a/v1/completions", json={"prompt": "hi"})
    assert [command.tenant for command in engine.commands[2:]] == [after, after]


def answer_to(
    tenants: TenantServer, client: httpx.Client, path: str, body: bytes
) -> tuple[int, dict[str, Any]]:
    """To a call of `client` whose body arrives in two parts; in between its tenant is removed and made again."""
    state = tenants.server.state
    tenants.server.wait_until(lambda: state.in_flight == 0)
    with socket.create_connection(("127.0.0.1", httpx.URL(tenants.server.url).port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.headers['authorization']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body[:5])
        tenants.server.wait_until(lambda: state.in_flight == 1)
        made_again(tenants, "a")
        connection.sendall(body[5:])
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head_, _, content = received.partition(b"\r\n\r\n")
    return int(head_.split()[1]), json.loads(content)


def test_a_call_of_the_removed_tenant_that_is_still_arriving_does_nothing_in_the_new_one(
    tenants: TenantServer,
):
    calls = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/adapters": {"name": "mine", "source": "a"},
    }
    client = tenants.tenant("a")
    for path, body in calls.items():
        status, answer = answer_to(tenants, client, path, json.dumps(body).encode())
        assert (status, answer["error"]["code"]) == (404, "tenant_not_found"), path
        client = tenants.as_(tenants.key("a")["key"])
    assert not tenants.server.engine.commands
    assert usage(tenants, "a") == (0, 0, 0)
    assert client.get("/adapters").json()["data"] == []
