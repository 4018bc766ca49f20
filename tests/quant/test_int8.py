"""INT8 weights are bitsandbytes' own, bit for bit, and compute what they dequantise to."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional
import pytest
import torch
from heddle.kernels.ops import for_device
from heddle.quant.base import LinearSpec, QuantError, Target
from heddle.quant.int8 import CHUNK, Int8Form, Int8Linear, quantize_rows

TARGET = Target(for_device("cpu", "reference"), torch.float32, torch.device("cpu"))


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        return self.tensors[name].dtype if name in self.tensors else None

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 1, rows).unsqueeze(1)
    return (torch.randn((rows, columns), generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 96), (300, 576)])
def test_weights_equal_bitsandbytes_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    original = weight(*shape, dtype)
    expected, statistics, _ = bitsandbytes.functional.int8_vectorwise_quant(original.to(torch.float16))
    found, absmax = quantize_rows(original)
    assert torch.equal(found, expected)
    assert torch.equal(absmax, statistics)


def test_weights_equal_those_of_a_bitsandbytes_layer() -> None:
    """The whole path of bitsandbytes' Linear8bitLt, its rounding to float16 included."""
    original = weight(48, 40)
    layer = bitsandbytes.nn.Linear8bitLt(40, 48, bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(original.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    found, absmax = quantize_rows(original)
    assert layer.weight.data.dtype == torch.int8
    assert torch.equal(found, layer.weight.data)
    assert torch.equal(absmax, layer.weight.SCB)


def test_chunks_of_a_large_matrix_change_nothing() -> None:
    original = weight(2 * CHUNK // 40_000 + 3, 40_000, torch.float16)
    expected, statistics, _ = bitsandbytes.functional.int8_vectorwise_quant(original)
    found, absmax = quantize_rows(original)
    assert torch.equal(found, expected)
    assert torch.equal(absmax, statistics)


def test_ties_round_to_even_and_zero_rows_stay_zero() -> None:
    original = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]])
    found, absmax = quantize_rows(original)
    assert found.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert absmax.tolist() == [127.0, 0.0]
    linear = Int8Linear(found, absmax, None, TARGET)
    assert linear.apply(torch.ones(1, 4)).tolist() == [[127.0, 0.0]]


def test_dequantised_weights_equal_bitsandbytes_bit_for_bit() -> None:
    quantized, absmax = quantize_rows(weight(64, 96))
    expected = bitsandbytes.functional.int8_vectorwise_dequant(quantized, absmax)
    assert torch.equal(Int8Linear(quantized, absmax, None, TARGET).dequantize(), expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_product_is_that_of_the_dequantised_weights(backend: str) -> None:
    target = Target(for_device("cpu", backend), torch.float32, torch.device("cpu"))
    reader = Tensors(a__weight=weight(24, 32), b__weight=weight(8, 32, seed=1), b__bias=torch.randn(8))
    specs = [LinearSpec("a", 24, 32, bias=False), LinearSpec("b", 8, 32, bias=True)]
    linear = Int8Form().from_checkpoint(reader, specs, target)
    x = torch.randn(5, 32)
    expected = x.double() @ linear.dequantize().double().T
    expected[:, 24:] += reader.read("b.bias")
    assert linear.dequantize().shape == (32, 32)
    torch.testing.assert_close(linear.apply(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_with_an_outlier_does_not_reach_its_neighbours(backend: str) -> None:
    """The cpu kernels give equal bits; the reference's matrix product may order its sums by the row count."""
    torch.manual_seed(0)
    ops = for_device("cpu", backend)
    linear = Int8Linear(*quantize_rows(weight(64, 32)), None, Target(ops, torch.float32, torch.device("cpu")))
    quiet = torch.randn(1, 32)
    quiet *= 3 / quiet.abs().max()
    loud = torch.randn(1, 32)
    loud[0, 0] = 60
    alone = linear.apply(quiet)[0]
    rounding = 0.0 if ops.ROWS_INVARIANT else 1e-6 * alone.abs().max().item()
    for place in range(8):
        batch = loud.repeat(8, 1)
        batch[place] = quiet
        torch.testing.assert_close(linear.apply(batch)[place], alone, rtol=0, atol=rounding)


class TestBitsandbytesCheckpoint:
    """Weights that a file already holds as int8."""

    codes = torch.tensor([[32, -64, 127], [127, 64, -32]], dtype=torch.int8)
    spec = LinearSpec("p", 2, 3, bias=False)

    def load(self, **changes: Any) -> Int8Linear:
        stored = {"p__SCB": torch.tensor([4.0, 0.5]), "p__weight_format": torch.tensor(0, dtype=torch.uint8)}
        reader = Tensors(**{"p__weight": self.codes, **stored, **changes})
        linear = Int8Form().from_checkpoint(reader, [self.spec], TARGET)
        assert isinstance(linear, Int8Linear)
        return linear

    def test_its_scales_are_used(self) -> None:
        expected = torch.tensor([[1.00787, -2.01575, 4.0], [0.5, 0.251969, -0.125984]])
        linear = self.load()
        torch.testing.assert_close(linear.dequantize(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(linear.apply(torch.eye(3)).T, expected, rtol=1e-5, atol=1e-6)

    def test_its_tensors_are_all_asked_for(self) -> None:
        expected = Int8Form().expected(self.spec, Tensors(p__weight=self.codes))
        assert set(expected) == {"p.weight", "p.SCB"}, "a weight without SCB is missed before it is read"
        layout = torch.tensor(0, dtype=torch.uint8)
        reader = Tensors(p__weight=self.codes, p__SCB=torch.ones(2), p__weight_format=layout)
        assert set(Int8Form().expected(self.spec, reader)) == {"p.weight", "p.SCB", "p.weight_format"}

    def test_other_layouts_than_row_major_are_refused(self) -> None:
        with pytest.raises(QuantError, match="weight_format is 2"):
            self.load(p__weight_format=torch.tensor(2, dtype=torch.uint8))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
    def test_scales_that_are_none_are_refused(self, bad: float) -> None:
        with pytest.raises(QuantError, match=r"p\.SCB"):
            self.load(p__SCB=torch.tensor([4.0, bad]))


@pytest.mark.parametrize("bad", [1e6, float("nan"), float("inf")])
def test_weights_beyond_float16_are_refused_by_name(bad: float) -> None:
    original = weight(4, 8)
    original[2, 3] = bad
    with pytest.raises(QuantError, match=r"a\.weight"):
        Int8Form().from_checkpoint(Tensors(a__weight=original), [LinearSpec("a", 4, 8, bias=False)], TARGET)
