"""Usage in the registry: counters that servers add to, and what is asked about a tenant. Control code: no torch.

Functions take the session of a running transaction; `store` puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.orm import Session

from .registry import tenant_row
from .schema import AdapterRow, TenantAdapterUsageRow, TenantRow, TenantUsageRow, UsageRow, VersionRow
from .usage import Account, OfAdapter, OfTenant, OfVersion, Usage

_Table = type[UsageRow] | type[TenantUsageRow] | type[TenantAdapterUsageRow]


class AdapterUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant used of one adapter; of the base alone where `owner` and `adapter` are empty."""

    owner: str
    adapter: str
    usage: Usage


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant used since it was made, and what it holds now."""

    usage: Usage
    by_adapter: list[AdapterUsage]
    """Ordered by owner and name. A request on several adapters is in each of theirs, and once in `usage`."""
    adapters: int
    """Names."""
    adapter_bytes: int
    """Of all their versions."""


def add(session: Session, pending: Mapping[Account, Usage]) -> None:
    """Add to the counters. What was counted for a version or a tenant that is gone is dropped, also where a
    tenant of that name was made again since."""
    ids = _ids(session, {a.tenant for a in pending if not isinstance(a, OfVersion)})
    for account, usage in sorted(pending.items(), key=lambda item: (type(item[0]).__name__, item[0])):
        match account:
            case OfVersion(version_id):
                exists = sa.select(VersionRow.id).where(VersionRow.id == version_id)
                _add(session, UsageRow, {"version_id": version_id}, exists, usage)
            case OfTenant(tenant, since):
                if (owner_id := ids.get((tenant, since))) is not None:
                    _add(session, TenantUsageRow, {"tenant_id": owner_id}, None, usage)
            case OfAdapter(tenant, since, owner, adapter):
                if (owner_id := ids.get((tenant, since))) is not None:
                    keys = {"tenant_id": owner_id, "owner": owner, "adapter": adapter}
                    _add(session, TenantAdapterUsageRow, keys, None, usage)


def _add(
    session: Session,
    table: _Table,
    keys: dict[str, Any],
    exists: sa.Select[Any] | None,
    usage: Usage,
) -> None:
    """Add to one row, or make it where `exists` (None: anyhow) finds what it is about."""
    counts = {
        "requests": usage.requests,
        "prompt_tokens": usage.prompt_tokens,
        "generated_tokens": usage.generated_tokens,
    }
    if table is not UsageRow:
        counts["cached_tokens"] = usage.cached_tokens
    columns = table.__table__.c
    later = sa.case(
        (columns.last_used_at < usage.last_used_at, usage.last_used_at), else_=columns.last_used_at
    )
    values = {name: columns[name] + count for name, count in counts.items()}
    where = [columns[name] == key for name, key in keys.items()]
    done = session.execute(sa.update(table).where(*where).values(**values, last_used_at=later))
    if done.rowcount == 0 and (exists is None or session.scalar(exists) is not None):  # type: ignore[attr-defined]
        session.execute(sa.insert(table).values(**keys, **counts, last_used_at=usage.last_used_at))


def _ids(session: Session, names: set[str]) -> dict[tuple[str, datetime], int]:
    """By name and when it was made. Not ids throughout: SQLite gives a removed row's id again."""
    rows = session.scalars(sa.select(TenantRow).where(TenantRow.name.in_(sorted(names))))
    return {(row.name, row.created_at): row.id for row in rows}


def of_tenant(session: Session, tenant: str) -> TenantUsage:
    """Raises StoreError tenant_not_found."""
    owner = tenant_row(session, tenant)
    total = session.get(TenantUsageRow, owner.id)
    rows = session.scalars(
        sa.select(TenantAdapterUsageRow)
        .where(TenantAdapterUsageRow.tenant_id == owner.id)
        .order_by(TenantAdapterUsageRow.owner, TenantAdapterUsageRow.adapter)
    )
    adapters, size = holdings(session, owner)
    return TenantUsage(
        usage=Usage() if total is None else _usage(total),
        by_adapter=[AdapterUsage(owner=r.owner, adapter=r.adapter, usage=_usage(r)) for r in rows],
        adapters=adapters,
        adapter_bytes=size,
    )


def holdings(session: Session, tenant: TenantRow) -> tuple[int, int]:
    """Names of adapters that a tenant has, and bytes of all their versions."""
    query = (
        sa.select(
            sa.func.count(sa.distinct(AdapterRow.id)), sa.func.coalesce(sa.func.sum(VersionRow.size_bytes), 0)
        )
        .join(VersionRow, VersionRow.adapter_id == AdapterRow.id)
        .where(AdapterRow.tenant_id == tenant.id)
    )
    names, size = session.execute(query).one()
    return int(names), int(size)


def _usage(row: TenantUsageRow | TenantAdapterUsageRow) -> Usage:
    return Usage(row.requests, row.prompt_tokens, row.generated_tokens, row.cached_tokens, row.last_used_at)
