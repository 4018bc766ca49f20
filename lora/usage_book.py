"""Counts usage in memory between two writes to the registry. Control code: no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from . import usage_tables
from .database import Database
from .records import AdapterRecord
from .usage import Account, OfVersion, Usage


class UsageBook:
    """Usage by account: what is pending, and what is in the registry. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._pending: dict[Account, Usage] = {}

    def count(self, where: Iterable[Account], usage: Usage) -> None:
        """Cheap, and written by the next `flush`."""
        with self._lock:
            for account in where:
                before = self._pending.get(account)
                self._pending[account] = usage if before is None else before.plus(usage)

    def touch(self, version_id: int, *, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        """Count a request on one version of an adapter alone."""
        usage = Usage(1, prompt_tokens, generated_tokens, last_used_at=datetime.now(UTC))
        self.count([OfVersion(version_id)], usage)

    def flush(self) -> None:
        """Add what is pending to the registry's counters in one transaction. Where that fails it stays pending."""
        with self._flushing:
            with self._lock:
                pending = dict(self._pending)
            if pending:
                self._database.write(lambda session: usage_tables.add(session, pending))
                self._settle(pending)

    def _settle(self, written: Mapping[Account, Usage]) -> None:
        with self._lock:
            for account, usage in written.items():
                left = self._pending[account].plus(usage, sign=-1)
                if left.nothing:
                    del self._pending[account]
                else:
                    self._pending[account] = left

    def with_pending(self, record: AdapterRecord) -> AdapterRecord:
        """The record with what is pending added to what the registry says."""
        if record.version_id is None:
            return record
        with self._lock:
            pending = self._pending.get(OfVersion(record.version_id))
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

    def of_tenant(self, tenant: str) -> usage_tables.TenantUsage:
        """What a tenant used until now, at this server and all others. Raises StoreError tenant_not_found."""
        self.flush()
        return self._database.read(lambda session: usage_tables.of_tenant(session, tenant))
