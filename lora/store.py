"""The adapters of all tenants: registered, versioned, found, removed; files in a blob store, rows in a
database.

Order of a registration: the blob is written whole, then one transaction makes it a version. A kill in between
leaves a blob that no version names; it is removed at the next start. Whoever removes a blob does so inside a
transaction that holds the digest's lock and saw no version of it; whoever adds a version holds the same lock
and sees that the blob is (still) there. What a request of any server on this blob store keeps is not removed
before it ends. Synchronous and thread-safe; the server calls it in worker threads. Control code: no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from . import canonical, durable, registry
from .base import BaseModel
from .blobs import Blobs, Kept, open_blobs
from .catalog import AdapterCatalog, Digests, not_found
from .database import Database
from .errors import StoreError
from .inspect import inspect
from .quota import Quota
from .records import AdapterRecord, Registration, Removal, planned
from .registry import PUBLIC, Reference, Row
from .spec import AdapterSpec

UNLIMITED = Quota()


class AdapterStore(AdapterCatalog):
    """Everything that is known about adapters, and it survives restarts.

    Refusals are `StoreError` (with a code of the HTTP interface) and `AdapterInvalid` (code
    `adapter_invalid`).
    """

    def __init__(
        self,
        base: BaseModel,
        database: Database,
        blobs: Blobs,
        *,
        reserved_names: Collection[str] = (),
        max_rank: int = 512,
        max_bytes: int = 2 << 30,
    ) -> None:
        super().__init__(base, database)
        self._blobs = blobs
        self._reserved = frozenset(reserved_names)
        self._max_rank = max_rank
        self._max_bytes = max_bytes

    @classmethod
    def open(
        cls,
        data_dir: Path,
        base: BaseModel,
        *,
        database: str | None = None,
        blob_store: str | None = None,
        reserved_names: Collection[str] = (),
        max_rank: int = 512,
        max_bytes: int = 2 << 30,
    ) -> AdapterStore:
        """Open or create the store.

        `database`: SQLAlchemy URL; None: SQLite in `data_dir`. `blob_store`: fsspec URL; None: a folder in
        `data_dir`. `reserved_names`: names no adapter may have (those the base is served under). Leftovers of
        interrupted registrations are cleared. Raises StoreError invalid_request if either cannot be used.
        """
        data_dir = data_dir.resolve()
        durable.make_folder(data_dir, mode=0o700)
        opened = Database(database or sa.URL.create("sqlite", database=str(data_dir / "registry.sqlite")))
        blobs = open_blobs(blob_store, data_dir, opened.installation())
        store = cls(
            base, opened, blobs, reserved_names=reserved_names, max_rank=max_rank, max_bytes=max_bytes
        )
        store.collect(blobs.digests())
        return store

    @property
    def database(self) -> Database:
        """Where all of the registry lies; closed with the store."""
        return self._database

    def close(self) -> None:
        """Write the usage counters and let go of the database."""
        self.usage.flush()
        self._database.close()

    # ---------------------------------------------------------------- registration

    def register(
        self,
        folder: Path,
        *,
        name: str,
        tenant: str = PUBLIC,
        replace: bool = False,
        pinned: bool | None = None,
        description: str | None = None,
        dry_run: bool = False,
        source: str | None = None,
        quota: Quota = UNLIMITED,
    ) -> Registration:
        """Check the PEFT adapter in `folder` (which nobody else may be writing) and make it a version of
        `name`.

        Where the name's current version already holds the same weights for the same base, no version is made.
        `pinned` and `description` change the name's when they are given, in either case. A dry run checks all
        the same and changes nothing. Raises AdapterInvalid; StoreError invalid_request (name),
        adapter_exists, tenant_not_found, rate_limit_exceeded (beyond `quota`), overloaded.
        """
        spec = self._checked(folder, name, tenant, replace, quota)
        if dry_run:
            record = planned(spec, name, tenant, bool(pinned), description, source)
            return Registration(record=record, spec=spec, created=False, replaced=False)

        def add(session: Session) -> Registration | None:
            self._database.lock(session, spec.digest)
            if not self._blobs.exists(spec.digest):
                return None  # removed since it was written
            owner = registry.tenant_row(session, tenant)
            adapter = registry.locked_adapter(session, owner, name)
            row = self._current_version(session, tenant, name, spec, replace)
            created, replaced = row is None, adapter is not None and adapter.current > 0
            if row is None:
                quota.check(session, tenant, name, spec.size_bytes, lock=True)
                row = registry.add_version(
                    session,
                    owner,
                    adapter,
                    name=name,
                    spec=spec,
                    fingerprint=self._base.fingerprint,
                    source=source,
                )
            if pinned is not None:
                row.adapter.pinned = pinned
            if description is not None:
                row.adapter.description = description
            record = self._record(row)
            registry.count_change(session)
            return Registration(record=record, spec=spec, created=created, replaced=created and replaced)

        done = None
        stored_before = self._blobs.exists(spec.digest)
        while done is None:
            self._write_blob(spec, folder)
            try:
                done = self._database.write(add)
            except StoreError:
                if not stored_before:
                    self.collect([spec.digest])
                raise
        return done

    def stage(
        self,
        folder: Path,
        *,
        name: str,
        tenant: str = PUBLIC,
        replace: bool = False,
        description: str | None = None,
        source: str | None = None,
        quota: Quota = UNLIMITED,
    ) -> AdapterRecord:
        """Check as `register` does and write the file alone: what it is going to make, which no version names
        yet."""
        spec = self._checked(folder, name, tenant, replace, quota)
        self._write_blob(spec, folder)
        return planned(spec, name, tenant, True, description, source)

    def check_room(self, name: str, tenant: str, quota: Quota) -> None:
        """Refuse as `register` does what can be refused by the name alone, before anything is fetched or read."""
        self._check_name(name)
        self._database.read(lambda session: quota.check_name(session, tenant, name))

    def _checked(self, folder: Path, name: str, tenant: str, replace: bool, quota: Quota) -> AdapterSpec:
        """What is in `folder`, if it may become a version of `name`; the transaction that makes it one decides."""
        self.check_room(name, tenant, quota)
        max_rank = min(self._max_rank, self._max_rank if quota.max_rank is None else quota.max_rank)
        spec = inspect(folder, self._base, max_rank=max_rank, max_bytes=self._max_bytes)

        def look(session: Session) -> None:
            if self._current_version(session, tenant, name, spec, replace) is None:
                quota.check(session, tenant, name, spec.size_bytes)

        self._database.read(look)
        return spec

    def _write_blob(self, spec: AdapterSpec, folder: Path) -> None:
        """Raises StoreError overloaded where the blob store is full or gone: another time it may be there."""
        try:
            self._blobs.put(spec.digest, lambda path: canonical.write(spec, folder, path))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError("overloaded", f"the adapter's file cannot be stored now: {reason}") from error

    def _check_name(self, name: str) -> None:
        if registry.NAME.fullmatch(name) is None:
            raise StoreError(
                "invalid_request",
                "name must be 1 to 128 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit",
                "name",
            )
        if name in self._reserved:
            raise StoreError("adapter_exists", f"{name!r} is the name the base is served under", "name")

    def _current_version(
        self, session: Session, tenant: str, name: str, spec: AdapterSpec, replace: bool
    ) -> Row | None:
        """The name's current version if it is just what `spec` says; None: a new one is to be made.

        Raises StoreError tenant_not_found, and adapter_exists if another one is there and may not be
        replaced.
        """
        registry.tenant_row(session, tenant)
        row = registry.find(session, Reference(name), tenant)
        if row is None:
            return None
        same_weights = row.version.digest == spec.digest
        if same_weights and row.version.fingerprint == self._base.fingerprint:
            return row
        if not replace:
            how = "made for another base" if same_weights else "with other weights"
            message = f"adapter {name!r} exists, {how}; set replace to make a new version of it"
            raise StoreError("adapter_exists", message, "name")
        return None

    # ---------------------------------------------------------------- files

    def path(self, digest: str) -> Path:
        """A local file with the canonical form of `digest`. Raises AdapterCorrupt if the blob store lost
        it."""
        return self._blobs.path(digest)

    def keep(self, digest: str) -> Kept | None:
        """The local file of `digest` stays until the `close` of what is returned; None: there is none."""
        return self._blobs.keep(digest)

    # ---------------------------------------------------------------- changes

    def patch(
        self,
        name: str,
        tenant: str = PUBLIC,
        *,
        pinned: bool | None = None,
        description: str | None = None,
        version: int | None = None,
    ) -> AdapterRecord:
        """Change what is not None; `version` makes that one current again. Raises StoreError
        adapter_not_found."""

        def change(session: Session) -> AdapterRecord:
            adapter = self._locked(session, name, tenant)
            if version is not None:
                if all(row.version.number != version for row in registry.rows(session, tenant, name)):
                    raise not_found(f"{name}@{version}")
                adapter.current = version
            if pinned is not None:
                adapter.pinned = pinned
            if description is not None:
                adapter.description = description
            session.flush()
            registry.count_change(session)
            return self._record(registry.rows(session, tenant, name, current_only=True)[0])

        return self._database.write(change)

    def remove(self, ref: str, tenant: str = PUBLIC) -> Removal:
        """Remove a name with all versions, or the one version that `ref` says. Files stay until `collect`.

        If the current version goes, the highest that remains becomes current. Raises StoreError
        adapter_not_found.
        """
        reference = Reference(ref)

        def change(session: Session) -> Removal:
            adapter = self._locked(session, reference.name, tenant)
            found = registry.rows(session, tenant, reference.name)
            one = registry.find(session, reference, tenant)
            if one is None:
                raise not_found(ref)
            doomed = found if reference.bare else [one]
            kept = [row for row in found if row.version.number not in {r.version.number for r in doomed}]
            removed = [self._record(row) for row in doomed]
            registry.remove_versions(session, adapter, doomed, kept)
            registry.count_change(session)
            digests = {record.digest for record in removed}
            left = registry.rows(session, tenant, reference.name, current_only=True)
            return Removal(
                removed=removed,
                current=self._record(left[0]) if left else None,
                unreferenced=sorted(digests - registry.referenced(session, digests)),
            )

        return self._database.write(change)

    def collect(self, digests: Iterable[str]) -> Digests:
        """Delete the files of those digests that no version names and nobody keeps; returns them. Call once
        this server's engine needs them no more."""

        def delete(session: Session, digest: str) -> bool:
            self._database.lock(session, digest)
            return not registry.referenced(session, [digest]) and self._blobs.delete(digest)

        return [
            digest
            for digest in self.unreferenced(digests)
            if self._database.write(lambda session, digest=digest: delete(session, digest))  # type: ignore[misc]
        ]

    # ---------------------------------------------------------------- parts

    def _locked(self, session: Session, name: str, tenant: str) -> registry.AdapterRow:
        owner = registry.tenant_row(session, tenant)
        adapter = registry.locked_adapter(session, owner, name)
        if adapter is None or not adapter.current:
            raise not_found(name)
        return adapter
