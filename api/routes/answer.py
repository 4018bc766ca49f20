"""How handlers answer: one struct as JSON, or a stream of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from ..http import sse
from ..http.connection import AnyRequest, until, while_connected
from ..http.exchange import exchange_of

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


Generate = Callable[[sse.Send | None], Coroutine[Any, Any, msgspec.Struct | None]]
"""Makes an answer: returned as a whole, or sent piece by piece to who takes them."""


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


async def respond(
    request: AnyRequest, generate: Generate, *, streams: bool, deadline: float | None
) -> ASGIApp:
    """Send what `generate` returns, or what it sends where that `streams`; give up when the client leaves or the
    deadline passes.
    """
    if streams:
        await sse.stream(request.scope, generate, deadline)
        return _answered
    return JsonAnswer(await while_connected(request.scope, _whole(generate, deadline)))


async def _whole(generate: Generate, deadline: float | None) -> msgspec.Struct:
    async with until(deadline):
        answer = await generate(None)
    assert answer is not None, "nobody took it in chunks"
    return answer


async def _answered(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of a call that has been answered by its handler."""
