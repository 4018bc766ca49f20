"""Rows of a weight that lies in panels: an embedding, most often the head itself."""

from __future__ import annotations

import numpy as np
import torch

from ..dense_weight import DenseWeight
from .arrays import address, array_at, kind
from .compiled import compiled, inner
from .recording import empty, launch
from .team import share
from .vector_ir import load, store

PART_VALUES = 2048
"""Values in one part of the work: each pair comes from a cache line of its own."""
STEP = np.float32(1 / 127)
"""What one is in int8, of a row's absmax."""


@inner
def _rows(part, parts, out, indices, w, panel, inputs, panel_size, absmax, k):  # type: ignore[no-untyped-def]
    """out[t] = row indices[t] of w, times absmax / 127 where there is one, for one part of the rows."""
    rows = indices.size
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        at = indices[t] // panel * panel_size + indices[t] % panel * inputs
        for j in range(k):
            store(out, t * k + j, load(w, at + j // inputs * (panel * inputs) + j % inputs))
        if absmax.size:
            for j in range(t * k, (t + 1) * k):
                store(out, j, load(out, j) * absmax[indices[t]] * STEP)


@compiled
def _all(words, parts, out, indices, rows, w, like, panels, groups, panel, inputs, absmax, vocab, k):  # type: ignore[no-untyped-def]
    real, index, panel_size = np.float32(0), np.int64(0), groups * panel * inputs
    share(
        words, parts, _rows,
        (
            array_at(out, real, (rows * k,)), array_at(indices, index, (rows,)),
            array_at(w, like, (panels * panel_size,)), panel, inputs, panel_size,
            array_at(absmax, real, (vocab if absmax else 0,)), k,
        ),
    )  # fmt: skip


def embedding(
    token_ids: torch.Tensor, weight: DenseWeight, absmax: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = weight[token_ids[t]] (* absmax[token_ids[t]] * (1 / 127))"""
    assert token_ids.dtype is torch.int64
    assert token_ids.is_contiguous()
    assert absmax is None or (absmax.dtype is torch.float32 and absmax.is_contiguous())
    rows, k = token_ids.shape[0], weight.shape[1]
    out = empty(rows, k)
    if rows:
        launch(
            _all, max(1, min(rows, rows * k // PART_VALUES)), out.data_ptr(), token_ids.data_ptr(), rows,
            weight.values.data_ptr(), kind(weight), *weight.values.shape, address(absmax),
            weight.shape[0], k,
        )  # fmt: skip
    return out if dtype is torch.float32 else out.to(dtype)
