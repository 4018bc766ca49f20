"""GPTQ as its paper derives it, in float64 and one column after the other; no code of Heddle's."""

from __future__ import annotations

import numpy as np


def grid(values: np.ndarray, bits: int, symmetric: bool) -> tuple[float, int]:
    """Scale and zero of one group, by hand."""
    top = 2**bits - 1
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    if symmetric:
        high = max(high, -low)
        low = -high
    if low == high:
        low, high = -1.0, 1.0
    scale = float(np.float16((high - low) / top))
    if symmetric:
        return scale, 2 ** (bits - 1)
    zero = int(np.round(-low / scale))
    if zero == 0:
        return float(np.float16(high / (top - 1))), 1
    return scale, min(zero, top)


def by_columns(
    weight: np.ndarray,
    hessian: np.ndarray,
    bits: int,
    size: int,
    act_order: bool,
    symmetric: bool,
    damp: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The dequantised weight and g_idx. After each column the inverse is reduced by it, as the paper derives it."""
    weight, hessian = weight.astype(np.float64).copy(), hessian.astype(np.float64).copy()
    k = weight.shape[1]
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(k)
    weight, hessian = weight[:, order], hessian[np.ix_(order, order)]
    inverse = np.linalg.inv(hessian + damp * np.diag(hessian).mean() * np.eye(k))
    out = np.zeros_like(weight)
    grids: list[tuple[float, int]] = []
    for j in range(k):
        if j % size == 0:
            grids = [grid(row, bits, symmetric) for row in weight[:, j : j + size]]
        for n, (scale, zero) in enumerate(grids):
            code = min(max(np.round(weight[n, j] / scale) + zero, 0), 2**bits - 1)
            out[n, j] = (code - zero) * scale
        error = (weight[:, j] - out[:, j]) / inverse[0, 0]
        weight[:, j:] -= np.outer(error, inverse[0])
        inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    place = np.argsort(order)
    return out[:, place], (np.arange(k) // size)[place]
