"""Clients that leave and requests that take too long: the engine is told at once, over a real connection."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest


def send(server, path: str, body: dict) -> socket.socket:
    """A connection on which the request has been sent and nothing read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


CHAT = {"messages": [{"role": "user", "content": "x"}]}


def leaving(test: Any) -> Any:
    """Run it for clients that leave, of every kind of request, before the first token and in the middle."""
    for mark in (
        pytest.mark.parametrize("stream", [False, True]),
        pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "in the middle"]),
        pytest.mark.parametrize(
            ("path", "body", "sequences"),
            [
                ("/v1/completions", {"prompt": "x"}, 1),
                ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 4, "adapter": "a"}, 12),
                ("/v1/chat/completions", CHAT, 1),
            ],
        ),
    ):
        test = mark(test)
    return test


def leave(server: Any, stream: bool, after: int, path: str, body: dict, sequences: int) -> None:
    """Send the request and go away, when nothing or the first tokens have come of it."""
    server.engine.hang_after = after
    connection = send(server, path, {**body, "stream": stream})
    server.wait_until(lambda: len(server.engine.running) == sequences)
    if stream and after:
        assert b"200 OK" in connection.recv(65536)
    connection.close()


@leaving
def test_every_sequence_of_a_client_that_leaves_is_aborted(server, stream, after, path, body, sequences):
    leave(server, stream, after, path, body, sequences)
    server.wait_until(lambda: not server.engine.running)
    assert len(set(server.engine.aborted)) == sequences
    server.wait_until(lambda: not server.state.in_flight)
    assert server.client.get("/adapters/a").json()["in_use"] == 0


def test_a_client_that_stops_reading_is_aborted_when_it_leaves(server):
    """The server is stuck in sending then, not in waiting for a token."""
    server.engine.script, server.engine.burst = b"x" * 4000, 1
    connection = send(
        server,
        "/v1/completions",
        {"prompt": ["y"] * 40, "stream": True, "ignore_eos": True, "max_tokens": 255, "logprobs": 5},
    )
    server.wait_until(lambda: server.state.in_flight == 1)
    threading.Event().wait(0.3)
    connection.close()
    server.wait_until(lambda: not server.state.in_flight and not server.engine.running)


def test_a_hundred_clients_that_leave_leave_nothing(server):
    server.engine.hang_after = 1
    connections = [
        send(server, "/v1/completions", {"prompt": "x", "n": 2, "stream": bool(i % 2), "adapter": "b"})
        for i in range(100)
    ]
    server.wait_until(lambda: len(server.engine.running) == 200)
    assert server.client.get("/adapters/b").json()["in_use"] == 100
    for connection in connections:
        connection.close()
    server.wait_until(lambda: not server.engine.running and not server.state.in_flight)
    assert len(server.engine.aborted) == 200
    assert server.client.get("/adapters/b").json()["in_use"] == 0
    assert server.engine.reset() is None
    assert server.complete(adapter="b").status_code == 200
    assert not server.engine.aborted


def test_a_client_that_leaves_while_its_adapter_is_looked_up_holds_nothing(server, monkeypatch):
    go, inside = threading.Event(), threading.Event()
    holds = server.state.services.adapters._holds
    look_up = holds._look_up

    def slow(ref: str, tenant: str):
        record = look_up(ref, tenant)
        inside.set()
        go.wait(10)
        return record

    monkeypatch.setattr(holds, "_look_up", slow)
    digest = server.client.get("/adapters/a").json()["digest"]
    holds._names.clear()
    connection = send(server, "/v1/completions", {"prompt": "x", "adapter": "a"})
    assert inside.wait(10)
    connection.close()
    server.wait_until(lambda: not server.state.in_flight)
    go.set()
    server.wait_until(lambda: holds.count(digest) == 0)
    assert not server.engine.commands


def test_a_request_beyond_the_timeout_ends(base, serve, tmp_path):
    with serve(tmp_path, base, request_timeout=0.3) as server:
        server.engine.hang_after = 1
        answer = server.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert "--request-timeout" in answer.json()["error"]["message"]
        answer = server.complete(stream=True)
        assert answer.status_code == 200
        assert "--request-timeout" in answer.text
        assert "[DONE]" not in answer.text
        server.engine.hang_after = 0
        assert server.complete(stream=True).status_code == 503
        server.wait_until(lambda: not server.engine.running)
        assert len(server.engine.aborted) == 3
