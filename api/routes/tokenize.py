"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`."""

from __future__ import annotations

from litestar import Response, get, post

from ..http.connection import AnyRequest, read_json
from ..http.openapi import documented
from ..protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from ..state import server_of, services_of
from .answer import answer

ERRORS = ("adapter_invalid", "model_not_found", "rate_limit_exceeded")


@post(
    "/tokenize",
    status_code=200,
    opt=documented({200: TokenizeResponse}, body=TokenizeRequest, errors=ERRORS),
)
async def tokenize(request: AnyRequest) -> Response[bytes]:
    """Turn a text, or a conversation through the chat template, into token ids."""
    body = await read_json(request, TokenizeRequest, server_of(request).config.max_body_bytes)
    body.check()
    services = services_of(request)
    with services.accounts.one_call(request.user):
        await services.generation.check_selection(body.model, body.adapter, request.user)
        return answer(await services.prompts.tokenize(body))


@post(
    "/detokenize",
    status_code=200,
    opt=documented({200: DetokenizeResponse}, body=DetokenizeRequest, errors=ERRORS),
)
async def detokenize(request: AnyRequest) -> Response[bytes]:
    """Turn token ids into the text they stand for."""
    body = await read_json(request, DetokenizeRequest, server_of(request).config.max_body_bytes)
    services = services_of(request)
    with services.accounts.one_call(request.user):
        await services.generation.check_selection(body.model, body.adapter, request.user)
        return answer(await services.prompts.detokenize(body))


@get("/tokenizer_info", opt=documented({200: TokenizerInfo}))
async def tokenizer_info(request: AnyRequest) -> Response[bytes]:
    """Show the tokenizer's special tokens and its chat template."""
    return answer(services_of(request).prompts.info())


HANDLERS = [tokenize, detokenize, tokenizer_info]
