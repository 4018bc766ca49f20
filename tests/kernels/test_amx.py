"""Products of digits in AMX's tiles: the sums of integers themselves, and layers whose bits are those without tiles."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from heddle.kernels import cpu
from heddle.kernels.cpu import amx, digits

from .test_linear_w4 import layer

Check = Callable[..., None]
pytestmark = pytest.mark.skipif(not amx.AMX, reason="this processor has no AMX, or Linux does not permit it")
LAYERS = {
    "linear_int8": lambda x, held, scale, bias: cpu.linear_int8(x, held, scale, bias),
    "linear_w8a8": lambda x, held, scale, bias: cpu.linear_w8a8(x, held, scale, bias, 6.0),
}


@pytest.mark.parametrize("k", [1, 3, 4, 63, 64, 65, 200])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 48])
def test_sums_are_those_of_integers(rows: int, k: int) -> None:
    use, multiply, leave = amx.use_tiles, amx.tile_products, amx.leave_tiles

    @numba.njit
    def run(out, codes, step, rows, w, panels, k, lines):  # type: ignore[no-untyped-def]
        use()
        multiply(out, 8 * panels, codes, step, step, rows, w, 0, panels, k, 0, lines)
        leave()

    draw, full = np.random.default_rng(k), -(-rows // 16) * 16
    for panels in (2, 4, 6, 12):
        step = -(-k // 64) * 64 + 64
        codes = draw.integers(-128, 128, (full + 1, step)).astype(np.int8)
        matrix = draw.integers(-128, 128, (8 * panels, k)).astype(np.int8)
        held = cpu.hold(torch.from_numpy(matrix.copy())).values.numpy().ravel().view(np.uint8)
        for lines in (0, 5):
            out = np.full((full, 8 * panels), -1, np.int32)
            run(out.ravel(), codes.ravel(), step, rows, held, panels, k, lines)
            want = codes[1 : rows + 1, :k].astype(np.int64) @ matrix.astype(np.int64).T
            assert (out[:rows] == want).all()
    assert "llvm.x86.tdpbssd" in next(iter(run.inspect_llvm().values()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 64), (25, 63), (99, 577), (200, 1536)])
def test_a_layers_bits_are_those_without_tiles(
    monkeypatch: pytest.MonkeyPatch, name: str, threads: int, with_bias: bool, n: int, k: int
) -> None:
    """Among the rows some with outliers, one of zeros, two without a form in fixed point; also two bands of rows."""
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    scale, bias, x = torch.rand(n) / 127, torch.randn(n) if with_bias else None, torch.randn(130, k)
    x[::3, k // 2], x[5], x[7, 0], x[20, k - 1] = 60, 0, float("inf"), float("nan")
    held, module, before = (
        cpu.hold(weight),
        importlib.import_module(f"heddle.kernels.cpu.{name}"),
        cpu.team.TEAM.num_threads,
    )
    cpu.team.TEAM.resize(threads)
    try:
        for rows in (1, 2, 15, 16, 17, 49, 130):
            found = []
            for tiles in (True, False):
                monkeypatch.setattr(module, "AMX", tiles)
                found.append(LAYERS[name](x[:rows], held, scale, bias))
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)
    finally:
        cpu.team.TEAM.resize(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(8, 64, 64), (25, 144, 64), (31, 576, 576), (200, 1536, 128)]
)
def test_a_packed_layers_bits_are_those_without_tiles(
    monkeypatch: pytest.MonkeyPatch,
    check: Check,
    threads: int,
    ordered: bool,
    n: int,
    k: int,
    group_size: int,
) -> None:
    weight, wide = layer(n, k, group_size, 4, ordered=ordered, dtype=torch.float16)
    held, bias, x = cpu.hold_packed(weight), torch.randn(n), torch.randn(130, k)
    x[5], x[7, 0], x[20, k - 1] = 0, float("inf"), float("nan")
    module, before = importlib.import_module("heddle.kernels.cpu.linear_w4"), cpu.team.TEAM.num_threads
    cpu.team.TEAM.resize(threads)
    try:
        for rows in (1, 5, 6, 16, 17, 49, 130):
            found = []
            for tiles in (True, False):
                monkeypatch.setattr(module, "AMX", tiles)
                monkeypatch.setattr(module, "FEWEST_ROWS", 1)
                found.append(cpu.linear_w4(x[:rows], held, bias))
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)
            finite = x[:rows].isfinite().all(1)
            check(found[0][finite], x[:rows][finite].double() @ wide.T + bias.double(), 2.0)
    finally:
        cpu.team.TEAM.resize(before)


@pytest.mark.parametrize("name", LAYERS)
def test_a_thread_that_leaves_the_tiles_may_use_them_again(name: str) -> None:
    """One after the other, from threads of their own: the setting is each thread's."""
    from concurrent.futures import ThreadPoolExecutor

    weight, scale, x = (
        torch.randint(-127, 128, (64, 64), dtype=torch.int8),
        torch.rand(64),
        torch.randn(8, 64),
    )
    held = cpu.hold(weight)
    want = LAYERS[name](x, held, scale, None)
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(LAYERS[name], x, held, scale, None).result(), want)


def test_a_row_of_digits_ends_with_a_cache_line() -> None:
    """So that each is read from one line on, 64 inputs at a time."""

    @numba.njit
    def steps():  # type: ignore[no-untyped-def]
        return [digits.digit_step(k, k) for k in range(1, 300)]

    assert all(step % 64 == 0 and step >= -(-k // 64) * 64 for k, step in enumerate(steps(), 1))
