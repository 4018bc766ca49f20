"""Tenants and their keys in the registry. Synchronous and thread-safe; the server calls it in worker threads."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ...lora import registry
from ...lora.database import Database
from ...lora.errors import StoreError
from ...lora.schema import AdapterRow, InstallationRow, KeyRow, TenantRow, VersionRow
from . import keys
from .records import PUBLIC, Key, Limits, Tenant

T = TypeVar("T")


class Snapshot(msgspec.Struct, frozen=True):
    """All that calls are let in by."""

    revision: int
    """No newer than the rest."""
    tenants: list[Tenant]
    keys: list[Key]
    """Those that are not revoked."""


class Changed(NamedTuple, Generic[T]):
    """What a change made, and the revision it made of the registry."""

    value: T
    revision: int


class TenantStore:
    """Every change is durable when its call returns. Refusals are `StoreError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # ---------------------------------------------------------------- questions

    def revision(self) -> int:
        """Rises with every change of a tenant or key by anyone who uses this registry."""
        return self._database.read(_revision)

    def any_revision_at_once(self) -> int | None:
        """Rises with every change of the registry, those of adapters too; None where it is not to be had without
        waiting."""
        return self._database.revision_at_once()

    def snapshot(self) -> Snapshot:
        def read(session: Session) -> Snapshot:
            revision = _revision(session)
            tenants = [_tenant(row) for row in session.execute(_TENANTS)]
            usable = _KEYS.where(KeyRow.revoked_at.is_(None))
            return Snapshot(revision, tenants, [_key(row) for row in session.execute(usable).mappings()])

        return self._database.read(read)

    def keys(self, tenant: str) -> list[Key]:
        """All it ever had, oldest first, the revoked ones too. Raises tenant_not_found."""

        def read(session: Session) -> list[Key]:
            owner = registry.tenant_row(session, tenant)
            query = _KEYS.where(KeyRow.tenant_id == owner.id).order_by(KeyRow.created_at, KeyRow.id)
            return [_key(row) for row in session.execute(query).mappings()]

        return self._database.read(read)

    # ---------------------------------------------------------------- tenants

    def create(self, name: str, weight: float, limits: Limits) -> Changed[Tenant]:
        """Raises invalid_request (name), tenant_exists."""
        if registry.NAME.fullmatch(name) is None:
            raise StoreError(
                "invalid_request",
                "name must be 1 to 128 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit",
                "name",
            )

        def add(session: Session) -> Changed[Tenant]:
            if session.scalars(sa.select(TenantRow.id).where(TenantRow.name == name)).first() is not None:
                raise StoreError("tenant_exists", f"tenant {name!r} exists", "name")
            row = TenantRow(name=name, weight=weight, limits=_set(limits), created_at=datetime.now(UTC))
            session.add(row)
            session.flush()
            return Changed(_tenant(row), _count_change(session))

        return self._database.write(add)

    def change(self, name: str, weight: float | None, limits: Callable[[Limits], Limits]) -> Changed[Tenant]:
        """Set the weight where one is given, and the limits to what `limits` makes of them. Raises
        tenant_not_found."""

        def change(session: Session) -> Changed[Tenant]:
            row = registry.tenant_row(session, name, locked=True)
            if weight is not None:
                row.weight = weight
            unknown = {limit: value for limit, value in row.limits.items() if limit not in _LIMITS}
            row.limits = unknown | _set(limits(_limits(row.limits)))
            session.flush()
            return Changed(_tenant(row), _count_change(session))

        return self._database.write(change)

    def remove(self, name: str) -> Changed[list[str]]:
        """Remove a tenant with its keys, adapters and usage. Returns the digests its versions named.

        Their files stay until `AdapterStore.collect`. Raises tenant_not_found, invalid_request for public.
        """
        if name == PUBLIC:
            raise StoreError("invalid_request", f"tenant {PUBLIC} always exists and cannot be removed")

        def remove(session: Session) -> Changed[list[str]]:
            # From here on whoever registers an adapter of it has done so, or finds no tenant.
            row = registry.tenant_row(session, name, locked=True)
            query = sa.select(VersionRow.digest).join(AdapterRow).where(AdapterRow.tenant_id == row.id)
            digests = sorted(set(session.scalars(query)))
            session.execute(sa.delete(TenantRow).where(TenantRow.id == row.id))
            return Changed(digests, _count_change(session))

        return self._database.write(remove)

    # ---------------------------------------------------------------- keys

    def create_key(
        self, tenant: str, description: str | None, expires_at: datetime | None
    ) -> Changed[tuple[Key, str]]:
        """A new key of the tenant, and the key itself, which is kept nowhere. Raises tenant_not_found."""

        def add(session: Session) -> Changed[tuple[Key, str]]:
            owner, text = registry.tenant_row(session, tenant, locked=True), keys.new_key()
            key = Key(
                id=f"key-{uuid.uuid4().hex}",
                tenant=tenant,
                description=description,
                prefix=keys.prefix_of(text),
                sha256=keys.sha256_of(text),
                created_at=datetime.now(UTC),
                expires_at=expires_at,
            )
            fields = {name: value for name, value in msgspec.structs.asdict(key).items() if name != "tenant"}
            session.add(KeyRow(tenant_id=owner.id, **fields))
            session.flush()
            return Changed((key, text), _count_change(session))

        return self._database.write(add)

    def revoke(self, tenant: str, key_id: str) -> Changed[Key] | None:
        """The tenant's key, which opens nothing any more; None: it has no such key. Raises tenant_not_found."""

        def revoke(session: Session) -> Changed[Key] | None:
            owner = registry.tenant_row(session, tenant)
            if _KEY_ID.fullmatch(key_id) is None:
                return None
            mine = sa.select(KeyRow).where(KeyRow.id == key_id, KeyRow.tenant_id == owner.id)
            row = session.scalars(mine.with_for_update()).one_or_none()
            if row is None:
                return None
            revision = _revision(session)
            if row.revoked_at is None:
                row.revoked_at = datetime.now(UTC)
                session.flush()
                revision = _count_change(session)
            return Changed(_key(session.execute(_KEYS.where(KeyRow.id == key_id)).mappings().one()), revision)

        return self._database.write(revoke)

    def mark_used(self, used: Mapping[str, datetime]) -> None:
        """Note when keys were last used, by their ids; nothing happens to those that are gone."""

        def mark(session: Session) -> None:
            rows = [{"key": key_id, "moment": moment} for key_id, moment in sorted(used.items())]
            session.connection().execute(_MARK_USED, rows)

        self._database.write(mark)


_KEY_ID = re.compile("key-[0-9a-f]{32}")
_LIMITS = frozenset(Limits.__struct_fields__)
_TENANTS = sa.select(TenantRow.name, TenantRow.weight, TenantRow.limits, TenantRow.created_at)
# Columns, not rows as objects: a registry may hold thousands, and servers read all of them at a change.
_KEYS = sa.select(
    *(getattr(KeyRow, name) for name in Key.__struct_fields__ if name != "tenant"),
    TenantRow.name.label("tenant"),
).join(TenantRow, KeyRow.tenant_id == TenantRow.id)

_MARK_USED = (
    sa.update(KeyRow)
    .where(
        KeyRow.id == sa.bindparam("key"),
        sa.or_(KeyRow.last_used_at.is_(None), KeyRow.last_used_at < sa.bindparam("moment")),
    )
    .values(last_used_at=sa.bindparam("moment"))
)


def _revision(session: Session) -> int:
    return session.scalars(sa.select(InstallationRow.tenants_revision)).one()


def _count_change(session: Session) -> int:
    """Tell the other servers of this registry. Last in a transaction. Returns the new revision."""
    next_revision = InstallationRow.tenants_revision + 1
    session.execute(sa.update(InstallationRow).values(tenants_revision=next_revision))
    registry.count_change(session)
    return _revision(session)


def _tenant(row: TenantRow | sa.Row[tuple[str, float, dict[str, Any], datetime]]) -> Tenant:
    return Tenant(name=row.name, weight=row.weight, limits=_limits(row.limits), created_at=row.created_at)


def _limits(stored: Mapping[str, object]) -> Limits:
    """A newer server may have stored limits that this one does not know."""
    known = {name: value for name, value in stored.items() if name in _LIMITS}
    return msgspec.convert(known, Limits)


def _set(limits: Limits) -> dict[str, object]:
    return {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}


def _key(row: sa.RowMapping) -> Key:
    return Key(**{str(name): value for name, value in row.items()})
