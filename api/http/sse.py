"""Server-sent events: a stream of JSON objects that ends in `[DONE]`, or in an error event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from litestar.types import Scope

from ..errors import ClientGone, envelope
from .connection import until, while_connected
from .error_answers import as_api_error
from .exchange import Exchange, exchange_of

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream before passing it on defeats it
]

Send = Callable[[msgspec.Struct], Awaitable[None]]
Generate = Callable[[Send], Coroutine[Any, Any, object]]


async def stream(scope: Scope, generate: Generate, deadline: float | None) -> None:
    """Answer with the events that `generate` sends, until it ends, the client leaves, or the deadline (loop time)
    passes; in the last two cases it is cancelled.

    Raises what it raises before its first event, so that a refusal has its own status, and `ClientGone` by then. Later
    an error becomes a last event in the shape of an error body, without `[DONE]`.
    """
    exchange = exchange_of(scope)
    try:
        await while_connected(scope, _send_all(exchange, generate, deadline))
    except ClientGone:
        if not exchange.status:
            raise


async def _send_all(exchange: Exchange, generate: Generate, deadline: float | None) -> None:
    async def send(event: msgspec.Struct) -> None:
        if not exchange.status:
            exchange.begin(200, HEADERS)
        await exchange.writable()
        exchange.write(_event(msgspec.json.encode(event)))

    try:
        async with until(deadline):  # once: it costs as much as a token's text
            await generate(send)
    except Exception as error:
        if not exchange.status:
            raise
        last = envelope(as_api_error(error))
    else:
        last = b"[DONE]"
    await exchange.writable()
    exchange.write(_event(last), last=True)


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
