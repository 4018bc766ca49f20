"""Where each adapter lies - disk, host, device - and who holds it. Control code: no torch.

SIGNATURES FIRST; bodies follow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Executor
from typing import Literal

from .adapter_memory import AdapterMemory, AdapterSize, AdapterState, Blocks, ResidencyError


class Residency:
    def __init__(
        self,
        *,
        memory: AdapterMemory,
        blocks: Blocks,
        num_slots: int,
        num_rows: int,
        host_bytes: int,
        blocks_per_tick: int = 64,
        on_loaded: Callable[[], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """`num_slots`, `num_rows`: the fixed arena of `ops.AdapterTables`. `host_bytes`: budget of host copies.
        `blocks_per_tick`: pages copied to the device between two steps at most. `on_loaded`: called from a worker thread
        whenever a host load ended, so that a sleeping engine loop wakes. `executor`: for tests; None: two threads."""

    # ---- the engine's calls (commands); ResidencyError(code, message) where refused
    def know(self, digest: str, path: str, pinned: bool = False) -> None: ...
    def forget(self, digest: str) -> None: ...
    def load(self, digest: str) -> None:
        """Ask for `digest` on the device; `drain_loads` tells when it is there, or why not."""
    def evict(self, digest: str, to: Literal["host", "disk"] = "host") -> None: ...
    def pin(self, digest: str, pinned: bool) -> None: ...
    def state(self, digest: str) -> AdapterState: ...
    def drain_changes(self) -> list[AdapterState]:
        """States that changed since the last call."""
    def drain_loads(self) -> list[tuple[str, ResidencyError | None]]:
        """Digests whose `load` ended since the last call: None: it is (or was just) on the device."""
    def tick(self) -> None:
        """Between steps, before `Scheduler.schedule`: take in finished host loads, copy the next pages to the device."""
    @property
    def busy(self) -> bool:
        """`tick` has something to do at once. Else an engine without a plan may sleep until a command or `on_loaded`."""
        return False
    def stats(self) -> dict[str, int]:
        """adapter_loads, adapter_evictions (messages.Stats), host_bytes, slots_used, rows_used, ..."""
        return {}
    def close(self) -> None: ...
    def check_integrity(self) -> None: ...
