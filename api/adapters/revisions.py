"""At which revision the registry is now: what a request asks before it trusts what is remembered."""

from __future__ import annotations

import asyncio

from ...lora.store import AdapterStore
from ..workers import Pool


class Revisions:
    """Belongs to the event loop. A SQLite registry answers at once; of another one a thread asks, and one question
    answers everyone who came before it was put."""

    def __init__(self, store: AdapterStore, registry: Pool) -> None:
        self._store = store
        self._registry = registry
        self._asking: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None
        """The question that is not put yet."""

    async def now(self) -> int:
        """The revision at a moment after the call. Raises StoreError overloaded where the registry is out of
        reach."""
        revision = self._store.revision_at_once()
        if revision is not None:
            return revision
        if self._next is None:
            self._next = asyncio.create_task(self._ask_after(self._asking))
        return await asyncio.shield(self._next)

    async def _ask_after(self, earlier: asyncio.Task[int] | None) -> int:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._asking, self._next = self._next, None  # who comes from here on needs another answer
        return await self._registry(self._store.revision)
