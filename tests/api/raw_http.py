"""A small application behind our connections, and its clients, who write and read bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop
from heddle.api.errors import ApiError, envelope, headers
from heddle.api.http.exchange import exchange_of
from heddle.api.http.open_connections import OpenConnections
from heddle.api.http.protocol import FAULT, HttpProtocol

App = Callable[[Any, Any, Any], Awaitable[None]]
PAIR = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ENDS = b"HTTP/1.1\r\nhost: a\r\n"
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run(test: Coroutine[Any, Any, None], new_loop: Any = uvloop.new_event_loop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(test)


def refusing(app: App) -> App:
    """`app` behind what the front door does with what is no request."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        try:
            if FAULT in scope:
                raise scope[FAULT]
            await app(scope, receive, send)
        except ApiError as error:
            told = [(name.encode(), value.encode()) for name, value in headers(error).items()]
            exchange.answer_json(error.status, envelope(error), told)

    return answer


@asynccontextmanager
async def serving(app: App, limit: int = 1000) -> AsyncIterator[Callable[[], Awaitable[PAIR]]]:
    """What opens connections to a server of `app`, which serves `limit` of them at a time. All is over in a minute."""
    config = uvicorn.Config(
        refusing(app), lifespan="off", ws="none", log_config=None, access_log=False, timeout_keep_alive=600
    )
    config.load()
    state, opened = OpenConnections(limit), []
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )

    async def connect() -> PAIR:
        pair = await asyncio.open_connection(*server.sockets[0].getsockname())
        opened.append(pair[1])
        return pair

    try:
        async with asyncio.timeout(60):
            yield connect
            for writer in opened:
                writer.close()
            while state.tasks or state.connections:  # noqa: ASYNC110 - they say nothing when they end
                await asyncio.sleep(0.001)
    finally:
        server.close()


async def whole_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body that came."""
    body = f"{scope['method']} {scope['path']} ".encode() + await whole_body(receive)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one", b"", b"three"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    status, headers = await head_of(reader)
    assert status == 200
    return await reader.readexactly(int(headers["content-length"]))
