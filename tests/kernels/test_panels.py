"""Tiles of products over panels: one sum's bits are the same in vectors of any width."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from heddle.kernels.cpu import digits, panels
from heddle.kernels.dense_weight import in_panels


@pytest.mark.parametrize("k", [1, 101])
@pytest.mark.parametrize("rows", range(1, panels.ROWS + 1))
@pytest.mark.parametrize(("dtype", "tiled"), [(np.float32, False), (np.int8, False), (np.int8, True)])
def test_wide_vectors_give_the_bits_of_narrow_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: type, tiled: bool, rows: int, k: int
) -> None:
    products, draw = panels.panel_products, np.random.default_rng(k)
    x, count = draw.standard_normal((rows, k), np.float32), 18 if tiled else 19
    w = (100 * draw.standard_normal((8 * count, k))).clip(-128, 127).astype(dtype)
    layout = (digits.TILE_OUTPUTS, digits.QUAD, digits.TILE_INPUTS // digits.QUAD) if tiled else ()
    held = in_panels(torch.from_numpy(w.copy()), *layout).values.numpy()
    held = held.view(np.uint8) if tiled else held
    found = []
    for wide in (False, True):
        monkeypatch.setattr(panels, "WIDE", wide)

        @numba.njit
        def tile(out, x, w, count, k):  # type: ignore[no-untyped-def]
            products(out, out.size // rows, x, 0, k, rows, w, 0, count, k, 0)

        out = np.full(rows * 8 * count, np.nan, np.float32)
        tile(out, x.ravel(), held.ravel(), count, k)
        found.append(out.reshape(rows, -1))
        assert ("<16 x float>" in next(iter(tile.inspect_llvm().values()))) == wide
    want, size = x.astype(np.float64) @ w.astype(np.float64).T, np.abs(x) @ np.abs(w.astype(np.float64)).T
    assert (np.abs(found[0] - want) <= 1e-6 * size).all()
    assert (found[0] == found[1]).all()
