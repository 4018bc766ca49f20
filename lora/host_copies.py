"""Host copies of adapters, loaded by worker threads, one at a time each, within a budget. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from .adapter_memory import AdapterSize, HostAdapter

LOAD_THREADS = 2


@dataclass(eq=False)
class _Load:
    digest: str
    size: AdapterSize
    wanted: bool = True
    """False: dropped meanwhile; what comes is thrown away."""


class HostCopies:
    """At most `budget` bytes of copies and loads under way, the least recently used copy going first.

    Beyond it go only a load that is `urgent`, and one that is alone because it is larger than the budget.
    """

    def __init__(
        self,
        load: Callable[[str], HostAdapter],
        budget: int,
        is_needed: Callable[[str], bool],
        on_loaded: Callable[[], None],
        executor: Executor | None,
    ) -> None:
        """`is_needed`: somebody waits for this digest to come to the device; `on_loaded`: called in a
        worker's thread."""
        self._load = load
        self._budget = budget
        self._is_needed = is_needed
        self._on_loaded = on_loaded
        self._executor = executor or ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="adapter-load")
        self._copies: OrderedDict[str, HostAdapter] = OrderedDict()
        self._loads: dict[str, _Load] = {}
        self._done: SimpleQueue[tuple[_Load, Future[HostAdapter]]] = SimpleQueue()
        self._bytes = 0  # of copies and of loads under way

    @property
    def nbytes(self) -> int:
        """Bytes of all copies and of loads under way."""
        return self._bytes

    @property
    def has_news(self) -> bool:
        """`finished` would return something."""
        return not self._done.empty()

    @property
    def any_loading(self) -> bool:
        """A load is under way."""
        return bool(self._loads)

    def __contains__(self, digest: object) -> bool:
        return digest in self._copies

    def loading(self, digest: str) -> bool:
        return digest in self._loads

    def get(self, digest: str) -> HostAdapter | None:
        """The copy, which counts as used now."""
        if digest in self._copies:
            self._copies.move_to_end(digest)
        return self._copies.get(digest)

    def start(
        self, digest: str, path: str, size: AdapterSize, keep: Container[str] | None, urgent: bool = False
    ) -> list[str] | None:
        """Begin to load `digest`; None, and nothing done, where that would take more than the budget.

        Copies that nobody needs make room, then those that somebody needs but are not in `keep` (None: these
        stay). Returns the digests whose copies were dropped.
        """
        assert digest not in self._copies
        assert digest not in self._loads
        excess = self._bytes + size.nbytes - self._budget
        dropped: list[str] = []
        if excess > 0:
            victims = [other for other in self._copies if not self._is_needed(other)]
            if keep is not None:
                victims += [other for other in self._copies if self._is_needed(other) and other not in keep]
            for other in victims:
                dropped.append(other)
                excess -= self._copies[other].nbytes
                if excess <= 0:
                    break
            alone = not self._loads and len(dropped) == len(self._copies)
            if excess > 0 and not (urgent or alone):
                return None
        for other in dropped:
            self.drop(other)
        load = _Load(digest, size)
        self._loads[digest] = load
        self._bytes += size.nbytes
        future = self._executor.submit(self._load, path)
        future.add_done_callback(lambda done: self._arrived(load, done))
        return dropped

    def _arrived(self, load: _Load, future: Future[HostAdapter]) -> None:
        """In the worker's thread."""
        self._done.put((load, future))
        self._on_loaded()

    def finished(self) -> list[tuple[str, str | None]]:
        """Take in the loads that ended: each digest with None, or with what went wrong."""
        news: list[tuple[str, str | None]] = []
        while True:
            try:
                load, future = self._done.get_nowait()
            except Empty:
                return news
            if not load.wanted:
                continue
            del self._loads[load.digest]
            self._bytes -= load.size.nbytes
            error = _failure(load, future)
            if error is None:
                copy = future.result()
                self._copies[load.digest] = copy
                self._bytes += copy.nbytes
            news.append((load.digest, error))

    def drop(self, digest: str) -> None:
        """Forget the copy, or the load under way."""
        copy = self._copies.pop(digest, None)
        if copy is not None:
            self._bytes -= copy.nbytes
        load = self._loads.pop(digest, None)
        if load is not None:
            load.wanted = False
            self._bytes -= load.size.nbytes

    def trim(self) -> list[str]:
        """Drop copies that nobody needs until the budget is kept; returns their digests."""
        dropped = []
        if self._bytes > self._budget:
            for digest in [other for other in self._copies if not self._is_needed(other)]:
                if self._bytes <= self._budget:
                    break
                self.drop(digest)
                dropped.append(digest)
        return dropped

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        copies = sum(copy.nbytes for copy in self._copies.values())
        assert self._bytes == copies + sum(load.size.nbytes for load in self._loads.values())
        assert not self._copies.keys() & self._loads.keys()


def _failure(load: _Load, future: Future[HostAdapter]) -> str | None:
    """What went wrong, as a message; None for a good copy."""
    if future.cancelled():
        return "the load was cancelled"
    error = future.exception()
    if error is not None:
        return describe(error)
    copy = future.result()
    if (copy.num_blocks, copy.num_rows) != (load.size.blocks, load.size.rows):
        return "its file changed since its header was read"
    return None


def describe(error: BaseException) -> str:
    """For a user: an OSError without the path, which is the server's own affair."""
    text = (error.strerror if isinstance(error, OSError) else str(error)) or ""
    return text or type(error).__name__
