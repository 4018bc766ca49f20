"""Server-sent events: a stream of JSON objects that ends in `[DONE]`, or in an error event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from litestar.types import Receive, Scope, Send

from ..errors import ClientGone, envelope
from .connection import until, while_connected
from .error_answers import as_api_error
from .exchange import Exchange, exchange_of

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream before passing it on defeats it
]

Events = AsyncGenerator[msgspec.Struct, None]


async def begin(events: Events, deadline: float | None) -> EventStream:
    """An answer that streams `events`. Waits for the first, so that a refusal still has its own status."""
    async with until(deadline):
        try:
            first = await anext(events)
        except BaseException:
            await events.aclose()
            raise
    return EventStream(first, events, deadline)


class EventStream:
    """ASGI application that sends the events until they end, the client leaves, or the deadline (loop time)
    passes.

    In each of these cases `events` is closed, which gives back what the request holds. An error in mid-stream
    becomes a last event in the shape of an error body, without `[DONE]`.
    """

    def __init__(self, first: msgspec.Struct, events: Events, deadline: float | None) -> None:
        self._first = first
        self._events = events
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            exchange = exchange_of(scope)
            exchange.begin(200, HEADERS)
            try:
                await while_connected(scope, self._send_all(exchange))
            except ClientGone:
                return

    async def _send_all(self, exchange: Exchange) -> None:
        try:
            async with until(self._deadline):  # once: it costs as much as a token's text
                await exchange.writable()
                exchange.write(_event(msgspec.json.encode(self._first)))
                async for item in self._events:
                    await exchange.writable()
                    exchange.write(_event(msgspec.json.encode(item)))
        except Exception as error:  # noqa: BLE001 - the status is sent: the only way to tell is an event
            last = envelope(as_api_error(error))
        else:
            last = b"[DONE]"
        await exchange.writable()
        exchange.write(_event(last), last=True)


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
