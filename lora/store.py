"""The adapters of all tenants: registered, versioned, found, removed; files in a blob store, rows in a
database.

Synchronous and thread-safe; the server calls it in worker threads. Control code: no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from .base import BaseModel
from .records import AdapterRecord, Registration, Removal

PUBLIC = "public"


class AdapterStore:
    """Everything that is known about adapters, and it survives restarts.

    Refusals are `StoreError` (with a code of the HTTP interface) and `AdapterInvalid` (code
    `adapter_invalid`)."""

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
        interrupted registrations are cleared."""
        raise NotImplementedError

    def close(self) -> None:
        """Write the usage counters and let go of the database."""
        raise NotImplementedError

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
    ) -> Registration:
        """Check the PEFT adapter in `folder` (which nobody else may be writing) and make it a version of
        `name`.

        Raises AdapterInvalid; StoreError invalid_request (name), adapter_exists, tenant_not_found.
        """
        raise NotImplementedError

    def get(self, ref: str, tenant: str = PUBLIC) -> AdapterRecord:
        """The version that `ref` (name, name@version, name@digest digits) means inside `tenant` alone.

        Raises StoreError adapter_not_found.
        """
        raise NotImplementedError

    def resolve(self, ref: str, tenant: str = PUBLIC) -> AdapterRecord:
        """The version a request of `tenant` means by `ref`: its own adapter, then public's.

        Raises StoreError model_not_found, or adapter_invalid if it was made for another base.
        """
        raise NotImplementedError

    def list(self, tenant: str | None = PUBLIC) -> list[AdapterRecord]:
        """The current version of every name of `tenant` (None: of all tenants), ordered by tenant and
        name."""
        raise NotImplementedError

    def versions(self, name: str, tenant: str = PUBLIC) -> list[AdapterRecord]:
        """All versions under a name, oldest first. Raises StoreError adapter_not_found."""
        raise NotImplementedError

    def all_versions(self) -> list[AdapterRecord]:
        """Every version of every tenant: what an engine is told when it starts."""
        raise NotImplementedError

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
        raise NotImplementedError

    def remove(self, ref: str, tenant: str = PUBLIC) -> Removal:
        """Remove a name with all versions, or the one version that `ref` says. Files stay until `collect`.

        If the current version goes, the highest that remains becomes current. Raises StoreError
        adapter_not_found."""
        raise NotImplementedError

    def path(self, digest: str) -> Path:
        """A local file with the canonical form of `digest`. Raises AdapterCorrupt if the blob store lost
        it."""
        raise NotImplementedError

    def collect(self, digests: Iterable[str]) -> list[str]:
        """Delete the files of those digests that no version names; returns them. Call once no engine needs
        them."""
        raise NotImplementedError

    def touch(
        self, version_id: int, *, requests: int = 1, prompt_tokens: int = 0, generated_tokens: int = 0
    ) -> None:
        """Count usage; cheap, and visible in records at once. Written to the database by `flush_usage`."""
        raise NotImplementedError

    def flush_usage(self) -> None:
        """Write counted usage to the database in one transaction."""
        raise NotImplementedError
