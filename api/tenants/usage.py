"""What tenants used, as `GET /tenants/{t}/usage` tells it; counted here, kept in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...lora import usage as book
from ...lora.records import AdapterRecord
from ...lora.store import AdapterStore
from ..protocol.generation import Usage
from ..workers import Workers
from .records import Tenant


class Counters(msgspec.Struct, kw_only=True):
    """Since the tenant was made, at all servers of the registry."""

    requests: int
    """Completions and chats that brought at least a token."""
    prompt_tokens: int
    """Tokens in. A prompt counts once, however many answers it gets."""
    completion_tokens: int
    """Tokens out."""
    cached_tokens: int
    """Of the prompts', those that were found in the prefix cache."""
    last_used_at: datetime | None


class AdapterUsage(Counters, kw_only=True):
    """Of one adapter name, the public tenant's too; it stays when the adapter goes."""

    adapter: str | None
    """None: the base alone."""
    tenant: str | None
    """Whose adapter it is."""


class TenantUsage(Counters, kw_only=True):
    tenant: str
    adapters: int
    """Names registered now."""
    adapter_bytes: int
    """Of all their versions together."""
    by_adapter: list[AdapterUsage]
    """A request on several adapters is in each of theirs, and once in the sums above."""


class UsageService:
    """Belongs to the event loop; the registry is asked in threads."""

    def __init__(self, store: AdapterStore, workers: Workers) -> None:
        self._store = store
        self._workers = workers

    def count(self, tenant: Tenant, records: Sequence[AdapterRecord], usage: Usage) -> None:
        """One request of `tenant` on these adapters; none: on the base alone."""
        counted = book.Usage(
            1,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens_details.cached_tokens,
            datetime.now(UTC),
        )
        self._store.usage.count(book.accounts(tenant.name, tenant.created_at, records), counted)

    async def of_tenant(self, tenant: str) -> TenantUsage:
        """Everything until now, written down first. Raises StoreError tenant_not_found."""
        found = await self._workers.changes(self._store.usage.of_tenant, tenant)
        return TenantUsage(
            tenant=tenant,
            adapters=found.adapters,
            adapter_bytes=found.adapter_bytes,
            by_adapter=[
                AdapterUsage(adapter=one.adapter or None, tenant=one.owner or None, **_counters(one.usage))
                for one in found.by_adapter
            ],
            **_counters(found.usage),
        )


def _counters(usage: book.Usage) -> dict[str, Any]:
    return {
        "requests": usage.requests,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "cached_tokens": usage.cached_tokens,
        "last_used_at": usage.last_used_at if usage.requests else None,
    }
