"""`/tenants`: what is sent, and what tenants, keys and usage look like from outside."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ..tenants.records import Count, Key, Limits, Positive, Share, Tenant, Weight
from .adapters import Description

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""RFC 3339, with its offset from UTC."""


class LimitsPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A limit that is left out stays as it is; null lifts it."""

    requests_per_minute: Positive | UnsetType | None = UNSET
    tokens_per_minute: Positive | UnsetType | None = UNSET
    concurrent_requests: Count | UnsetType | None = UNSET
    queued_requests: Count | UnsetType | None = UNSET
    adapters: Count | UnsetType | None = UNSET
    adapter_bytes: Count | UnsetType | None = UNSET
    max_rank: Count | UnsetType | None = UNSET
    max_tokens: Positive | UnsetType | None = UNSET
    pool_share: Share | UnsetType | None = UNSET


def patched(limits: Limits, patch: LimitsPatch) -> Limits:
    """The limits with those set that `patch` has."""
    given: dict[str, Any] = msgspec.structs.asdict(patch)
    return msgspec.structs.replace(limits, **{name: v for name, v in given.items() if v is not UNSET})


class TenantCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    weight: Weight | None = None
    """A share of the engine relative to the others'. Left out: 1."""
    limits: Limits | None = None


class TenantPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weight: Weight | None = None
    limits: LimitsPatch | None = None


class TenantList(msgspec.Struct):
    data: list[Tenant]


class KeyCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    description: Description | None = None
    expires_at: Moment | None = None
    """Left out: it never expires."""


class KeyView(msgspec.Struct, kw_only=True):
    """A key without what opens anything."""

    id: str
    tenant: str
    description: str | None
    prefix: str
    """What the key begins with."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewKey(KeyView, kw_only=True):
    """The answer to its creation, the only one that shows it."""

    key: str


class KeyList(msgspec.Struct):
    data: list[KeyView]


def shown(key: Key, last_used_at: datetime | None) -> dict[str, Any]:
    """The fields of a `KeyView`."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "description": key.description,
        "prefix": key.prefix,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": last_used_at,
    }
