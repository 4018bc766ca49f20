"""Number conversions against torch's own, over every 16-bit pattern and random float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heddle.lora.floats import FloatForm, convert, is_finite, magnitude, magnitude_bits, to_float32

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_torch(values: np.ndarray, form: FloatForm) -> torch.Tensor:
    return torch.from_numpy(values.copy()).view(TORCH[form])


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()


def all_finite_patterns(form: FloatForm) -> np.ndarray:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    infinity = 0x7C00 if form == "F16" else 0x7F80
    patterns = patterns[(patterns & 0x7FFF) < infinity]
    return patterns.view(np.float16) if form == "F16" else patterns


@pytest.mark.parametrize("form", ["F16", "BF16"])
def test_every_16_bit_value_widens_as_torch_says(form: FloatForm) -> None:
    values = all_finite_patterns(form)
    expected = as_torch(values, form).float()
    assert np.array_equal(bits(expected), to_float32(values, form).view(np.int32))


@pytest.mark.parametrize("to", ["F16", "BF16"])
def test_float32_is_rounded_to_nearest_even_as_torch_rounds(to: FloatForm) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(1 << 16).astype(np.float32) * np.float32(2.0) ** generator.integers(
        -30, 14, 1 << 16
    ).astype(np.float32)
    # Halfway between two neighbours of the narrower form, where ties must go to the even one.
    ties = (np.arange(0x3C00, 0x3D00, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
    values = np.concatenate([values, ties, -ties])
    expected = torch.from_numpy(values).to(TORCH[to])
    assert np.array_equal(bits(expected), convert(values, "F32", to).view(np.int16))


@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
def test_the_same_form_keeps_every_bit(form: FloatForm) -> None:
    values = all_finite_patterns("F16" if form == "F16" else "BF16")
    values = to_float32(values, "BF16") if form == "F32" else values
    assert convert(values, form, form) is values


@pytest.mark.parametrize(
    ("value", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (-1e30, False)]
)
def test_a_value_beyond_float16_is_an_error_not_an_infinity(value: float, fits: bool) -> None:
    values = np.array([1.0, value], dtype=np.float32)
    if fits:
        assert np.isfinite(convert(values, "F32", "F16")).all()
    else:
        with pytest.raises(OverflowError, match="beyond the range of F16"):
            convert(values, "F32", "F16")


def test_the_largest_float32_does_not_round_to_a_bfloat16_infinity_unseen() -> None:
    with pytest.raises(OverflowError):
        convert(np.array([np.finfo(np.float32).max], dtype=np.float32), "F32", "BF16")


@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
def test_magnitudes_order_and_tell_what_is_no_number(form: FloatForm) -> None:
    def encode(*values: float) -> np.ndarray:
        narrow = torch.tensor(values).to(TORCH[form])
        return narrow.view(torch.uint16).numpy() if form == "BF16" else narrow.numpy()

    assert magnitude_bits(encode(0.0, -0.0), form) == 0
    largest = magnitude_bits(encode(0.5, -2.0, 1.0), form)
    assert is_finite(largest, form)
    assert magnitude(largest, form) == 2.0
    assert not is_finite(magnitude_bits(encode(1.0, float("-inf")), form), form)
    assert not is_finite(magnitude_bits(encode(float("nan"), 1.0), form), form)
