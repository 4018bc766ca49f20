"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from litestar import Response, post

from ..connection import AnyRequest, read_json
from ..protocol.tokenize import DetokenizeRequest, TokenizeRequest
from ..state import server_of, services_of
from .answer import answer


@post("/tokenize", status_code=200)
async def tokenize(request: AnyRequest) -> Response[bytes]:
    body = await read_json(request, TokenizeRequest, server_of(request).config.max_body_bytes)
    services = services_of(request)
    await services.generation.check_model(body.model, request.user)
    return answer(await services.prompts.tokenize(body))


@post("/detokenize", status_code=200)
async def detokenize(request: AnyRequest) -> Response[bytes]:
    body = await read_json(request, DetokenizeRequest, server_of(request).config.max_body_bytes)
    services = services_of(request)
    await services.generation.check_model(body.model, request.user)
    return answer(await services.prompts.detokenize(body))


HANDLERS = [tokenize, detokenize]
