"""The front door: every HTTP call passes here before it is routed, and its answer on the way out.

It gives the call an id, says who is calling, turns calls away while the server loads or drains, and counts.
"""

from __future__ import annotations

import re
from os import urandom
from typing import cast

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from ...lora.errors import StoreError
from .. import turns
from ..errors import ApiError, envelope, headers
from ..state import Phase, ServerState
from ..tenants.auth import Caller, check_allowed, tenant_in
from ..tenants.keys import without_keys
from . import calls
from .calls import Call
from .error_answers import as_api_error
from .exchange import Exchange, exchange_of

OPEN = frozenset({"/health", "/ready"})
"""Answered to anyone at any time; they name nothing of anyone's."""
ALWAYS = OPEN | {"/metrics"}
"""Answered while the server loads or drains, too."""

_HEADERS = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"authorization", b"origin", b"host"})
"""What is looked at here."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Front:
    """ASGI middleware around the whole application. Handlers find the `Caller` in `request.user`."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = cast(HTTPScope, scope)  # the server speaks nothing else
        fields = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        given = fields.get(b"x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{urandom(16).hex()}"
        call = Call(
            request_id=request_id,
            method=scope["method"],
            path=without_keys(scope["raw_path"].decode("ascii", "backslashreplace")),
            traceparent=fields.get(b"traceparent"),
            tracestate=fields.get(b"tracestate"),
        )
        calls.begin(call)
        exchange = exchange_of(scope)
        exchange.headers.append((b"x-request-id", request_id.encode()))
        path = scope["path"]
        if path not in ALWAYS:
            self._state.begin_call()
        try:
            await turns.enter()
            try:
                scope["user"] = caller = await self._admit(path, fields)
            except (ApiError, StoreError) as error:
                _refuse(as_api_error(error), exchange)
            else:
                call.tenant = None if caller is None else caller.tenant
                await self._app(scope, receive, send)
        finally:
            call.status = exchange.status
            if path not in ALWAYS:
                self._state.end_call()
            self._state.finished(call, quiet=path in ALWAYS)

    async def _admit(self, path: str, fields: dict[bytes, str]) -> Caller | None:
        """Who is calling, and inside which tenant; raises where the call must not pass."""
        if path in OPEN:
            return None
        services = self._state.services
        caller = self._state.authenticator.authenticate(
            fields.get(b"authorization"),
            fields.get(b"origin"),
            fields.get(b"host"),
            None if services is None else services.tenants.directory,
        )
        check_allowed(caller, path)
        if path not in ALWAYS:
            if self._state.phase is Phase.DRAINING:
                raise ApiError("shutting_down", "the server is shutting down")
            if self._state.phase is Phase.LOADING or services is None:
                raise ApiError("overloaded", "the base model is still being loaded", retry_after=5)
            if caller.is_admin and (inside := tenant_in(path)) is not None:
                tenant = await services.tenants.known(inside)
                return Caller(tenant.name, is_admin=False, key=tenant.key)
        return caller


def _refuse(error: ApiError, exchange: Exchange) -> None:
    extra = [(name.encode(), value.encode()) for name, value in headers(error).items()]
    exchange.answer_json(error.status, envelope(error), extra)
