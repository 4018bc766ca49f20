"""The calls that come by the thousand go straight to their handlers; Litestar routes all others.

Routing, reading signatures and building a response are a third of such a call's cost, and its handlers need none of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from litestar import Litestar, Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from .connection import AnyRequest
from .error_answers import handle

Handler = Callable[[AnyRequest], Awaitable[ASGIApp]]


class BareRequest(AnyRequest):
    """What these handlers look at of a request, its `app`, `user`, `scope` and body, and nothing else: making the rest
    of Litestar's costs as much as reading the head."""

    def __init__(self, scope: HTTPScope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive


class Shortcut:
    """ASGI application: `POST` to the paths of `handlers`, which take the request alone and return what answers it.

    A `HEAD` is routed as the `GET` it stands for (RFC 9110, 9.3.2); the connection leaves the body out.
    """

    def __init__(self, app: Litestar, handlers: list[HTTPRouteHandler]) -> None:
        self._app = app
        self._handlers = {path: cast(Handler, handler.fn) for handler in handlers for path in handler.paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = cast(HTTPScope, scope)  # the server speaks nothing else
        handler = self._handlers.get(scope["path"])
        if handler is None or scope["method"] != "POST":
            if scope["method"] == "HEAD":
                scope = cast(HTTPScope, {**scope, "method": "GET"})
            await self._app(scope, receive, send)
            return
        scope["litestar_app"] = self._app
        try:
            answer = await handler(BareRequest(scope, receive))
        except Exception as error:  # noqa: BLE001 - each becomes an answer, as Litestar's own handler makes it
            request: AnyRequest = Request(scope, receive, send)
            answer = handle(request, error).to_asgi_response(app=None, request=request)
        await answer(scope, receive, send)
