"""`quantize_head`: the head in INT8 on top of every number form of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from heddle.core.model.config import ModelError
from heddle.quant.int8 import Int8Linear

from ..quant.packers import edit, quantize_model
from .conftest import Bench, close, load, oracle, save_tiny
from .test_int8_model import with_dequantised_weights

TOKENS = [(i * 37) % 64 for i in range(21)]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save(folder: Path, form: str, tied: bool) -> tuple[Any, dict[str, Any]]:
    """A model whose layers are in `form`: transformers' model with their dequantised weights, and how to load it."""
    reference = save_tiny(folder, tie_word_embeddings=tied)
    if form == "int8":
        return with_dequantised_weights(reference), {"quantization": "int8"}
    if form != "none":
        quantize_model(reference, folder, form)
    return reference, {}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes makes of a matrix and gives back."""
    codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    return bitsandbytes.functional.int8_vectorwise_dequant(codes, absmax)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["none", "int8", "gptq", "awq"])
def test_logits_are_those_of_the_dequantised_head(
    tmp_path: Path, backend: str, form: str, tied: bool
) -> None:
    """Where the head is tied the embedding is the same table, and so are its rows."""
    reference, options = save(tmp_path, form, tied)
    plain = oracle(reference, TOKENS)
    reference.lm_head.weight.data = rounded(reference.lm_head.weight.data)
    expected = oracle(reference, TOKENS)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max(), "the rounding shows"
    model = load(tmp_path, backend, quantize_head=True, **options)
    assert torch.equal(model.head.dequantize(), reference.lm_head.weight)
    assert torch.equal(model.embedding.dequantize(), reference.model.embed_tokens.weight)
    close(Bench(model).step({"a": TOKENS})["a"], expected)
    assert not isinstance(load(tmp_path, backend, **options).head, Int8Linear), "on request alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bytes_of_the_table_are_reported_and_fall(tmp_path: Path, dtype: torch.dtype) -> None:
    weights, rows = 64 * 32, 64
    for tied in (False, True):
        folder = tmp_path / str(tied)
        save_tiny(folder, tie_word_embeddings=tied).to(dtype).save_pretrained(folder)
        plain, small = load(folder), load(folder, quantize_head=True)
        assert plain.weight_bytes - small.weight_bytes == weights * (dtype.itemsize - 1) - 8 * rows
        (part,) = (part for part in small.parts() if "head" in part.part)
        assert part.bytes == weights + 8 * rows
        assert part.bytes_per_weight == 1.25
        assert ("embedding" in part.part) == tied


def test_a_head_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors[HEAD][3].fill_(1e6))
    with pytest.raises(ModelError, match=rf"{HEAD} has values that float16.*--quantize-head"):
        load(tmp_path, quantize_head=True)


def test_a_head_that_is_packed_already_stays_as_it_is(tmp_path: Path) -> None:
    reference = quantize_model(save_tiny(tmp_path), tmp_path, "gptq", head=True)
    model = load(tmp_path, quantize_head=True)
    assert any("--quantize-head" in note for note in model.notes)
    close(Bench(model).step({"a": TOKENS})["a"], oracle(reference, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_table_whose_values_fit_sixteen_bits_is_held_in_them(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    reference = save_tiny(tmp_path).to(dtype).float()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.embedding.weight.dtype == model.head.weight.dtype == dtype
    assert torch.equal(model.head.dequantize(), reference.lm_head.weight)
    edit(tmp_path, lambda tensors: tensors[EMBEDDING][63].add_(2**-20))
    model = load(tmp_path)
    assert (model.embedding.weight.dtype, model.head.weight.dtype) == (torch.float32, dtype)
