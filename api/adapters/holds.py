"""Which adapter versions requests mean and use: found in memory while nothing changes, none disappears under one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from ...lora.blobs import Kept
from ...lora.records import AdapterRecord, Removal
from ...lora.store import AdapterStore
from ..workers import Pool
from .revisions import Revisions

MOST_NAMES = 65_536
"""Names whose meaning is remembered; a name with a version or digest counts by itself."""
IDLE_FILES = 256
"""Files that stay kept after their last request, so that the next one has nothing to open."""


class Holds:
    """Counts requests per digest. While a digest is held its file is kept, also from the other servers of the
    registry.

    What names mean is remembered as long as the registry stays at one revision, which every request asks for; so
    a change, by whichever server, counts from the next request on. `resolve` and `release` belong to the event
    loop; `remove` and `removed_elsewhere` ask the store and belong in a worker thread; the rest may be called
    anywhere. The lock is never held over a question to the store.
    """

    def __init__(self, store: AdapterStore, registry: Pool) -> None:
        self._store = store
        self._registry = registry
        self._revisions = Revisions(store, registry)
        self._lock = threading.Lock()
        self._names: dict[tuple[str, str], AdapterRecord] = {}
        """(tenant, reference) to what it means at `_revision`."""
        self._revision = -1
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, Kept] = {}
        self._idle: dict[str, None] = {}
        """Kept and not held, the longest idle first."""
        self._orphans: set[str] = set()
        self._frees = 0
        self._returns = 0

    async def revision(self) -> int:
        """The registry's, at a moment after the call. Raises StoreError overloaded where it is out of reach."""
        return await self._revisions.now()

    async def resolve(self, ref: str, tenant: str) -> AdapterRecord:
        """The version `ref` means, held until `release`. Raises StoreError as `AdapterStore.resolve`."""
        while True:
            frees = self._frees
            record = self._remembered(ref, tenant, await self._revisions.now())
            if record is None:
                record = await self._registry(self._look_up, ref, tenant)
            with self._lock:
                if frees == self._frees:  # else what was found may have been let go of since
                    self._counts[record.digest] += 1
                    self._idle.pop(record.digest, None)
                    return record

    def _remembered(self, ref: str, tenant: str, revision: int) -> AdapterRecord | None:
        """What `ref` means at `revision`, if that is known and its file is kept."""
        with self._lock:
            if revision != self._revision or len(self._names) > MOST_NAMES:
                self._names.clear()
                self._revision = revision
            record = self._names.get((tenant, ref))
            return record if record is not None and record.digest in self._kept else None

    def _look_up(self, ref: str, tenant: str) -> AdapterRecord:
        """What the registry says, with the file kept; in a thread."""
        record, revision = self._store.resolve_at(ref, tenant)
        if not self._keep(record.digest):  # removed since by another server, or lost: then the engine says so
            record, revision = self._store.resolve_at(ref, tenant)
            self._keep(record.digest)
        with self._lock:
            if revision == self._revision:
                self._names[tenant, ref] = record
        return record

    def _keep(self, digest: str) -> bool:
        if digest in self._kept:
            return True
        kept = self._store.keep(digest)
        if kept is None:
            return False
        with self._lock:
            if digest in self._kept:
                kept.close()
            else:
                self._kept[digest] = kept
                if not self._counts[digest]:
                    self._let_idle(digest)
        return True

    def _let_idle(self, digest: str) -> None:
        self._idle[digest] = None
        if len(self._idle) > IDLE_FILES:
            longest = next(iter(self._idle))
            del self._idle[longest]
            self._kept.pop(longest).close()

    def release(self, digest: str) -> bool:
        """One request less. True: it was the last one of a removed adapter, which can be freed now."""
        with self._lock:
            self._counts[digest] -= 1
            if self._counts[digest]:
                return False
            del self._counts[digest]
            if digest in self._kept:
                self._let_idle(digest)
            return digest in self._orphans

    def remove(self, ref: str, tenant: str) -> Removal:
        """Remove versions from the registry. What no version names any more is freed by whoever calls
        `freeable`.
        """
        removal = self._store.remove(ref, tenant)
        self._find_orphans(removal.unreferenced)
        return removal

    def removed_elsewhere(self, digests: Iterable[str]) -> None:
        """Find those of `digests`, and of what is kept or held, that no version names: another server removed
        them."""
        with self._lock:
            found = [*digests, *self._counts, *self._kept]
        self._find_orphans(found)

    def _find_orphans(self, digests: Iterable[str]) -> None:
        while True:
            returns = self._returns
            gone = self._store.unreferenced(digests)
            with self._lock:
                if returns == self._returns:  # else one of them may have come back since
                    self._orphans.update(gone)
                    return

    def returned(self, digest: str) -> None:
        """A version names `digest` again: it is not to be freed."""
        with self._lock:
            self._returns += 1
            self._orphans.discard(digest)

    def freeable(self) -> list[str]:
        """Removed digests that no request uses; each is handed out once, and its file is kept no longer."""
        with self._lock:
            free = [digest for digest in self._orphans if not self._counts[digest]]
            if free:
                self._frees += 1
                self._orphans.difference_update(free)
            for digest in free:
                if digest in self._idle:
                    del self._idle[digest]
                    self._kept.pop(digest).close()
            return free

    def count(self, digest: str) -> int:
        with self._lock:
            return self._counts.get(digest, 0)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            for kept in self._kept.values():
                kept.close()
            self._kept.clear()
            self._idle.clear()
