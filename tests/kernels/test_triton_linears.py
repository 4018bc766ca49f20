"""Triton's linears: which kernels run for which shapes, and that a row's bits do not show how many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heddle.kernels import triton
from heddle.kernels.packed_weight import PackedWeight, pack
from heddle.kernels.triton import linears, tiles
from heddle.kernels.triton.launch import Launch, recorded

Check = Callable[..., None]
Layer = Callable[[torch.Tensor], torch.Tensor]
SPLIT = 1088
"""in_features that few columns cut into two parts, of which the second is short."""
FORMS = ["float", "int8", "4 bit", "4 bit ordered", "8 bit"]


def packed(n: int, k: int, group_size: int, bits: int, *, ordered: bool = False) -> PackedWeight:
    groups = -(-k // group_size)
    return PackedWeight(
        codes=pack(torch.randint(0, 2**bits, (n, k), dtype=torch.uint8), bits),
        scales=torch.rand(n, groups) / 2**bits + 1e-3,
        zeros=torch.randint(0, 2**bits, (n, groups), dtype=torch.uint8),
        order=torch.randperm(k) if ordered else None,
        bits=bits,
        group_size=group_size,
    )


def layer(form: str, n: int, k: int, group_size: int = 32) -> tuple[Layer, torch.Tensor, torch.Tensor]:
    """One linear of the form, its weight in float64 [N, K], and its bias."""
    bias = torch.randn(n)
    if form == "float":
        weight = torch.randn(n, k)
        return (
            lambda x: triton.linear_invariant(x, triton.hold(weight.to(x.dtype)), bias),
            weight.double(),
            bias,
        )
    if form == "int8":
        codes, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / 127
        wide = codes.double() * scale.double().unsqueeze(1)
        return lambda x: triton.linear_int8(x, triton.hold(codes), scale, bias), wide, bias
    held = packed(n, k, group_size, int(form[0]), ordered="ordered" in form)
    wide = held.values().double()
    if held.order is not None:
        wide = wide[:, held.order.argsort()]
    return lambda x: triton.linear_w4(x, held, bias), wide, bias


def names(launches: list[Launch]) -> list[str]:
    return [launch.name for launch in launches]


@pytest.mark.parametrize("form", FORMS)
def test_few_rows_are_split_along_k_and_many_are_dequantised(form: str) -> None:
    linear, _, _ = layer(form, 40, SPLIT)
    packed_too = [] if form in ("float", "int8") else ["dequantise"]
    few = "few_rows_packed" if packed_too else "few_rows"
    for rows, expected in ((1, [few, "finish"]), (64, [few, "finish"]), (65, [*packed_too, "many_rows"])):
        with recorded(run=False) as launches:
            linear(torch.randn(rows, SPLIT))
        assert names(launches) == expected, rows
    with recorded(run=False) as launches:
        linear(torch.randn(0, SPLIT))
    assert not launches


@pytest.mark.parametrize(
    ("n", "k", "parts"), [(6144, 4096, 1), (4096, 14336, 1), (1024, 4096, 4), (40, 1024, 2), (40, 1000, 1)]
)
def test_parts_are_fixed_by_the_weight_alone(n: int, k: int, parts: int) -> None:
    """One launch where the columns alone fill the chip; parts of equal length, of whole steps, where they do not."""
    weight = torch.empty(n, k, dtype=torch.float16, device="meta")
    for rows in (1, 7, 16, 17, 33, 64):
        with recorded(run=False) as launches:
            linears.linear(
                torch.empty(rows, k, dtype=torch.float16, device="meta"), triton.hold(weight), None
            )
        assert launches[0].grid[1] == parts
        assert names(launches) == (["few_rows"] if parts == 1 else ["few_rows", "finish"])
    assert tiles.part_size(n, k) % tiles.STEP == 0
    assert tiles.part_size(n, k) * parts >= k > tiles.part_size(n, k) * (parts - 1)


def test_no_shape_asks_for_more_than_the_shared_memory_of_the_smallest_chip() -> None:
    for dtype, tile in ((dtype, tiles.many(dtype)) for dtype in (torch.float16, torch.float32)):
        assert tile.stages * (tile.rows + tile.columns) * tiles.STEP * dtype.itemsize <= 99 << 10


@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_row_do_not_depend_on_the_kernel_or_on_its_company(form: str) -> None:
    """Alone, in every tile of the few, among the many, in another place: the same bits, in float32 and in 16 bits."""
    linear, _, _ = layer(form, 34, SPLIT)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(66, SPLIT).to(dtype)
        whole = linear(x)
        for rows in (1, 17, 40):
            assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[65:]), whole[65:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_within_their_tolerance_for_few_and_many(
    check: Check, form: str, dtype: torch.dtype
) -> None:
    linear, wide, bias = layer(form, 35, SPLIT)
    x = torch.randn(67, SPLIT).to(dtype)
    for rows in (3, 67):
        got = linear(x[:rows])
        assert got.dtype == dtype
        check(got, x[:rows].double() @ wide.T + bias.double())


@pytest.mark.parametrize("group_size", [16, 48, 64, 128, 176])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_any_length_and_a_short_last_one(check: Check, bits: int, group_size: int) -> None:
    """A step within one group, several groups in a step, groups that begin in the middle of one; one group of all."""
    k = 176
    linear, wide, bias = layer(f"{bits} bit ordered", 33, k, group_size)
    x = torch.randn(70, k)
    for rows in (2, 70):
        check(linear(x[:rows]), x[:rows].double() @ wide.T + bias.double(), 2.0)


def test_many_rows_over_strips_of_out_features(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    """What is dequantised at a time is bounded; each strip writes its own columns."""
    monkeypatch.setattr(tiles, "STRIP_BYTES", 64 * 96 * 4)
    for form in ("int8", "4 bit"):
        linear, wide, bias = layer(form, 150, 96)
        x = torch.randn(65, 96)
        with recorded() as launches:
            got = linear(x)
        assert names(launches).count("many_rows") == 3
        check(got, x.double() @ wide.T + bias.double(), 2.0)


def test_every_value_of_the_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and sums begin as NaN."""

    def poisoned(*shape: object, **options: object) -> torch.Tensor:
        return torch.full(*shape, torch.nan, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(linears.torch, "empty", poisoned)
    for form in FORMS:
        linear, _, _ = layer(form, 35, SPLIT)
        for rows in (1, 66):
            assert torch.isfinite(linear(torch.randn(rows, SPLIT))).all(), (form, rows)


@pytest.mark.parametrize("form", FORMS)
def test_activations_with_gaps_between_rows_or_values(check: Check, form: str) -> None:
    linear, wide, bias = layer(form, 20, 96)
    wider = torch.randn(66, 300)
    for x in (wider[:5, 7:103], wider[:66, 100:196], wider[:, :192:2]):
        check(linear(x), x.double() @ wide.T + bias.double(), 2.0)
