"""Which adapter versions requests are using, so that none disappears under one."""

from __future__ import annotations

import threading
from collections import Counter

from ..lora.records import AdapterRecord, Removal
from ..lora.store import AdapterStore


class Holds:
    """Counts requests per digest. Finding a version and holding it is one step, and so is removing one.

    `resolve` and `remove` ask the store and belong in a worker thread; the rest may be called anywhere.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._orphans: set[str] = set()

    def resolve(self, ref: str, tenant: str) -> AdapterRecord:
        """The version `ref` means, held until `release`."""
        with self._lock:
            record = self._store.resolve(ref, tenant)
            self._counts[record.digest] += 1
            return record

    def remove(self, ref: str, tenant: str) -> Removal:
        """Remove versions from the registry. What no version names any more is freed by whoever calls
        `freeable`.
        """
        with self._lock:
            removal = self._store.remove(ref, tenant)
            self._orphans.update(removal.unreferenced)
            return removal

    def returned(self, digest: str) -> None:
        """A version names `digest` again: it is not to be freed."""
        with self._lock:
            self._orphans.discard(digest)

    def release(self, digest: str) -> bool:
        """One request less. True: it was the last one of a removed adapter, which can be freed now."""
        with self._lock:
            self._counts[digest] -= 1
            if self._counts[digest]:
                return False
            del self._counts[digest]
            return digest in self._orphans

    def freeable(self) -> list[str]:
        """Removed digests that no request uses; each is handed out once."""
        with self._lock:
            free = [digest for digest in self._orphans if not self._counts[digest]]
            self._orphans.difference_update(free)
            return free

    def count(self, digest: str) -> int:
        with self._lock:
            return self._counts.get(digest, 0)
