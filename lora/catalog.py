"""What adapters there are: questions to the registry, for the base that is served now. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.orm import Session

from . import registry
from .base import BaseModel
from .database import Database
from .errors import StoreError
from .records import AdapterRecord
from .registry import PUBLIC, Reference, Row
from .usage_book import UsageBook

Records = list[AdapterRecord]
Digests = list[str]


class AdapterCatalog:
    """Changes nothing. Synchronous and thread-safe."""

    def __init__(self, base: BaseModel, database: Database) -> None:
        self._base = base
        self._database = database
        self.usage = UsageBook(database)
        """What requests used; visible in records at once."""

    def get(self, ref: str, tenant: str = PUBLIC, *, shared: bool = False) -> AdapterRecord:
        """The version that `ref` (name, name@version, name@digest digits) means inside `tenant` alone, or with
        `shared` its own, then public's.

        Raises StoreError adapter_not_found.
        """

        def look(session: Session) -> Row | None:
            reference = Reference(ref)
            owner = registry.owner(session, tenant, reference.name) if shared else tenant
            return registry.find(session, reference, owner)

        row = self._database.read(look)
        if row is None:
            raise not_found(ref)
        return self._record(row)

    def resolve(self, ref: str, tenant: str = PUBLIC) -> AdapterRecord:
        """The version a request of `tenant` means by `ref`: its own adapter, then public's.

        A tenant's own name hides public's with all its versions. Raises StoreError model_not_found, or
        adapter_invalid if the version was made for another base.
        """
        return self.resolve_at(ref, tenant)[0]

    def resolve_at(self, ref: str, tenant: str = PUBLIC) -> tuple[AdapterRecord, int]:
        """As `resolve`, with the registry's revision: so long as that does not rise, the answer stays."""

        def look(session: Session) -> tuple[Row | None, int]:
            at = registry.revision(session)  # first: what is read after it may be newer, never older
            reference = Reference(ref)
            own = registry.find(session, reference, tenant)
            if own is not None or tenant == PUBLIC or registry.has_name(session, tenant, reference.name):
                return own, at
            return registry.find(session, reference, PUBLIC), at

        row, revision = self._database.read(look)
        if row is None:
            raise StoreError("model_not_found", f"there is no model or adapter {ref!r}", "model")
        record = self._record(row)
        if record.status == "incompatible":
            raise StoreError(
                "adapter_invalid",
                f"adapter {record.reference!r} was made for another base ({record.base_model!r})",
                "adapter",
            )
        return record, revision

    def list(self, tenant: str | None = PUBLIC) -> Records:
        """The current version of every name of `tenant` (None: of all tenants), ordered by tenant and
        name."""
        return self._read(tenant, current_only=True)

    def versions(self, name: str, tenant: str = PUBLIC, *, shared: bool = False) -> Records:
        """All versions under a name, oldest first, found as `get` does. Raises StoreError adapter_not_found."""

        def look(session: Session) -> Records:
            owner = registry.owner(session, tenant, name) if shared else tenant
            return registry.records(session, self._base.fingerprint, owner, name)

        found = self._database.read(look)
        if not found:
            raise not_found(name)
        return [self.usage.with_pending(record) for record in found]

    def all_versions(self) -> Records:
        """Every version of every tenant."""
        return self._read()

    def pinned(self) -> Records:
        """The current versions of the pinned names of all tenants, as far as they were made for this base."""
        fingerprint = self._base.fingerprint
        found = self._database.read(lambda session: registry.pinned(session, fingerprint))
        return [self.usage.with_pending(record) for record in found if record.status == "ready"]

    def revision(self) -> int:
        """Rises with every change of an adapter by anyone who uses this registry."""
        return self._database.read(registry.revision)

    def revision_at_once(self) -> int | None:
        """The same without waiting, for the event loop; None where that cannot be had."""
        return self._database.revision_at_once()

    def unreferenced(self, digests: Iterable[str]) -> Digests:
        """Those of `digests` that no version of anyone names."""
        wanted = sorted(set(digests))
        used = self._database.read(lambda session: registry.referenced(session, wanted))
        return [digest for digest in wanted if digest not in used]

    def _read(self, tenant: str | None = None, *, current_only: bool = False) -> Records:
        fingerprint = self._base.fingerprint
        found = self._database.read(
            lambda session: registry.records(session, fingerprint, tenant, current_only=current_only)
        )
        return [self.usage.with_pending(record) for record in found]

    def _record(self, row: Row) -> AdapterRecord:
        return self.usage.with_pending(row.record(self._base.fingerprint))


def not_found(ref: str) -> StoreError:
    return StoreError("adapter_not_found", f"there is no adapter {ref!r}", "name")
