"""Adapters' bytes: from a canonical file to a packed host copy, from there to blocks of the pool and the
arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...kernels.ops import ADAPTER_FORMS, AdapterTables
from ...kernels.pool import ROW_ALIGN, Pool
from ...lora.adapter_memory import AdapterSize
from ...lora.base import MODULES
from ...lora.canonical import CanonicalAdapter, open_adapter
from ...lora.layout import ITEMSIZE, AdapterLayout, PoolDtype, held_form, pack
from .accelerator import Accelerator, Arrival

FORMS: dict[torch.dtype, PoolDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
DTYPES = {form: dtype for dtype, form in FORMS.items()}
MAX_POOL_BYTES = 2**31 * ROW_ALIGN
"""What the row table's int32 entries can point into."""
MAX_SLOTS = 4096
"""Adapters on the device at one time, where the pool has room for so many."""


@dataclass(eq=False)
class HostAdapter:
    """An adapter packed page by page as it lies on the device; the pages are one buffer of pinned memory."""

    pages: torch.Tensor
    """uint8 [blocks, block_bytes]"""
    layout: AdapterLayout
    form: PoolDtype
    """Of its A and B."""
    arrival: Arrival | None = None
    """Of the pages that were copied last."""

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes


class PoolAdapterMemory:
    """`lora.adapter_memory.AdapterMemory` over one pool and one arena of tables."""

    def __init__(
        self,
        pool: Pool,
        shapes: dict[str, tuple[int, int]],
        dtype: torch.dtype,
        accelerator: Accelerator,
        max_rank: int = 512,
        any_form: bool = False,
    ) -> None:
        """`shapes`: (out_features, in_features) by module name; `dtype`: of A and B in the pool, where they are not in
        16 bits by themselves and kernels read `any_form`."""
        layout = pool.layout
        self._pool = pool
        self._accelerator = accelerator
        self._shapes = shapes
        self._widest, self._any_form = FORMS[dtype], any_form
        device = pool.memory.device
        slots = min(pool.num_blocks, MAX_SLOTS)
        shape = (slots, layout.num_layers, len(MODULES))
        shortest = min(min(pair) for pair in shapes.values()) * (2 if any_form else dtype.itemsize)
        rows = pool.num_blocks * (layout.block_bytes // (-(-shortest // ROW_ALIGN) * ROW_ALIGN))
        self.tables = AdapterTables(
            ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            first_row=torch.zeros(shape, dtype=torch.int32, device=device),
            scales=torch.zeros(shape, dtype=torch.float32, device=device),
            rows=torch.zeros(rows, dtype=torch.int32, device=device),
            dtype=dtype,
            forms=torch.zeros(slots, dtype=torch.int32, device=device) if any_form else None,
            max_rank=max_rank,
        )

    @property
    def num_slots(self) -> int:
        return self.tables.ranks.shape[0]

    @property
    def num_rows(self) -> int:
        """Entries of the row table: more than a pool full of the shortest rows has."""
        return self.tables.rows.shape[0]

    def measure(self, path: str) -> AdapterSize:
        with open_adapter(Path(path), verify=False) as adapter:
            layout, _ = self._layout(adapter)
        return AdapterSize(blocks=layout.num_blocks, rows=layout.num_rows, nbytes=layout.nbytes)

    def load_host(self, path: str) -> HostAdapter:
        with open_adapter(Path(path)) as adapter:
            layout, form = self._layout(adapter)
            pages = self._accelerator.pinned(layout.num_blocks, self._pool.layout.block_bytes).zero_()
            pack(adapter, layout, form, pages.numpy())
        return HostAdapter(pages, layout, form)

    def copy_pages(self, host: HostAdapter, first: int, blocks: Sequence[int]) -> None:
        pages = self._pool.pages()
        moves = ((host.pages[page], pages[block]) for page, block in enumerate(blocks, first))
        host.arrival = self._accelerator.copy_aside(moves)

    def arrived(self, host: HostAdapter) -> bool:
        return host.arrival is None or host.arrival.done()

    def settle(self) -> None:
        self._accelerator.join()

    def write_tables(self, host: HostAdapter, blocks: Sequence[int], slot: int, first_row: int) -> None:
        layout, tables = host.layout, self.tables
        start = np.array(blocks, np.int64) * self._pool.layout.block_bytes
        rows = (start[layout.row_blocks] + layout.row_offsets) // ROW_ALIGN
        tables.rows[first_row : first_row + len(rows)] = torch.from_numpy(rows.astype(np.int32))
        tables.ranks[slot] = torch.from_numpy(layout.ranks)
        tables.first_row[slot] = torch.from_numpy(layout.first_row) + first_row
        tables.scales[slot] = torch.from_numpy(layout.scales)
        if tables.forms is not None:
            tables.forms[slot] = ADAPTER_FORMS.index(DTYPES[host.form])

    def move_rows(self, slot: int, first_row: int, num_rows: int, to: int) -> None:
        rows = self.tables.rows
        rows[to : to + num_rows] = rows[first_row : first_row + num_rows].clone()
        self.tables.first_row[slot] += to - first_row

    def _layout(self, adapter: CanonicalAdapter) -> tuple[AdapterLayout, PoolDtype]:
        form, layout = held_form(adapter.forms(), self._widest, self._any_form), self._pool.layout
        planned = AdapterLayout.plan(
            adapter.deltas,
            self._shapes,
            layout.num_layers,
            block_bytes=layout.block_bytes,
            itemsize=ITEMSIZE[form],
        )
        return planned, form
