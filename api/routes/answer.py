"""How handlers answer: one struct as JSON, or a stream of them."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from ..http.connection import AnyRequest, until, while_connected
from ..http.exchange import exchange_of
from ..http.sse import Events, begin

GENERATION_ERRORS = (
    "adapter_invalid",
    "context_length_exceeded",
    "capacity_exceeded",
    "model_not_found",
    "rate_limit_exceeded",
    "adapter_cold",
    "adapter_failed",
)
"""What a request for text can end with."""


def answer(body: msgspec.Struct, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


class JsonAnswer:
    """ASGI application that sends one object."""

    def __init__(self, body: msgspec.Struct) -> None:
        self._body = msgspec.json.encode(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        await exchange.writable()
        exchange.answer_json(200, self._body)


async def respond(request: AnyRequest, events: Events, *, streams: bool, deadline: float | None) -> ASGIApp:
    """Send `events` one by one, or the only one there is; give up when the client leaves or the deadline
    passes.
    """
    if streams:
        return await while_connected(request.scope, begin(events, deadline))
    return JsonAnswer(await while_connected(request.scope, _only(events, deadline)))


async def _only(events: Events, deadline: float | None) -> msgspec.Struct:
    async with aclosing(events), until(deadline):
        return await anext(events)
