"""Work for a client ends when the client leaves, whenever that is, and no other cancellation is taken for it."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest
from heddle.api.errors import ClientGone
from heddle.api.http.connection import while_connected
from heddle.api.http.presence import PRESENCE, Presence
from heddle.api.http.protocol import HttpProtocol


@pytest.fixture
def client() -> Presence:
    return Presence()


def scope_of(client: Presence) -> dict[str, object]:
    return {PRESENCE: client}


async def test_work_that_is_done_before_is_not_touched(client):
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await while_connected(scope_of(client), work()) == 7
    client.end()  # between two requests of one connection: nobody is called


async def test_work_is_cancelled_by_the_loss(client):
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.get_running_loop().call_soon(client.end)
    with pytest.raises(ClientGone):
        await while_connected(scope_of(client), work())
    assert ended == [True]


async def test_work_for_a_client_that_has_left_already_is_not_begun(client):
    began = []

    async def work() -> None:
        began.append(True)

    client.end()
    with pytest.raises(ClientGone):
        await while_connected(scope_of(client), work())
    assert not began


async def test_a_cancellation_by_somebody_else_stays_one(client):
    async def work() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(while_connected(scope_of(client), work()))
    await asyncio.sleep(0)
    task.cancel()
    client.end()  # at the same moment
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_connection_that_is_over_is_freed_at_once(server, monkeypatch):
    """What refers to itself in a circle stays in memory until somebody looks for garbage."""
    made: list[weakref.ref[HttpProtocol]] = []
    connection_made = HttpProtocol.connection_made

    def noted(self: HttpProtocol, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(self))
        connection_made(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", noted)
    host, port = server.url.removeprefix("http://").split(":")
    gc.disable()
    try:
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                while connection.recv(65536):
                    pass
        server.wait_until(lambda: len(made) == 3 and not any(one() is not None for one in made))
    finally:
        gc.enable()
