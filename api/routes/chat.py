"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from litestar import post
from litestar.types import ASGIApp

from ..http.connection import AnyRequest, read_json
from ..http.openapi import documented
from ..protocol.chat import ChatChunk, ChatRequest, ChatResponse
from ..state import server_of, services_of
from .answer import GENERATION_ERRORS, respond


@post(
    "/v1/chat/completions",
    status_code=200,
    opt=documented({200: ChatResponse}, body=ChatRequest, events=ChatChunk, errors=GENERATION_ERRORS),
)
async def chat(request: AnyRequest) -> ASGIApp:
    """Answer a conversation."""
    server = server_of(request)
    deadline = server.deadline()
    body = await read_json(request, ChatRequest, server.config.max_body_bytes)
    generate = partial(services_of(request).generation.chat, body, request.user)
    return await respond(request, generate, streams=bool(body.stream), deadline=deadline)


HANDLERS = [chat]
