"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial

from litestar import post
from litestar.types import ASGIApp

from ..http.connection import AnyRequest, read_json
from ..http.openapi import documented
from ..protocol.completions import CompletionRequest, CompletionResponse
from ..state import server_of, services_of
from .answer import GENERATION_ERRORS, respond


@post(
    "/v1/completions",
    status_code=200,
    opt=documented(
        {200: CompletionResponse}, body=CompletionRequest, events=CompletionResponse, errors=GENERATION_ERRORS
    ),
)
async def complete(request: AnyRequest) -> ASGIApp:
    """Continue one or several prompts."""
    server = server_of(request)
    deadline = server.deadline()
    body = await read_json(request, CompletionRequest, server.config.max_body_bytes)
    generate = partial(services_of(request).generation.complete, body, request.user)
    return await respond(request, generate, streams=bool(body.stream), deadline=deadline)


HANDLERS = [complete]
