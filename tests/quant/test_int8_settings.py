"""bitsandbytes' settings beside the tensors: which linears it left in float, the head among those it did not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle.core.model.config import ModelError
from heddle.quant.base import QuantError
from heddle.quant.int8 import Int8Linear
from heddle.quant.int8_settings import left_in_float
from safetensors.torch import load_file
from transformers.quantizers.quantizers_utils import should_convert_module

from ..model.conftest import Bench, close, load, oracle, save_tiny
from ..model.test_int8_model import with_dequantised_weights
from .packers import configure, edit

TOKENS = [5, 9, 2, 44, 17, 30, 11]
NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (1, 11)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]
ENTRIES = [
    "o_proj", "self_attn.o_proj", "model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.*", "up_proj|q_proj",
    r"model\.layers\.\d\.mlp", "proj", "lm_head", "model.layers.1.mlp.up", "layers.1", "mlp",
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_transformers_leaves_in_float_may_be_float(entry: str) -> None:
    found = left_in_float({"llm_int8_skip_modules": ["lm_head", entry]}, "config.json")
    for name in NAMES:
        if not should_convert_module(name, ["lm_head", entry]):
            assert found.may_be_float(name)
        if found.must_be_float(name):
            assert not should_convert_module(name, ["lm_head", entry])


def test_entries_mean_whole_parts_of_a_name() -> None:
    found = left_in_float({"llm_int8_skip_modules": ["model.layers.1", "mlp.up"]}, "config.json")
    assert [found.may_be_float(name) for name in NAMES] == [True] * 5 + [False] * 5
    assert [found.must_be_float(name) for name in NAMES] == [True] * 5 + [False] * 5
    assert not any(left_in_float({}, "config.json").may_be_float(name) for name in NAMES)


@pytest.mark.parametrize("bad", ["o_proj", [3], [""], ["(o_proj"]])
def test_lists_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(QuantError, match=r"config\.json: llm_int8_skip_modules"):
        left_in_float({"llm_int8_skip_modules": bad}, "config.json")


def save_packed(folder: Path, skip: list[str] | None, **changes: Any) -> Any:
    """A checkpoint by transformers and bitsandbytes; returns the float model."""
    reference = save_tiny(folder / "float", **changes)
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=settings, device_map="cpu"
    )
    packed.save_pretrained(folder / "packed")
    return reference


def test_a_head_that_bitsandbytes_quantised_is_read(tmp_path: Path) -> None:
    """As it does where the list of modules to skip does not name it."""
    reference = save_packed(tmp_path, ["down_proj"])
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.int8
    kept = [layer.mlp.down_proj.weight.data.clone() for layer in reference.model.layers]
    with_dequantised_weights(reference)
    for layer, weight in zip(reference.model.layers, kept, strict=True):
        layer.mlp.down_proj.weight.data = weight
    scale = stored["lm_head.SCB"].unsqueeze(1) / 127
    reference.lm_head.weight.data = stored["lm_head.weight"].float() * scale
    for backend in ("reference", "cpu"):
        model = load(tmp_path / "packed", backend)
        assert isinstance(model.head, Int8Linear)
        close(Bench(model).step({"a": TOKENS})["a"], oracle(reference, TOKENS), 1e-5)


def test_every_bias_is_added(tmp_path: Path) -> None:
    """All seven of a layer, out of a bitsandbytes checkpoint; one the config does not mention is refused."""
    reference = save_packed(tmp_path, None, attention_bias=True, mlp_bias=True)
    with_dequantised_weights(reference)
    found = Bench(load(tmp_path / "packed", "cpu")).step({"a": TOKENS})["a"]
    close(found, oracle(reference, TOKENS), 1e-5)
    for flag, module in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        configure(tmp_path / "packed", **{flag: False})
        with pytest.raises(ModelError, match=rf"{module}\.\w+_proj\.bias"):
            load(tmp_path / "packed")
        configure(tmp_path / "packed", **{flag: True})


def test_settings_and_tensors_that_disagree_are_refused_by_both_names(tmp_path: Path) -> None:
    save_packed(tmp_path, None)
    folder = tmp_path / "packed"
    settings = dict(transformers.AutoConfig.from_pretrained(folder).quantization_config)
    name = "model.layers.1.mlp.down_proj"
    configure(folder, quantization_config={**settings, "llm_int8_skip_modules": ["lm_head", name]})
    with pytest.raises(ModelError, match=rf"{re.escape(name)}\.weight is int8, but llm_int8_skip_modules"):
        load(folder)
    configure(folder, quantization_config=settings)

    def take_scales(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.SCB"] = tensors[f"{name}.SCB"].half()

    edit(folder, take_scales)
    with pytest.raises(ModelError, match=rf"{re.escape(name)}\.SCB is float16 \[32\]"):
        load(folder)


@pytest.mark.parametrize("layout", [torch.tensor(1, dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)])
def test_layouts_of_old_gpu_kernels_are_refused_in_a_whole_checkpoint(
    tmp_path: Path, layout: torch.Tensor
) -> None:
    save_packed(tmp_path, None)
    name = "model.layers.0.self_attn.k_proj.weight_format"
    edit(tmp_path / "packed", lambda tensors: tensors.update({name: layout}))
    with pytest.raises(ModelError, match=rf"{re.escape(name)} is "):
        load(tmp_path / "packed")
