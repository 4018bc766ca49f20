"""`GET /openapi.json`: the document of this application, made when it is first asked for."""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Response, get

from ..http.connection import AnyRequest
from ..http.openapi import AnyObject, documented
from ..http.openapi_document import document
from ..state import server_of


@get("/openapi.json", opt=documented({200: AnyObject()}))
async def openapi(request: AnyRequest) -> Response[bytes]:
    """Describe every call, in OpenAPI's form."""
    state = request.app.state
    if "openapi" not in state:
        needs_key = not server_of(request).authenticator.keyless
        made = await asyncio.to_thread(document, request.app, needs_key=needs_key)
        state["openapi"] = msgspec.json.encode(made)
    return Response(state["openapi"], media_type="application/json")


HANDLERS = [openapi]
