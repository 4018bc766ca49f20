"""What the store hands out: adapter versions as plain data. Control code: no torch."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from .spec import AdapterSpec

AdapterStatus = Literal["ready", "incompatible"]


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a named adapter. What only a running engine knows (residency, blocks, in use) is not in
    it."""

    id: str
    """Stays the same over all versions of the name."""
    name: str
    tenant: str
    version: int | None
    """From 1 under the name, and never given twice, also where the name was removed meanwhile. None in the
    answer of a dry run."""
    version_id: int | None
    """The store's own key of this version, for `AdapterStore.touch`; never shown to users."""
    digest: str
    """`sha256:` and 64 hex digits."""
    status: AdapterStatus
    """`incompatible`: made for another base than the one that is served now."""
    current: bool
    """Whether the bare name means this version."""
    pinned: bool
    """Of the name, thus of its current version; False in the record of an older version."""
    rank: int
    """The largest of its modules."""
    target_modules: list[str]
    size_bytes: int
    """Of A and B together, in the number form they were registered in."""
    dtype: str
    """Their number form: F32, F16 or BF16; several joined by `+`."""
    max_abs: float
    """The largest magnitude in A and B; beyond 65504 it cannot be held as float16."""
    matched: int
    """Tensors of the file that were understood: all, or the adapter would have been refused."""
    total: int
    warnings: list[str]
    base_model: str
    """The served name of the base it was checked against."""
    description: str | None
    source: str | None
    """Where it was taken from; None for an upload."""
    requests: int
    prompt_tokens: int
    generated_tokens: int
    created_at: datetime
    last_used_at: datetime | None
    tenant_since: datetime | None = None
    """When its tenant was made, which tells that from earlier ones of the name. None in the answer of a dry run."""

    @property
    def reference(self) -> str:
        """`name@version`, the way an answer names the adapter that was used."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


def planned(
    spec: AdapterSpec, name: str, tenant: str, pinned: bool, description: str | None, source: str | None
) -> AdapterRecord:
    """The record of an adapter that was checked and not registered."""
    return AdapterRecord(
        id="",
        name=name,
        tenant=tenant,
        version=None,
        version_id=None,
        digest=spec.digest,
        status="ready",
        current=False,
        pinned=pinned,
        rank=spec.rank,
        target_modules=spec.target_modules,
        size_bytes=spec.size_bytes,
        dtype=spec.dtype,
        max_abs=spec.max_abs,
        matched=spec.matched,
        total=spec.total,
        warnings=spec.warnings,
        base_model=spec.base_model,
        description=description,
        source=source,
        requests=0,
        prompt_tokens=0,
        generated_tokens=0,
        created_at=datetime.now(UTC),
        last_used_at=None,
    )


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of `AdapterStore.register`."""

    record: AdapterRecord
    spec: AdapterSpec
    """What was read from the files, with every adapted linear: plans how many blocks it takes."""
    created: bool
    """A version was made (201); False: the name's current version held the same weights (200), or a dry
    run."""
    replaced: bool
    """The new version took the name over from an older one."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of `AdapterStore.remove`."""

    removed: list[AdapterRecord]
    current: AdapterRecord | None
    """What the bare name means now; None: the name is gone."""
    unreferenced: list[str]
    """Digests that no version of anyone names any more: the engine may forget them, then `collect` frees the
    disk."""
