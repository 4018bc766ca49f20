"""How handlers answer: one struct as JSON, or a stream of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
from litestar import Response
from litestar.types import ASGIApp

from ..connection import AnyRequest, while_connected
from ..sse import Events, begin


def answer(body: msgspec.Struct, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def respond(request: AnyRequest, events: Events, *, streams: bool, deadline: float | None) -> ASGIApp:
    """Send `events` one by one, or the only one there is; give up when the client leaves or the deadline
    passes.
    """
    if streams:
        return await while_connected(request.receive, begin(events, deadline))
    body = await while_connected(request.receive, _only(events, deadline))
    return answer(body).to_asgi_response(app=None, request=request)


async def _only(events: Events, deadline: float | None) -> msgspec.Struct:
    async with aclosing(events), asyncio.timeout_at(deadline):
        return await anext(events)
