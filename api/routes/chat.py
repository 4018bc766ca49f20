"""`POST /v1/chat/completions`."""

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from ..connection import AnyRequest, read_json
from ..protocol.chat import ChatRequest
from ..state import server_of, services_of
from .answer import respond


@post("/v1/chat/completions", status_code=200)
async def chat(request: AnyRequest) -> ASGIApp:
    deadline = server_of(request).deadline()
    body = await read_json(request, ChatRequest, server_of(request).config.max_body_bytes)
    events = services_of(request).generation.chat(body, request.user)
    return await respond(request, events, streams=bool(body.stream), deadline=deadline)


HANDLERS = [chat]
