"""Counts usage in memory between two writes to the registry. Control code: no torch."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import msgspec

from .records import AdapterRecord


class Usage(msgspec.Struct, frozen=True):
    """What was counted for one version and is not in the registry yet."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    last_used_at: datetime = datetime.min.replace(tzinfo=UTC)

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        """The sum, or with sign -1 what is left of self after `other` was written; the later moment stays."""
        return Usage(
            self.requests + sign * other.requests,
            self.prompt_tokens + sign * other.prompt_tokens,
            self.generated_tokens + sign * other.generated_tokens,
            max(self.last_used_at, other.last_used_at),
        )


class UsageCounter:
    """Pending usage by version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, Usage] = {}

    def count(self, version_id: int, usage: Usage) -> None:
        with self._lock:
            self._pending[version_id] = self._pending.get(version_id, Usage()).plus(usage)

    def pending(self) -> dict[int, Usage]:
        """What is to be written now; it stays visible until `settle`."""
        with self._lock:
            return dict(self._pending)

    def settle(self, written: dict[int, Usage]) -> None:
        """What `pending` gave out is in the registry."""
        with self._lock:
            for version_id, usage in written.items():
                left = self._pending[version_id].plus(usage, sign=-1)
                if (left.requests, left.prompt_tokens, left.generated_tokens) == (0, 0, 0):
                    del self._pending[version_id]
                else:
                    self._pending[version_id] = left

    def with_pending(self, record: AdapterRecord) -> AdapterRecord:
        """The record with what is pending added to what the registry says."""
        with self._lock:
            pending = None if record.version_id is None else self._pending.get(record.version_id)
            if pending is None:
                return record
            last = pending.last_used_at
            if record.last_used_at is not None:
                last = max(last, record.last_used_at)
            return msgspec.structs.replace(
                record,
                requests=record.requests + pending.requests,
                prompt_tokens=record.prompt_tokens + pending.prompt_tokens,
                generated_tokens=record.generated_tokens + pending.generated_tokens,
                last_used_at=last,
            )
