"""`/tenants`: tenants, their keys and usage, and inside each the calls of the root."""

from __future__ import annotations

from litestar import Response, Router, delete, get, patch, post
from litestar.types import ControllerRouterHandler

from ..http.connection import AnyRequest, read_json, read_optional_json
from ..http.openapi import documented
from ..protocol.tenants import KeyCreate, KeyList, NewKey, TenantCreate, TenantList, TenantPatch
from ..state import server_of, services_of
from ..tenants.records import Tenant
from ..tenants.usage import TenantUsage
from . import adapters, chat, completions, lora, models, tokenize
from .answer import answer
from .options import options

UNKNOWN = ("tenant_not_found",)


@post(
    "/tenants", status_code=201, opt=documented({201: Tenant}, body=TenantCreate, errors=("tenant_exists",))
)
async def create(request: AnyRequest) -> Response[bytes]:
    """Make a tenant."""
    body = await read_json(request, TenantCreate, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).tenants.create(body), 201)


@get("/tenants", opt=documented({200: TenantList}))
async def list_tenants(request: AnyRequest) -> Response[bytes]:
    """List the tenants by name."""
    return answer(TenantList(await services_of(request).tenants.all()))


@get("/tenants/{tenant:str}", opt=documented({200: Tenant}, errors=UNKNOWN))
async def show(request: AnyRequest, tenant: str) -> Response[bytes]:
    """Show one tenant."""
    return answer(await services_of(request).tenants.get(tenant))


@patch("/tenants/{tenant:str}", opt=documented({200: Tenant}, body=TenantPatch, errors=UNKNOWN))
async def change(request: AnyRequest, tenant: str) -> Response[bytes]:
    """Change a tenant's weight and limits.

    A limit that is left out stays as it is; null lifts it.
    """
    body = await read_json(request, TenantPatch, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).tenants.change(tenant, body))


@delete("/tenants/{tenant:str}", opt=documented({204: None}, errors=(*UNKNOWN, "invalid_request")))
async def remove(request: AnyRequest, tenant: str) -> None:
    """Remove a tenant with its keys, adapters and usage.

    Its requests under way finish.
    """
    await services_of(request).tenants.remove(tenant)


@post(
    "/tenants/{tenant:str}/keys",
    status_code=201,
    opt=documented({201: NewKey}, body=KeyCreate, body_optional=True, errors=UNKNOWN),
)
async def create_key(request: AnyRequest, tenant: str) -> Response[bytes]:
    """Make a key for a tenant.

    The answer is the only one that shows it.
    """
    body = await read_optional_json(request, KeyCreate, server_of(request).config.max_body_bytes)
    return answer(await services_of(request).tenants.create_key(tenant, body), 201)


@get("/tenants/{tenant:str}/keys", opt=documented({200: KeyList}, errors=UNKNOWN))
async def list_keys(request: AnyRequest, tenant: str) -> Response[bytes]:
    """List a tenant's keys, the revoked ones too, without what opens anything."""
    return answer(KeyList(await services_of(request).tenants.keys(tenant)))


@delete("/tenants/{tenant:str}/keys/{key_id:str}", opt=documented({204: None}, errors=UNKNOWN))
async def revoke_key(request: AnyRequest, tenant: str, key_id: str) -> None:
    """Revoke a key: it opens nothing from now on."""
    await services_of(request).tenants.revoke(tenant, key_id)


@get("/tenants/{tenant:str}/usage", opt=documented({200: TenantUsage}, errors=UNKNOWN))
async def usage(request: AnyRequest, tenant: str) -> Response[bytes]:
    """Show what a tenant used and holds: tokens in and out, requests, adapters, bytes."""
    return answer(await services_of(request).usage.of_tenant(tenant))


INSIDE: list[ControllerRouterHandler] = [
    *models.HANDLERS,
    *completions.HANDLERS,
    *chat.HANDLERS,
    *tokenize.HANDLERS,
    *adapters.HANDLERS,
    *lora.HANDLERS,
]
"""The root's own handlers: the front door has made the caller the path's tenant."""
inside = Router("/tenants/{tenant:str}", route_handlers=[*options(INSIDE), *INSIDE])

HANDLERS: list[ControllerRouterHandler] = [
    create,
    list_tenants,
    show,
    change,
    remove,
    create_key,
    list_keys,
    revoke_key,
    usage,
    inside,
]
