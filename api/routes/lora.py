"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, so that vLLM's users can move over."""

from __future__ import annotations

from litestar import Response, post

from ..http.connection import AnyRequest, read_json
from ..http.openapi import Text, documented
from ..protocol.adapters import AdapterCreate, LoadLora, UnloadLora
from ..state import server_of, services_of


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
    create = AdapterCreate(name=body.lora_name, source=body.lora_path, replace=body.load_inplace)
    await services_of(request).adapters.create_from_source(create, request.user)
    return _done(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post(
    "/v1/unload_lora_adapter",
    status_code=200,
    opt=documented({200: Text()}, body=UnloadLora, errors=("adapter_not_found", "pin_limit")),
)
async def unload_lora(request: AnyRequest) -> Response[bytes]:
    """Remove an adapter, as vLLM's call of that name."""
    body = await read_json(request, UnloadLora, server_of(request).config.max_body_bytes)
    await services_of(request).adapters.remove(body.lora_name, request.user)
    return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _done(message: str) -> Response[bytes]:
    return Response(message.encode(), media_type="text/plain")


HANDLERS = [load_lora, unload_lora]
