"""A model in INT8: made on loading, or as transformers and bitsandbytes saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
import transformers
from heddle.core.model.config import ModelError
from safetensors.torch import load_file, save_file

TOKENS = [(i * 37) % 64 for i in range(21)]
O_PROJ = "model.layers.1.self_attn.o_proj"


def with_dequantised_weights(reference: Any) -> Any:
    """`reference` with each layer's linears replaced by what bitsandbytes makes of them and gives back."""
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(module.weight.data.half())
            module.weight.data = bitsandbytes.functional.int8_vectorwise_dequant(codes, absmax)
    return reference


def save_packed(tiny: Any, folder: Path, *, skip: list[str] | None = None, **changes: Any) -> Any:
    """A checkpoint quantised and saved by transformers and bitsandbytes; returns the float model."""
    reference = tiny.save(folder / "float", **changes)
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=settings, device_map="cpu"
    )
    packed.save_pretrained(folder / "packed")
    return reference


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"kind": "Qwen2"}])
def test_made_on_loading_equals_the_dequantised_weights(
    tiny: Any, tmp_path: Path, backend: str, changes: dict[str, Any]
) -> None:
    reference = tiny.save(tmp_path, **changes)
    model = tiny.load(tmp_path, backend, quantization="int8")
    assert model.quantization == "int8"
    found = tiny.Bench(model).step({"a": TOKENS})["a"]
    plain = tiny.oracle(reference, TOKENS)
    expected = tiny.oracle(with_dequantised_weights(reference), TOKENS)
    tiny.close(found, expected)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max(), "the rounding shows"


def test_a_bitsandbytes_checkpoint_gives_the_same_model(tiny: Any, tmp_path: Path, backend: str) -> None:
    reference = save_packed(tiny, tmp_path, attention_bias=True)
    packed = tiny.load(tmp_path / "packed", backend)
    assert packed.quantization == "int8"
    assert "quantization_config" in packed.quantization_reason
    found = tiny.Bench(packed).step({"a": TOKENS})["a"]
    tiny.close(found, tiny.oracle(with_dequantised_weights(reference), TOKENS))
    made = tiny.load(tmp_path / "float", backend, quantization="int8")
    assert torch.equal(found, tiny.Bench(made).step({"a": TOKENS})["a"])


@pytest.mark.parametrize("skip", [["lm_head", "o_proj"], ["lm_head", "k_proj", "model.layers.0.mlp.up_proj"]])
def test_modules_that_bitsandbytes_left_in_float_stay_so(
    tiny: Any, tmp_path: Path, backend: str, skip: list[str]
) -> None:
    """Also where only some of q, k and v, or of gate and up, are float."""
    reference = save_packed(tiny, tmp_path, skip=skip)
    kept = {
        name: module.weight.data.clone()
        for name, module in reference.named_modules()
        if any(name.endswith(entry) for entry in skip)
    }
    with_dequantised_weights(reference)
    for name, weight in kept.items():
        reference.get_submodule(name).weight.data = weight
    found = tiny.Bench(tiny.load(tmp_path / "packed", backend)).step({"a": TOKENS})["a"]
    tiny.close(found, tiny.oracle(reference, TOKENS))


def test_int8_weights_without_their_scales_are_refused(tiny: Any, tmp_path: Path) -> None:
    save_packed(tiny, tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{O_PROJ}.SCB"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"{O_PROJ}\.SCB"):
        tiny.load(tmp_path / "packed")


def test_scales_beside_a_float_weight_are_refused(tiny: Any, tmp_path: Path) -> None:
    save_packed(tiny, tmp_path, skip=["lm_head", "o_proj"])
    path = tmp_path / "packed" / "model.safetensors"
    save_file({**load_file(path), f"{O_PROJ}.SCB": torch.ones(32)}, path)
    with pytest.raises(ModelError, match=rf"{O_PROJ}\.SCB"):
        tiny.load(tmp_path / "packed")


def test_a_float_weight_that_the_settings_call_int8_is_refused(tiny: Any, tmp_path: Path) -> None:
    save_packed(tiny, tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{O_PROJ}.SCB"], tensors[f"{O_PROJ}.weight_format"]
    tensors[f"{O_PROJ}.weight"] = tensors[f"{O_PROJ}.weight"].float()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"{O_PROJ}\.weight is .*llm_int8_skip_modules"):
        tiny.load(tmp_path / "packed")


def test_a_packed_checkpoint_is_not_served_as_float(tiny: Any, tmp_path: Path) -> None:
    save_packed(tiny, tmp_path)
    with pytest.raises(ModelError, match="INT8"):
        tiny.load(tmp_path / "packed", quantization="none")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_form_the_checkpoint_is_not_in_is_refused(tiny: Any, tmp_path: Path, method: str) -> None:
    tiny.save(tmp_path)
    with pytest.raises(ModelError, match=method):
        tiny.load(tmp_path, quantization=method)


def test_int8_takes_a_quarter_of_the_layers(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    plain, small = tiny.load(tmp_path), tiny.load(tmp_path, quantization="int8")
    weights = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 64 * 32 * 3)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert plain.weight_bytes - small.weight_bytes == 3 * weights - 8 * rows
