"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, so that vLLM's users can move over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from litestar import Response, post

from ...lora.errors import StoreError
from ..errors import ApiError
from ..http.connection import AnyRequest, read_json
from ..http.error_answers import as_api_error
from ..http.openapi import Text, documented
from ..protocol.adapters import LoadLora, UnloadLora
from ..state import server_of, services_of

THEIRS = {"name": "lora_name", "source": "lora_path", "replace": "load_inplace"}
"""What vLLM calls our fields."""
_FIELD = re.compile(r"^(?:name|source)(?= must )|(?<=; set )replace(?= to make a new version of it$)")
"""One of them in a refusal's words."""


@post(
    "/v1/load_lora_adapter",
    status_code=200,
    opt=documented(
        {200: Text()},
        body=LoadLora,
        errors=("adapter_invalid", "adapter_exists", "pin_limit", "rate_limit_exceeded", "adapter_failed"),
    ),
)
async def load_lora(request: AnyRequest) -> Response[bytes]:
    """Register an adapter, as vLLM's call of that name."""
    body = await read_json(request, LoadLora, server_of(request).config.max_body_bytes)
    with _in_their_words():
        await services_of(request).adapters.create_from_source(body.create(), request.user)
    return _done(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post(
    "/v1/unload_lora_adapter",
    status_code=200,
    opt=documented({200: Text()}, body=UnloadLora, errors=("adapter_not_found", "pin_limit")),
)
async def unload_lora(request: AnyRequest) -> Response[bytes]:
    """Remove an adapter, as vLLM's call of that name."""
    body = await read_json(request, UnloadLora, server_of(request).config.max_body_bytes)
    with _in_their_words():
        await services_of(request).adapters.remove(body.lora_name, request.user)
    return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@contextmanager
def _in_their_words() -> Iterator[None]:
    """A refusal calls the fields as their caller does."""
    try:
        yield
    except (StoreError, ApiError) as error:
        refused = as_api_error(error)
        message = _FIELD.sub(lambda found: THEIRS[found[0]], refused.message)
        param = None if refused.param is None else THEIRS.get(refused.param, refused.param)
        raise ApiError(
            refused.code, message, param, status=refused.status, retry_after=refused.retry_after
        ) from error


def _done(message: str) -> Response[bytes]:
    return Response(message.encode(), media_type="text/plain")


HANDLERS = [load_lora, unload_lora]
