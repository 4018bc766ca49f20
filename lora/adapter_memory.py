"""The seam between residency and the memory it moves adapters through. Control code: no torch.

`Residency` decides which adapter lies where; `AdapterMemory` moves the bytes (implemented one floor up,
beside the device pool), and `Blocks` is the pool's ledger. Both are Protocols, so that this floor knows
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import msgspec


class AdapterSize(msgspec.Struct, frozen=True):
    """What one adapter takes."""

    blocks: int
    """Blocks of the device pool."""
    rows: int
    """Entries of the row table (`ops.AdapterTables.rows`): two per rank component of every adapted linear."""
    nbytes: int
    """Bytes of its host copy."""


class AdapterState(msgspec.Struct, frozen=True, kw_only=True):
    """Where an adapter is now. Sent whenever one of these changes."""

    digest: str
    residency: Literal["device", "host", "disk"]
    loading: bool = False
    error: str | None = None
    """Set when its file could not be loaded: it answers `adapter_failed` until known again."""
    pinned: bool = False
    blocks: int = 0
    """Held in the device pool."""
    size: int = 0
    """Blocks that it takes there; 0: nobody has asked yet. Of a pinned one it is known."""
    in_use: int = 0
    """Sequences, queued and running, that hold it."""


class ResidencyError(Exception):
    """A call that residency refuses; `code` is one of the stable codes of the HTTP interface."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HostAdapter(Protocol):
    """An adapter in host memory, packed page by page as it will lie on the device."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


Host = TypeVar("Host", bound=HostAdapter)


class AdapterMemory(Protocol[Host]):
    """Moves adapters' bytes. All calls but `load_host` come from the engine's own thread, between steps."""

    def measure(self, path: str) -> AdapterSize:
        """What the file at `path` will take, from its header alone (cheap: runs in the engine's thread).

        Raises OSError, or `AdapterCorrupt`/`AdapterInvalid`, where the file cannot be read.
        """

    def load_host(self, path: str) -> Host:
        """Read, verify and pack the file. Runs in a worker thread; whatever it raises fails this adapter
        alone."""

    def copy_pages(self, host: Host, first: int, blocks: Sequence[int]) -> None:
        """Pages first, first + 1, … of `host` go into these blocks of the pool; may return before they are there."""

    def arrived(self, host: Host) -> bool:
        """All pages of `host` that were copied are there."""

    def settle(self) -> None:
        """Whatever is done with any block from now on comes after all copies under way."""

    def write_tables(self, host: Host, blocks: Sequence[int], slot: int, first_row: int) -> None:
        """All its pages are in `blocks`: write its tables into `slot` and its rows to rows first_row, … of
        the arena.

        Everything the slot said before is overwritten, absent modules (rank 0) included.
        """

    def move_rows(self, slot: int, first_row: int, num_rows: int, to: int) -> None:
        """The adapter in `slot` gets its `num_rows` row entries moved from first_row to `to` (to < first_row;
        the ranges may overlap) and its `first_row` table shifted to match."""


class Blocks(Protocol):
    """The block pool's ledger, as far as adapters go."""

    @property
    def total(self) -> int:
        """Blocks there are."""

    @property
    def available(self) -> int:
        """Blocks that `take_for_adapter` could give: free ones, and idle ones of prefix cache and
        adapters."""

    def take_for_adapter(self, count: int) -> list[int] | None:
        """`count` blocks, evicting what is idle in the pool's order; None (and nothing changed) if there are
        too few.

        May call back `Evictable.evict_idle`.
        """

    def give_back(self, blocks: Sequence[int]) -> None:
        """An adapter's blocks are free again."""

    def retire(self, digest: str) -> None:
        """This adapter is gone: KV that depends on it is the first to be evicted."""

    def revive(self, digest: str) -> None:
        """This adapter is known (again): KV that depends on it is as good as any."""

    def score(self, cost: float, uses: int) -> float:
        """The pool's measure for what goes first when idle: the lowest. `cost`: to bring one block back."""
