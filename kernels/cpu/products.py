"""Many dot products at once, in tiles that keep the vector units busy: weights, cached keys, adapter rows.

Every pair of rows is one call of `vector_ir.dots`' arithmetic, so the choice of tile never shows in the result.
"""

from __future__ import annotations

import numpy as np

from .compiled import inner
from .vector_ir import dots

STRIP = 24
"""Weight rows handled together: divisible by the columns of each tile below, small enough for the caches."""


@inner
def row_products(out, out_rows, out_at, x, x_rows, begin, end, w, w_rows, w_at, w_count, k):  # type: ignore[no-untyped-def]
    """out[out_rows[m] + out_at + n] = sum_k x[x_rows[m] + k] * w[w_rows[n] + w_at + k]

    for m from `begin` to `end` and n from 0 to `w_count`. `out_rows`, `x_rows` and `w_rows` are int64 arrays of
    offsets.
    """
    m = begin
    while m < end:
        n = 0
        o0, x0 = out_rows[m] + out_at, x_rows[m]
        if end - m >= 4:
            o1, o2, o3 = out_rows[m + 1] + out_at, out_rows[m + 2] + out_at, out_rows[m + 3] + out_at
            xs = (x0, x_rows[m + 1], x_rows[m + 2], x_rows[m + 3])
            while n + 3 <= w_count:
                ws = (w_rows[n] + w_at, w_rows[n + 1] + w_at, w_rows[n + 2] + w_at)
                dots(out, (o0 + n, o1 + n, o2 + n, o3 + n), x, xs, w, ws, k)
                n += 3
            while n < w_count:
                dots(out, (o0 + n, o1 + n, o2 + n, o3 + n), x, xs, w, (w_rows[n] + w_at,), k)
                n += 1
            m += 4
        elif end - m >= 2:
            o1, x1 = out_rows[m + 1] + out_at, x_rows[m + 1]
            while n + 4 <= w_count:
                ws4 = (w_rows[n] + w_at, w_rows[n + 1] + w_at, w_rows[n + 2] + w_at, w_rows[n + 3] + w_at)
                dots(out, (o0 + n, o1 + n), x, (x0, x1), w, ws4, k)
                n += 4
            while n < w_count:
                dots(out, (o0 + n,), x, (x0,), w, (w_rows[n] + w_at,), k)
                dots(out, (o1 + n,), x, (x1,), w, (w_rows[n] + w_at,), k)
                n += 1
            m += 2
        else:
            while n + 8 <= w_count:
                low = (w_rows[n] + w_at, w_rows[n + 1] + w_at, w_rows[n + 2] + w_at, w_rows[n + 3] + w_at)
                high = (
                    w_rows[n + 4] + w_at,
                    w_rows[n + 5] + w_at,
                    w_rows[n + 6] + w_at,
                    w_rows[n + 7] + w_at,
                )
                dots(out, (o0 + n,), x, (x0,), w, low + high, k)
                n += 8
            while n < w_count:
                dots(out, (o0 + n,), x, (x0,), w, (w_rows[n] + w_at,), k)
                n += 1
            m += 1


@inner
def evenly_spaced(count, step):  # type: ignore[no-untyped-def]
    """Offsets 0, step, 2 step, …"""
    offsets = np.empty(count, np.int64)
    for i in range(count):
        offsets[i] = i * step
    return offsets
