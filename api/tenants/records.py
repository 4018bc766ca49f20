"""Tenants, their keys and limits as plain data: frozen msgspec structs, safe to hand between threads."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from ...lora.quota import Quota

PUBLIC = "public"
"""The tenant everyone shares. It always exists."""

MAX_COUNT = 2**53
"""The largest number every JSON reader holds exactly."""
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""A share of the engine's time relative to a tenant of weight 1."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""0 allows nothing at all."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use at most; None: no limit. Of one server process, but for what is registered."""

    requests_per_minute: Positive | None = None
    """Sequences: n answers to each of several prompts count all."""
    tokens_per_minute: Positive | None = None
    """Of prompts and answers together."""
    concurrent_requests: Count | None = None
    """Sequences under way at a time."""
    queued_requests: Count | None = None
    """Of these, sequences that the engine has not begun."""
    adapters: Count | None = None
    """Names registered."""
    adapter_bytes: Count | None = None
    """Of all versions of all its adapters together."""
    max_rank: Count | None = None
    """Of one adapter."""
    max_tokens: Positive | None = None
    """Of one answer."""
    pool_share: Share | None = None
    """Of the device pool's blocks, 0 < share <= 1: beyond it the tenant is preempted for others."""

    @property
    def quota(self) -> Quota:
        """What may be registered: the registry holds to it."""
        from ...lora.quota import Quota  # brings the database's library: command lines do not wait for it

        return Quota(adapters=self.adapters, adapter_bytes=self.adapter_bytes, max_rank=self.max_rank)


@lru_cache(maxsize=4096)  # every request asks several times
def key_of(name: str, created_at: datetime) -> str:
    """Which of the tenants that have had this name: nothing passes from one that was removed to a later one."""
    return f"{name}#{created_at.isoformat()}"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant as it is now."""

    name: str
    weight: float = 1.0
    limits: Limits = Limits()
    created_at: datetime

    @property
    def key(self) -> str:
        """What is counted, queued and cached while a request runs goes by it."""
        return key_of(self.name, self.created_at)


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a tenant, without what it is: of that only `sha256` is kept, and it is never shown."""

    id: str
    tenant: str
    description: str | None
    prefix: str
    """The key's first characters, by which people recognise it."""
    sha256: str
    """Of the key's UTF-8 bytes, as 64 hex digits."""
    created_at: datetime
    expires_at: datetime | None = None
    """From this moment on it opens nothing. None: never."""
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None

    def opens(self, now: datetime) -> bool:
        """Whether a call with it is let in."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)
