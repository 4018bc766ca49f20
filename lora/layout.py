"""Where each row of an adapter lies in its pool blocks, and the packing of A and B into them. No torch.

A block is a page of `block_bytes`. Rows lie one after another in the order layer, module, then the `rank`
rows of A (in_features values each), then the `rank` columns of B (out_features values each); each starts at a
multiple of 16 bytes and none straddles two pages:

    page 0 | A row | A row | B column |  gap  |
    page 1 | B column | A row of the next module | ...
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from .base import MODULES, BaseModel
from .canonical import CanonicalAdapter
from .errors import AdapterInvalid
from .floats import FloatForm, convert
from .spec import AdapterSpec, Delta, Part

ROW_ALIGN = 16
"""Bytes."""

PoolDtype = Literal["float32", "float16", "bfloat16"]
FORMS: dict[PoolDtype, FloatForm] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ITEMSIZE: dict[PoolDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def held_form(own: Collection[FloatForm], widest: PoolDtype, any_form: bool) -> PoolDtype:
    """How an adapter whose tensors are in the forms `own` lies in a pool: as `widest`, which holds any; or, where
    kernels read `any_form`, in 16 bits if that is what all its tensors have. No value changes by that, and it takes
    half the room."""
    if any_form and widest == "float32":
        for dtype in ("float16", "bfloat16"):
            if set(own) == {FORMS[dtype]}:
                return dtype
    return widest


@dataclass(frozen=True)
class AdapterLayout:
    """An adapter's pages and tables, with pages numbered from 0 and rows counted from 0: the caller adds
    where they really are. Row i lies at byte `row_offsets[i]` of page `row_blocks[i]`."""

    num_blocks: int
    block_bytes: int
    itemsize: int
    """Bytes of one value."""
    shapes: Mapping[str, tuple[int, int]]
    """Module name -> (out_features, in_features)."""
    ranks: NDArray[np.int32]
    """[layers, 7]; 0: not adapted."""
    first_row: NDArray[np.int32]
    """[layers, 7]: index of the module's first row; 0 where not adapted."""
    scales: NDArray[np.float32]
    """[layers, 7]; 0 where not adapted."""
    row_blocks: NDArray[np.int32]
    """[rows]"""
    row_offsets: NDArray[np.int32]
    """[rows]: bytes, multiples of 16."""

    @property
    def num_rows(self) -> int:
        return len(self.row_blocks)

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return self.num_blocks * self.block_bytes

    @classmethod
    def plan(
        cls,
        deltas: Sequence[Delta],
        shapes: Mapping[str, tuple[int, int]],
        num_layers: int,
        *,
        block_bytes: int,
        itemsize: int,
    ) -> AdapterLayout:
        """Lay out `deltas` (ordered by layer and module); `shapes`: module name -> (out_features,
        in_features).

        `block_bytes` is a multiple of 16. Raises AdapterInvalid if one row is longer than a block or a layer
        is beyond the base's.
        """
        if block_bytes <= 0 or block_bytes % ROW_ALIGN:
            raise ValueError(f"block_bytes is {block_bytes}, not a multiple of {ROW_ALIGN}")
        ranks = np.zeros((num_layers, len(MODULES)), dtype=np.int32)
        first_row = np.zeros_like(ranks)
        scales = np.zeros(ranks.shape, dtype=np.float32)
        total = 2 * sum(delta.rank for delta in deltas)
        row_blocks = np.empty(total, dtype=np.int32)
        row_offsets = np.empty(total, dtype=np.int32)
        row, page, offset = 0, 0, 0
        for delta in deltas:
            if delta.layer >= num_layers:
                raise AdapterInvalid(f"{delta.key}: the base has layers 0 to {num_layers - 1}")
            ranks[delta.layer, delta.module] = delta.rank
            first_row[delta.layer, delta.module] = row
            scales[delta.layer, delta.module] = delta.scale
            outputs, inputs = shapes[MODULES[delta.module]]
            for values in (inputs, outputs):
                nbytes = values * itemsize
                if nbytes > block_bytes:
                    raise AdapterInvalid(
                        f"a row of {MODULES[delta.module]} takes {nbytes} bytes, a block has {block_bytes}: "
                        "use a larger --block-size"
                    )
                stride = -(-nbytes // ROW_ALIGN) * ROW_ALIGN
                left = delta.rank
                while left:
                    fit = min(left, (block_bytes - offset - nbytes) // stride + 1)
                    if fit <= 0:
                        page, offset = page + 1, 0
                        continue
                    row_blocks[row : row + fit] = page
                    row_offsets[row : row + fit] = offset + stride * np.arange(fit)
                    row, left, offset = row + fit, left - fit, offset + fit * stride
        return cls(
            num_blocks=page + 1 if total else 0,
            block_bytes=block_bytes,
            itemsize=itemsize,
            shapes=dict(shapes),
            ranks=ranks,
            first_row=first_row,
            scales=scales,
            row_blocks=row_blocks,
            row_offsets=row_offsets,
        )


def blocks_of(
    spec: AdapterSpec, base: BaseModel, *, widest: PoolDtype, any_form: bool, block_bytes: int
) -> int:
    """How many blocks of a pool an adapter takes, held as `held_form` says. Raises what `AdapterLayout.plan` does."""
    form = held_form(cast(list[FloatForm], spec.dtype.split("+")), widest, any_form)
    layout = AdapterLayout.plan(
        spec.deltas, base.shapes, base.num_layers, block_bytes=block_bytes, itemsize=ITEMSIZE[form]
    )
    return layout.num_blocks


def pack(adapter: CanonicalAdapter, layout: AdapterLayout, dtype: PoolDtype, out: NDArray[np.uint8]) -> None:
    """Write A and B as `dtype`, rounded at most once, into `out`: uint8 [num_blocks, block_bytes], gaps
    zeroed.

    `layout` must be of this adapter and of the dtype's item size. Raises AdapterInvalid if a value has no
    finite counterpart in `dtype`, AdapterCorrupt or AdapterInvalid if the file cannot be read to its end.
    """
    if out.shape != (layout.num_blocks, layout.block_bytes) or out.dtype != np.uint8:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, the layout needs uint8 pages")
    if ITEMSIZE[dtype] != layout.itemsize:
        raise ValueError(f"the layout is for {layout.itemsize} bytes a value, not for {dtype}")
    out[:] = 0
    for delta in adapter.deltas:
        first = int(layout.first_row[delta.layer, delta.module])
        outputs, inputs = layout.shapes[MODULES[delta.module]]
        _write_rows(layout, first, _rows(adapter, delta, "A", (delta.rank, inputs), dtype), out)
        _write_rows(layout, first + delta.rank, _rows(adapter, delta, "B", (outputs, delta.rank), dtype), out)


def _rows(
    adapter: CanonicalAdapter, delta: Delta, part: Part, shape: tuple[int, int], dtype: PoolDtype
) -> NDArray[np.uint8]:
    """uint8 [rank, bytes of a row]: the rows of A, or the columns of B, as `dtype`."""
    values = adapter.read(delta, part)
    if values.shape != shape:
        raise AdapterInvalid(
            f"{delta.key}.{part} has shape {list(values.shape)}, the base asks for {list(shape)}"
        )
    try:
        converted = convert(values, adapter.form(delta, part), FORMS[dtype])
    except OverflowError as error:
        raise AdapterInvalid(
            f"{delta.key}.{part}: {error}; serve it with --dtype bfloat16 or float32"
        ) from None
    rows = np.ascontiguousarray(converted if part == "A" else converted.T)
    return rows.view(np.uint8)


def _write_rows(layout: AdapterLayout, first: int, rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Copy rows to consecutive table entries; those within one page lie at one stride and go as one copy."""
    count, nbytes = rows.shape
    pages = layout.row_blocks[first : first + count]
    stride = -(-nbytes // ROW_ALIGN) * ROW_ALIGN
    starts = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), count]
    for begin, end in pairwise(starts):
        page, offset = int(pages[begin]), int(layout.row_offsets[first + begin])
        run = out[page, offset : offset + (end - begin) * stride].reshape(end - begin, stride)
        run[:, :nbytes] = rows[begin:end]
