"""`/adapters`: register, list, change, move, remove."""

from __future__ import annotations

from litestar import Response, delete, get, patch, post

from ..errors import invalid
from ..http.connection import AnyRequest, body_chunks, read_json, read_optional_json
from ..http.openapi import documented
from ..http.uploads import OVERHEAD_BYTES, boundary_of, receive, upload_limit
from ..protocol.adapters import (
    Adapter,
    AdapterCreate,
    AdapterEvict,
    AdapterList,
    AdapterLoad,
    AdapterPatch,
    AdapterUpload,
    from_parts,
)
from ..state import server_of, services_of
from .answer import answer


@post(
    "/adapters",
    status_code=201,
    opt=documented(
        {201: Adapter, 200: Adapter},
        body=AdapterCreate,
        upload=AdapterUpload,
        query={"dry_run": bool},
        errors=("adapter_invalid", "adapter_exists", "pin_limit", "rate_limit_exceeded", "adapter_failed"),
    ),
)
async def create(request: AnyRequest) -> Response[bytes]:
    """Register an adapter.

    From JSON with a `source`, or from an upload. 200: the name's current version holds these weights already, or this
    was a dry run, which checks all and changes nothing.
    """
    config, adapters = server_of(request).config, services_of(request).adapters
    dry_run = _flag(request, "dry_run")
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        body = await read_json(request, AdapterCreate, config.max_body_bytes)
        receipt, created = await adapters.create_from_source(body, request.user, dry_run)
        return answer(receipt, 201 if created else 200)
    async with adapters.scratch() as folder:
        with upload_limit(config.max_adapter_bytes, adapters.quota_of(request.user)) as most:
            chunks = body_chunks(request, most + OVERHEAD_BYTES)
            parts = await receive(chunks, boundary, folder, most, adapters.upload_threads)
        body = from_parts(parts)
        receipt, created = await adapters.create_from_upload(body, folder, request.user, dry_run)
        return answer(receipt, 201 if created else 200)


@get("/adapters", opt=documented({200: AdapterList}))
async def list_adapters(request: AnyRequest) -> Response[bytes]:
    """List the current version of every adapter the caller may use."""
    return answer(AdapterList(await services_of(request).adapters.all_of(request.user)))


@get("/adapters/{name:str}", opt=documented({200: Adapter}, errors=("adapter_not_found",)))
async def show(request: AnyRequest, name: str) -> Response[bytes]:
    """Show an adapter: `name`, `name@version` or `name@digest`."""
    return answer(await services_of(request).adapters.get(name, request.user))


@get(
    "/adapters/{name:str}/versions",
    opt=documented({200: AdapterList}, errors=("adapter_not_found", "invalid_request")),
)
async def versions(request: AnyRequest, name: str) -> Response[bytes]:
    """List every version kept under a name."""
    return answer(AdapterList(await services_of(request).adapters.versions(name, request.user)))


@patch(
    "/adapters/{name:str}",
    opt=documented(
        {200: Adapter},
        body=AdapterPatch,
        errors=("adapter_invalid", "adapter_not_found", "pin_limit", "adapter_failed"),
    ),
)
async def change(request: AnyRequest, name: str) -> Response[bytes]:
    """Change an adapter's pin, description or current version."""
    body = await read_json(request, AdapterPatch, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).adapters.patch(name, body, request.user))


@post(
    "/adapters/{name:str}/load",
    status_code=200,
    opt=documented(
        {200: Adapter},
        body=AdapterLoad,
        body_optional=True,
        errors=("adapter_invalid", "capacity_exceeded", "adapter_not_found", "adapter_failed"),
    ),
)
async def load(request: AnyRequest, name: str) -> Response[bytes]:
    """Bring an adapter to the device now."""
    await read_optional_json(request, AdapterLoad, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).adapters.load(name, request.user))


@post(
    "/adapters/{name:str}/evict",
    status_code=200,
    opt=documented(
        {200: Adapter},
        body=AdapterEvict,
        body_optional=True,
        errors=("adapter_invalid", "adapter_not_found", "adapter_in_use", "adapter_failed"),
    ),
)
async def evict(request: AnyRequest, name: str) -> Response[bytes]:
    """Move an adapter from the device to host memory, or to disk."""
    body = await read_optional_json(request, AdapterEvict, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).adapters.evict(name, body.to, request.user))


@delete("/adapters/{name:str}", opt=documented({204: None}, errors=("adapter_not_found", "pin_limit")))
async def remove(request: AnyRequest, name: str) -> None:
    """Remove an adapter with all its versions, or `name@version` alone."""
    await services_of(request).adapters.remove(name, request.user)


def _flag(request: AnyRequest, name: str) -> bool:
    values = request.query_params.getall(name, ["false"])
    if len(values) > 1 or values[0] not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false, and be there once", name)
    return values[0] in ("true", "1")


HANDLERS = [create, list_adapters, show, versions, change, load, evict, remove]
