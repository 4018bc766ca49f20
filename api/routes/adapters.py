"""`/adapters`: register, list, change, move, remove."""

from __future__ import annotations

from litestar import Response, delete, get, patch, post

from ..connection import AnyRequest, body_chunks, read_json, read_optional_json
from ..errors import invalid
from ..protocol.adapters import AdapterCreate, AdapterEvict, AdapterList, AdapterPatch, from_parts
from ..state import server_of, services_of
from ..uploads import OVERHEAD_BYTES, boundary_of, receive
from .answer import answer


@post("/adapters", status_code=201)
async def create(request: AnyRequest) -> Response[bytes]:
    """From JSON with a `source`, or from an upload."""
    config, adapters = server_of(request).config, services_of(request).adapters
    dry_run = _flag(request, "dry_run")
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        body = await read_json(request, AdapterCreate, config.max_body_bytes)
        receipt, created = await adapters.create_from_source(body, request.user, dry_run)
        return answer(receipt, 201 if created else 200)
    async with adapters.scratch() as folder:
        chunks = body_chunks(request, config.max_adapter_bytes + OVERHEAD_BYTES)
        parts = await receive(chunks, boundary, folder, config.max_adapter_bytes, adapters.upload_threads)
        body = from_parts(parts)
        receipt, created = await adapters.create_from_upload(body, folder, request.user, dry_run)
        return answer(receipt, 201 if created else 200)


@get("/adapters")
async def list_adapters(request: AnyRequest) -> Response[bytes]:
    return answer(AdapterList(await services_of(request).adapters.all_of(request.user)))


@get("/adapters/{name:str}")
async def show(request: AnyRequest, name: str) -> Response[bytes]:
    return answer(await services_of(request).adapters.get(name, request.user))


@get("/adapters/{name:str}/versions")
async def versions(request: AnyRequest, name: str) -> Response[bytes]:
    return answer(AdapterList(await services_of(request).adapters.versions(name, request.user)))


@patch("/adapters/{name:str}")
async def change(request: AnyRequest, name: str) -> Response[bytes]:
    body = await read_json(request, AdapterPatch, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).adapters.patch(name, body, request.user))


@post("/adapters/{name:str}/load", status_code=200)
async def load(request: AnyRequest, name: str) -> Response[bytes]:
    return answer(await services_of(request).adapters.load(name, request.user))


@post("/adapters/{name:str}/evict", status_code=200)
async def evict(request: AnyRequest, name: str) -> Response[bytes]:
    body = await read_optional_json(request, AdapterEvict, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).adapters.evict(name, body.to, request.user))


@delete("/adapters/{name:str}")
async def remove(request: AnyRequest, name: str) -> None:
    await services_of(request).adapters.remove(name, request.user)


def _flag(request: AnyRequest, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false", name)
    return value in ("true", "1")


HANDLERS = [create, list_adapters, show, versions, change, load, evict, remove]
