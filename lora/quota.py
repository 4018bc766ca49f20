"""How much a tenant may register, held to where versions are made. Control code: no torch."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.orm import Session

from .errors import StoreError
from .registry import tenant_row
from .schema import AdapterRow, TenantRow
from .usage_tables import holdings


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a tenant's registrations; None: no limit."""

    adapters: int | None = None
    """Names."""
    adapter_bytes: int | None = None
    """Of all versions of all of them."""
    max_rank: int | None = None

    def check_name(self, session: Session, tenant: str, name: str, *, lock: bool = False) -> TenantRow | None:
        """Whether there may be an adapter of this name; the tenant's row, None where no count is limited.

        `lock`: until the transaction ends no other registration of the tenant is let past here, so that of two that
        fit only one by one, one is refused. Raises StoreError rate_limit_exceeded, tenant_not_found.
        """
        if self.adapters is None and self.adapter_bytes is None:
            return None
        owner = tenant_row(session, tenant)
        if lock:
            same = TenantRow.id == owner.id
            session.execute(sa.select(TenantRow.id).where(same).with_for_update(key_share=True))
        if self.adapters is not None and not _has(session, owner, name):
            names, _ = holdings(session, owner)
            if names >= self.adapters:
                raise reached("adapters", self.adapters, f"it has {names}")
        return owner

    def check(self, session: Session, tenant: str, name: str, size_bytes: int, *, lock: bool = False) -> None:
        """The same for a new version of so many bytes under that name."""
        owner = self.check_name(session, tenant, name, lock=lock)
        if owner is not None and self.adapter_bytes is not None:
            _, held = holdings(session, owner)
            if held + size_bytes > self.adapter_bytes:
                what = f"its adapters hold {held} bytes, and this one has {size_bytes}"
                raise reached("adapter_bytes", self.adapter_bytes, what)


def _has(session: Session, tenant: TenantRow, name: str) -> bool:
    query = sa.select(AdapterRow.current).where(AdapterRow.tenant_id == tenant.id, AdapterRow.name == name)
    return bool(session.scalar(query))


def reached(limit: str, value: int, what: str) -> StoreError:
    """The refusal of what is beyond a tenant's limit."""
    return StoreError("rate_limit_exceeded", f"the limit {limit} = {value} of this tenant is reached: {what}")
