"""Which columns of the registry's tables the fields of an adapter's record are.

Read as columns: objects of the ORM, which changes need, take twice as long to make, and lists go through thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .records import AdapterRecord
from .schema import AdapterRow, TenantRow, UsageRow, VersionRow

_COLUMNS = {
    "id": AdapterRow.public_id,
    "name": AdapterRow.name,
    "tenant": TenantRow.name,
    "version": VersionRow.number,
    "version_id": VersionRow.id,
    "digest": VersionRow.digest,
    "rank": VersionRow.rank,
    "target_modules": VersionRow.target_modules,
    "size_bytes": VersionRow.size_bytes,
    "dtype": VersionRow.dtype,
    "max_abs": VersionRow.max_abs,
    "matched": VersionRow.matched,
    "total": VersionRow.total,
    "warnings": VersionRow.warnings,
    "base_model": VersionRow.base_model,
    "description": AdapterRow.description,
    "source": VersionRow.source,
    "created_at": VersionRow.created_at,
    "last_used_at": UsageRow.last_used_at,
    "tenant_since": TenantRow.created_at,
}
"""Of the fields that are just a column's value; others follow from the columns after these."""
COLUMNS = (
    *_COLUMNS.values(),
    UsageRow.requests,
    UsageRow.prompt_tokens,
    UsageRow.generated_tokens,
    AdapterRow.current,
    AdapterRow.pinned,
    VersionRow.fingerprint,
)


def record(values: Sequence[Any], fingerprint: str) -> AdapterRecord:
    """From the `values` of `COLUMNS`; `fingerprint` is the served base's."""
    *rest, requests, prompt_tokens, generated_tokens, current, pinned, made_for = values
    fields = dict(zip(_COLUMNS, rest, strict=True))
    is_current = fields["version"] == current
    return AdapterRecord(
        **fields,
        requests=requests or 0,
        prompt_tokens=prompt_tokens or 0,
        generated_tokens=generated_tokens or 0,
        current=is_current,
        pinned=pinned and is_current,
        status="ready" if made_for == fingerprint else "incompatible",
    )
