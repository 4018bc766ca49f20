"""Which adapter versions requests are using, so that none disappears under one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from ..lora.blobs import Kept
from ..lora.records import AdapterRecord, Removal
from ..lora.store import AdapterStore


class Holds:
    """Counts requests per digest. Finding a version and holding it is one step, and so is removing one.

    While a digest is held its file is kept, also from the other servers of the registry. What asks the store
    belongs in a worker thread; the rest may be called anywhere.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, Kept] = {}
        self._orphans: set[str] = set()

    def resolve(self, ref: str, tenant: str) -> AdapterRecord:
        """The version `ref` means, held until `release`."""
        with self._lock:
            record = self._store.resolve(ref, tenant)
            if record.digest not in self._kept:
                kept = self._store.keep(record.digest)
                if (
                    kept is None
                ):  # removed since by another server, or the file is lost: then the engine says so
                    record = self._store.resolve(ref, tenant)
                    kept = None if record.digest in self._kept else self._store.keep(record.digest)
                if kept is not None:
                    self._kept[record.digest] = kept
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

    def removed_elsewhere(self, digests: Iterable[str]) -> None:
        """Find those of `digests`, and of what is held, that no version names: another server removed them."""
        with self._lock:
            self._orphans.update(self._store.unreferenced([*digests, *self._counts]))

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
            if digest in self._kept:
                self._kept.pop(digest).close()
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
