"""The front door: every HTTP call passes here before it is routed, and its answer on the way out.

It gives the call an id, says who is calling, turns calls away while the server loads or drains, and counts.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import cast

import structlog
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from .auth import Caller
from .errors import ApiError, envelope, headers
from .state import Phase, ServerState

logger = structlog.get_logger(__name__)

OPEN = frozenset({"/health", "/ready"})
"""Answered to anyone at any time; they name nothing of anyone's."""
ALWAYS = OPEN | {"/metrics"}
"""Answered while the server loads or drains, too."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Front:
    """ASGI middleware around the whole application. Handlers find the `Caller` in `request.user`."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._call(cast(HTTPScope, scope), receive, send)
        else:
            await self._app(scope, receive, send)

    async def _call(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = fields.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        began = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        path, method = scope["path"], scope["method"]
        if path not in ALWAYS:
            self._state.begin_call()
        try:
            try:
                scope["user"] = self._admit(path, fields)
            except ApiError as error:
                await _refuse(error, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            if path not in ALWAYS:
                self._state.end_call()
            seconds = time.monotonic() - began
            self._state.metrics.count_call(method, status, seconds)
            log = logger.debug if path in ALWAYS else logger.info
            log("call", method=method, path=path, status=status, seconds=round(seconds, 4))

    def _admit(self, path: str, fields: dict[str, str]) -> Caller | None:
        """Who is calling; raises where the call must not pass."""
        if path in OPEN:
            return None
        caller = self._state.authenticator.authenticate(
            fields.get("authorization"), fields.get("origin"), fields.get("host")
        )
        if path not in ALWAYS:
            if self._state.phase is Phase.DRAINING:
                raise ApiError("shutting_down", "the server is shutting down")
            if self._state.phase is Phase.LOADING:
                raise ApiError("overloaded", "the base model is still being loaded", retry_after=5)
        return caller


async def _refuse(error: ApiError, send: Send) -> None:
    body = envelope(error)
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **headers(error),
    }
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
