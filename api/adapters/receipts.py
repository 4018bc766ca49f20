"""What an adapter looks like from outside: the registry's record and the engine's state in one."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.messages import AdapterState
from ...lora.records import AdapterRecord
from ..protocol.adapters import Adapter, Matched, Status
from .engine_adapters import named


def receipt(
    record: AdapterRecord,
    state: AdapterState,
    in_use: int,
    planned_blocks: int | None = None,
    warnings: Sequence[str] = (),
) -> Adapter:
    """`planned_blocks`: shown for the blocks it holds. `warnings`: besides those of its registration."""
    return Adapter(
        id=record.id,
        name=record.name,
        tenant=record.tenant,
        version=record.version,
        digest=record.digest,
        status=_status(record, state),
        error=_error(record, state),
        residency=state.residency,
        pinned=record.pinned,
        rank=record.rank,
        target_modules=record.target_modules,
        size_bytes=record.size_bytes,
        blocks=state.blocks if planned_blocks is None else planned_blocks,
        matched=Matched(record.matched, record.total),
        warnings=[*record.warnings, *warnings],
        base_model=record.base_model,
        in_use=in_use,
        requests=record.requests,
        tokens=record.prompt_tokens + record.generated_tokens,
        created_at=record.created_at,
        last_used_at=record.last_used_at,
        description=record.description,
    )


def _status(record: AdapterRecord, state: AdapterState) -> Status:
    if record.status == "incompatible":
        return "incompatible"
    if state.error is not None:
        return "failed"
    return "loading" if state.loading else "ready"


def _error(record: AdapterRecord, state: AdapterState) -> str | None:
    if record.status == "incompatible":
        return f"made for another base ({record.base_model})"
    return None if state.error is None else named(state.error, [record])
