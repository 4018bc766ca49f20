"""`POST /v1/completions`."""

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from ..connection import AnyRequest, read_json
from ..protocol.completions import CompletionRequest
from ..state import server_of, services_of
from .answer import respond


@post("/v1/completions", status_code=200)
async def complete(request: AnyRequest) -> ASGIApp:
    deadline = server_of(request).deadline()
    body = await read_json(request, CompletionRequest, server_of(request).config.max_body_bytes)
    events = services_of(request).generation.complete(body, request.user)
    return await respond(request, events, streams=bool(body.stream), deadline=deadline)


HANDLERS = [complete]
