"""The registry's tables. Changes to them need a migration in `migrations/versions`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Double,
    ForeignKey,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A moment; SQLite keeps no time zone, so all are stored as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Table(DeclarativeBase):
    """Base of all tables. Constraints have names, so that a migration can change them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class InstallationRow(Table):
    """One row: which registry this is. Registries that share a blob store keep their files apart by it."""

    __tablename__ = "installation"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Rises with every change of adapters or tenants: by it the servers that share a registry see each other's."""
    tenants_revision: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Rises with those of tenants and keys alone, which are far fewer than those of adapters."""


class TenantRow(Table):
    __tablename__ = "tenants"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    weight: Mapped[float] = mapped_column(Double, server_default="1")
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, server_default=text("'{}'"))
    """Those that are set, by name."""


class KeyRow(Table):
    """A key that opens one tenant. The key itself is kept nowhere."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    description: Mapped[str | None] = mapped_column(Text)
    prefix: Mapped[str] = mapped_column(String(32))
    """What it begins with, for people to recognise it by."""
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    """Of the whole key, as hex digits."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AdapterRow(Table):
    """A name of a tenant. It stays when its last version is removed, so that no number is given again."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(String(40), unique=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(128))
    pinned: Mapped[bool]
    description: Mapped[str | None] = mapped_column(Text)
    current: Mapped[int]
    """Number of the version that the bare name means; that version exists. 0: there is none."""
    last_number: Mapped[int]
    """The highest number ever given: `name@number` never comes to mean other weights."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class VersionRow(Table):
    """One registration's weights under a name; never changed."""

    __tablename__ = "versions"
    # Without AUTOINCREMENT SQLite gives a removed row's id again, and late usage would go to a stranger.
    __table_args__ = (UniqueConstraint("adapter_id", "number"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(71), index=True)
    fingerprint: Mapped[str] = mapped_column(String(128))
    base_model: Mapped[str] = mapped_column(Text)
    rank: Mapped[int]
    target_modules: Mapped[list[Any]] = mapped_column(JSON)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    dtype: Mapped[str] = mapped_column(String(32))
    max_abs: Mapped[float] = mapped_column(Double)
    matched: Mapped[int]
    total: Mapped[int]
    warnings: Mapped[list[Any]] = mapped_column(JSON)
    source: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class UsageRow(Table):
    """Counters of one version; apart from it, because they change with every request."""

    __tablename__ = "usage"
    version_id: Mapped[int] = mapped_column(ForeignKey("versions.id", ondelete="CASCADE"), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    last_used_at: Mapped[datetime] = mapped_column(UtcDateTime)


class TenantUsageRow(Table):
    """Counters of a tenant, whatever it used."""

    __tablename__ = "tenant_usage"
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    last_used_at: Mapped[datetime] = mapped_column(UtcDateTime)


class TenantAdapterUsageRow(Table):
    """Counters of a tenant's use of one adapter name. They stay when the adapter goes: what was used was used."""

    __tablename__ = "tenant_adapter_usage"
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    """The tenant the adapter belongs to. Empty, as `adapter`: the base alone."""
    adapter: Mapped[str] = mapped_column(String(128), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    last_used_at: Mapped[datetime] = mapped_column(UtcDateTime)
