"""Calls that are cut are counted, each once, whenever their client leaves."""

from __future__ import annotations

import threading

import pytest

from .conftest import RunningServer
from .test_disconnect import leave, leaving, send
from .test_metrics import Change


@pytest.fixture
def change(server: RunningServer) -> Change:
    return Change(server)


def settle(server: RunningServer) -> None:
    server.wait_until(lambda: not server.engine.running and not server.state.in_flight)


@leaving
def test_a_client_that_leaves_is_counted_once(server, change, stream, after, path, body, sequences):
    leave(server, stream, after, path, body, sequences)
    settle(server)
    assert change("aborted_requests_total") == 1
    assert change("request_seconds_count") == (1 if after else 0), "those that brought a token"
    assert change("refused_requests_total", code="invalid_request") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_adapter_is_looked_up_is_counted(server, change, monkeypatch, stream):
    go, inside, done = threading.Event(), threading.Event(), threading.Event()
    holds = server.state.services.adapters._holds
    look_up = holds._look_up

    def slow(ref: str, tenant: str):
        inside.set()
        assert go.wait(60)
        try:
            return look_up(ref, tenant)
        finally:
            done.set()

    monkeypatch.setattr(holds, "_look_up", slow)
    holds._names.clear()
    connection = send(server, "/v1/completions", {"prompt": "x", "adapter": "a", "stream": stream})
    assert inside.wait(60)
    connection.close()
    server.wait_until(lambda: not server.state.in_flight)
    go.set()
    assert done.wait(60)  # what it finds is remembered after the client has left
    assert change("aborted_requests_total") == 1


def test_time_that_is_over_counts_and_an_end_or_a_refusal_does_not(base, serve, tmp_path):
    with serve(tmp_path, base, request_timeout=0.2) as server:
        change = Change(server)
        assert server.complete().status_code == server.complete(stream=True).status_code == 200
        assert server.complete(n=0).status_code == 400
        assert server.complete(adapter="nobodys", stream=True).status_code == 404
        assert change("aborted_requests_total") == 0
        server.engine.hang_after = 0
        assert server.complete().status_code == server.complete(stream=True).status_code == 503
        assert change("aborted_requests_total") == 2
