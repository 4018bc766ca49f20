"""The front door: every HTTP call passes here before it is routed, and its answer on the way out.

It gives the call an id, says who is calling, turns calls away while the server loads or drains, and counts.
"""

from __future__ import annotations

import re
from functools import lru_cache
from os import urandom
from typing import cast
from urllib.parse import urlsplit

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send
from litestar.utils import normalize_path

from ...lora.errors import StoreError
from .. import turns
from ..errors import ApiError, envelope, headers, invalid
from ..state import Phase, ServerState
from ..tenants.auth import Caller, check_allowed, tenant_in
from ..tenants.keys import without_keys
from . import calls
from .calls import Call
from .error_answers import as_api_error
from .exchange import Exchange, exchange_of
from .protocol import FAULT

OPEN = frozenset({"/health", "/ready"})
"""Answered to anyone at any time; they name nothing of anyone's."""
ALWAYS = OPEN | {"/metrics"}
"""Answered while the server loads or drains, too."""

_HEADERS = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"authorization", b"origin", b"host"})
"""What is looked at here."""
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
"""RFC 3986's characters of a host and its port."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Front:
    """ASGI middleware around the whole application. Handlers find the `Caller` in `request.user`."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = cast(HTTPScope, scope)  # the server speaks nothing else
        fields: dict[bytes, str] = {}
        twice = False
        for name, value in scope["headers"]:
            if name in _HEADERS:
                if name in fields:
                    twice = True
                fields[name] = value.decode("latin-1")
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
        if path.endswith("/") or "//" in path:  # one path to the router, so one to all else
            path = scope["path"] = normalize_path(path)
        if path not in ALWAYS:
            self._state.begin_call()
        try:
            await turns.enter()
            try:
                if FAULT in scope:
                    _refuse_faulty(scope, path)
                host = fields.get(b"host")
                if twice or not _is_host(host):
                    _check_head(scope, [name for name, _ in scope["headers"]], host, exchange)
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


@lru_cache(maxsize=256)  # it is nearly always the same one
def _is_host(value: str | None) -> bool:
    """A host name or address, and a port or none."""
    if value is None or _HOST.fullmatch(value) is None:
        return False
    try:
        _ = urlsplit(f"//{value}").port
    except ValueError:  # no port, or no address between brackets
        return False
    return True


def _refuse_faulty(scope: HTTPScope, path: str) -> None:
    """Raises what is wrong with it. Over a connection too many, too, anyone is told whether the server is alive."""
    fault = cast(ApiError, scope[FAULT])  # type: ignore[literal-required]
    if fault.code != "overloaded" or path not in OPEN:
        raise fault


def _check_head(scope: HTTPScope, names: list[bytes], host: str | None, exchange: Exchange) -> None:
    """Raises `invalid_request` for a request that others may take for a call to another host (RFC 9112, 3.2), which
    ends the connection; `invalid_api_key` where two keys came: others may have looked at either.
    """
    fault, hosts = None, names.count(b"host")
    if hosts > 1 or (not hosts and scope["http_version"] != "1.0"):
        fault = f"a request has one Host header, and this one has {hosts or 'none'}"
    elif hosts and not _is_host(host):
        fault = "the Host header names no host"
    elif names.count(b"origin") > 1:
        fault = "the Origin header is there twice"
    if fault is not None:
        exchange.keep_alive = False
        raise invalid(fault)
    if names.count(b"authorization") > 1 and scope["path"] not in OPEN:
        raise ApiError("invalid_api_key", "the Authorization header is there twice")


def _refuse(error: ApiError, exchange: Exchange) -> None:
    extra = [(name.encode(), value.encode()) for name, value in headers(error).items()]
    exchange.answer_json(error.status, envelope(error), extra)
