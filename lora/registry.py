"""Who owns which adapter name and which versions it has: queries and changes of the registry's tables.

Functions take the session of a running transaction; `store` puts them together.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from .errors import StoreError
from .record_fields import COLUMNS, record
from .records import AdapterRecord
from .schema import AdapterRow, InstallationRow, Table, TenantRow, UsageRow, VersionRow
from .spec import AdapterSpec

PUBLIC = "public"
"""The tenant whose adapters everyone may use."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUERY_LIMIT = 500
"""Values in one query."""
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")


class Reference:
    """`name`, `name@version` or `name@` and 12 or more hex digits of the digest, taken apart.

    Digits alone are a version up to nine of them, and a digest from twelve on.
    """

    def __init__(self, text: str) -> None:
        self.name, at, selector = text.partition("@")
        self.bare = not at
        self.number = int(selector) if _NUMBER.fullmatch(selector) else None
        found = _DIGEST.fullmatch(selector)
        self.digest_prefix = f"sha256:{found[1]}" if found else None
        self.valid = NAME.fullmatch(self.name) is not None and (
            self.bare or self.number is not None or self.digest_prefix is not None
        )


class Row:
    """One version together with what belongs to it."""

    def __init__(
        self, tenant: TenantRow, adapter: AdapterRow, version: VersionRow, usage: UsageRow | None
    ) -> None:
        self.tenant = tenant
        self.adapter = adapter
        self.version = version
        self.usage = usage

    def record(self, fingerprint: str) -> AdapterRecord:
        """As plain data; `fingerprint` is the served base's."""
        of: dict[Any, Table | None] = {
            TenantRow: self.tenant,
            AdapterRow: self.adapter,
            VersionRow: self.version,
            UsageRow: self.usage,  # None where it was never used
        }
        return record([getattr(of[column.class_], column.key, None) for column in COLUMNS], fingerprint)


def _are_names(*texts: str | None) -> bool:
    """Whether each text that is given could be a name. What could not is asked of no database: PostgreSQL refuses a
    NUL even in a question."""
    return all(text is None or NAME.fullmatch(text) is not None for text in texts)


# ------------------------------------------------------------------ questions


def _versions(*columns: Any) -> sa.Select[Any]:
    return (
        sa.select(*columns)
        .select_from(TenantRow)
        .join(AdapterRow, AdapterRow.tenant_id == TenantRow.id)
        .join(VersionRow, VersionRow.adapter_id == AdapterRow.id)
        .outerjoin(UsageRow, UsageRow.version_id == VersionRow.id)
        .order_by(TenantRow.name, AdapterRow.name, VersionRow.number)
    )


_ROWS = _versions(TenantRow, AdapterRow, VersionRow, UsageRow)
"""Made once: every request asks it."""
_RECORDS = _versions(*COLUMNS)
_CURRENT = VersionRow.number == AdapterRow.current


def rows(
    session: Session, tenant: str | None = None, name: str | None = None, *, current_only: bool = False
) -> list[Row]:
    """Versions ordered by tenant, name and number."""
    if not _are_names(tenant, name):
        return []
    return [Row(*found) for found in session.execute(_narrowed(_ROWS, tenant, name, current_only))]


def records(
    session: Session,
    fingerprint: str,
    tenant: str | None = None,
    name: str | None = None,
    *,
    current_only: bool = False,
) -> list[AdapterRecord]:
    """As `rows`, for who changes nothing."""
    if not _are_names(tenant, name):
        return []
    found = session.execute(_narrowed(_RECORDS, tenant, name, current_only))
    return [record(values, fingerprint) for values in found]


def _narrowed(
    query: sa.Select[Any], tenant: str | None, name: str | None, current_only: bool
) -> sa.Select[Any]:
    if tenant is not None:
        query = query.where(TenantRow.name == tenant)
    if name is not None:
        query = query.where(AdapterRow.name == name)
    return query.where(_CURRENT) if current_only else query


def find(session: Session, reference: Reference, tenant: str) -> Row | None:
    """The version that `reference` means inside `tenant`; None if there is none, or a digest prefix fits
    several."""
    if not reference.valid:
        return None
    found = rows(session, tenant, reference.name, current_only=reference.bare)
    if not reference.bare:
        by_number = [row for row in found if row.version.number == reference.number]
        prefix = reference.digest_prefix
        by_digest = [row for row in found if prefix is not None and row.version.digest.startswith(prefix)]
        if not by_number and len({row.version.digest for row in by_digest}) > 1:
            return None
        # One digest may stand under several numbers (a rollback by registration): the newest of them.
        found = by_number or by_digest[-1:]
    return found[0] if found else None


def referenced(session: Session, digests: Iterable[str]) -> set[str]:
    """Those of `digests` that some version of anyone names."""
    wanted = list(digests)
    found: set[str] = set()
    for begin in range(0, len(wanted), _QUERY_LIMIT):
        part = wanted[begin : begin + _QUERY_LIMIT]
        found.update(session.scalars(sa.select(VersionRow.digest).where(VersionRow.digest.in_(part))))
    return found


def pinned(session: Session, fingerprint: str) -> list[AdapterRecord]:
    """The current version of every pinned name of anyone."""
    found = session.execute(_RECORDS.where(_CURRENT, AdapterRow.pinned))
    return [record(values, fingerprint) for values in found]


def revision(session: Session) -> int:
    """Rises with every committed change of adapters."""
    return session.scalars(sa.select(InstallationRow.revision)).one()


def has_name(session: Session, tenant: str, name: str) -> bool:
    return bool(rows(session, tenant, name, current_only=True))


def owner(session: Session, tenant: str, name: str) -> str:
    """Whose adapter `tenant` means by `name`: its own, which hides public's with all its versions, or public's."""
    return tenant if has_name(session, tenant, name) else PUBLIC


# ------------------------------------------------------------------ changes


def tenant_row(session: Session, tenant: str, *, locked: bool = False) -> TenantRow:
    """`locked`: until the transaction ends nobody else changes the tenant, or adds anything that is the tenant's.

    Raises StoreError tenant_not_found.
    """
    found = None
    if _are_names(tenant):
        query = sa.select(TenantRow).where(TenantRow.name == tenant)
        found = session.scalars(query.with_for_update() if locked else query).one_or_none()
    if found is None:
        raise StoreError("tenant_not_found", f"there is no tenant {tenant!r}")
    return found


def count_change(session: Session) -> None:
    """Tell the other servers of this registry. Last in a transaction: it holds up other writers until the
    end."""
    session.execute(sa.update(InstallationRow).values(revision=InstallationRow.revision + 1))


def locked_adapter(session: Session, tenant: TenantRow, name: str) -> AdapterRow | None:
    """The name's row, also where it has no version any more; until the transaction ends nobody else changes
    it."""
    if not _are_names(name):
        return None
    query = sa.select(AdapterRow).where(AdapterRow.tenant_id == tenant.id, AdapterRow.name == name)
    return session.scalars(query.with_for_update()).one_or_none()


def add_version(
    session: Session,
    tenant: TenantRow,
    adapter: AdapterRow | None,
    *,
    name: str,
    spec: AdapterSpec,
    fingerprint: str,
    source: str | None,
) -> Row:
    """A new version of `name`, current from now on; a new name if `adapter` is None or has no version."""
    now = datetime.now(UTC)
    if adapter is None:
        adapter = AdapterRow(tenant_id=tenant.id, name=name, current=0, last_number=0)
        session.add(adapter)
    if not adapter.current:  # of an earlier adapter of this name only the count of versions goes on
        adapter.public_id = f"adapter-{uuid.uuid4().hex}"
        adapter.pinned = False
        adapter.description = None
        adapter.created_at = now
        session.flush()
    adapter.last_number += 1
    adapter.current = adapter.last_number
    version = VersionRow(
        adapter_id=adapter.id,
        number=adapter.last_number,
        digest=spec.digest,
        fingerprint=fingerprint,
        base_model=spec.base_model,
        rank=spec.rank,
        target_modules=spec.target_modules,
        size_bytes=spec.size_bytes,
        dtype=spec.dtype,
        max_abs=spec.max_abs,
        matched=spec.matched,
        total=spec.total,
        warnings=spec.warnings,
        source=source,
        created_at=now,
    )
    session.add(version)
    session.flush()
    return Row(tenant, adapter, version, None)


def remove_versions(
    session: Session, adapter: AdapterRow, doomed: Sequence[Row], kept: Sequence[Row]
) -> None:
    """Remove `doomed`; the highest of `kept` becomes current if the current one goes; none kept: the name is
    gone, and only how far it counted stays."""
    ids = [row.version.id for row in doomed]
    for begin in range(0, len(ids), _QUERY_LIMIT):
        session.execute(sa.delete(VersionRow).where(VersionRow.id.in_(ids[begin : begin + _QUERY_LIMIT])))
    numbers = [row.version.number for row in kept]
    if adapter.current not in numbers:
        adapter.current = max(numbers, default=0)
        adapter.pinned = adapter.pinned and bool(numbers)
    session.flush()
