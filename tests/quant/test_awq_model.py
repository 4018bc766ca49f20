"""Whole models in AWQ form: the dequantised weights' logits, or a refusal that names what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.core.model.config import ModelError
from heddle.core.model.llama import LlamaModel
from heddle.quant.packed import PackedLinear
from heddle.quant.side_by_side import SideBySide

from ..model.conftest import Bench, close, load, oracle, save_tiny
from .packers import configure, edit, quantize_model

TOKENS = [(i * 37) % 64 for i in range(21)]
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(folder: Path, model: dict[str, Any] | None = None, **how: Any) -> Any:
    """A tiny AWQ checkpoint, and transformers' model of its weights."""
    return quantize_model(save_tiny(folder, **(model or {})), folder, "awq", **how)


def agrees(model: LlamaModel, reference: Any) -> None:
    bench = Bench(model)
    steps = [bench.step({"a": part})["a"] for part in (TOKENS[:9], TOKENS[9:-1], TOKENS[-1:])]
    close(torch.cat(steps), oracle(reference, TOKENS), 1e-5)


@pytest.mark.parametrize("model", [{}, {"attention_bias": True, "mlp_bias": True}, {"kind": "Qwen2"}])
@pytest.mark.parametrize("group_size", [-1, 16, 32])
def test_logits_are_those_of_the_dequantised_weights(
    tmp_path: Path, backend: str, group_size: int, model: dict[str, Any]
) -> None:
    reference = save(tmp_path, model, group_size=group_size)
    loaded = load(tmp_path, backend)
    assert loaded.quantization == "awq"
    assert "AWQ, 4 bit" in loaded.quantization_reason
    assert all(isinstance(layer.qkv.linear, PackedLinear) for layer in loaded.layers)
    agrees(loaded, reference)


def test_modules_that_are_not_converted_are_read_in_float(tmp_path: Path, backend: str) -> None:
    reference = save(tmp_path, skip=("v_proj", "down_proj"))
    model = load(tmp_path, backend)
    assert isinstance(model.layers[0].qkv.linear, SideBySide)
    agrees(model, reference)


def test_a_float_module_that_the_settings_do_not_leave_so_is_refused(tmp_path: Path) -> None:
    save(tmp_path, skip=("v_proj",), settings={**SETTINGS, "modules_to_not_convert": ["o_proj"]})
    with pytest.raises(ModelError, match="modules_to_not_convert"):
        load(tmp_path)


def test_a_packed_module_that_the_settings_leave_in_float_is_refused(tmp_path: Path) -> None:
    save(tmp_path, settings={**SETTINGS, "modules_to_not_convert": ["self_attn.q_proj"]})
    with pytest.raises(ModelError, match=rf"{Q}\.qweight is there, but modules_to_not_convert"):
        load(tmp_path)


def test_a_file_without_zero_points_has_the_middle(tmp_path: Path, backend: str) -> None:
    reference = save(tmp_path, symmetric=True, settings={**SETTINGS, "zero_point": False})
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "qzeros" in name])
    model = load(tmp_path, backend)
    agrees(model, reference)
    configure(tmp_path, quantization_config=SETTINGS)
    with pytest.raises(ModelError, match=r"lacks .*qzeros"):
        load(tmp_path)


def test_settings_in_a_file_of_their_own_under_older_names(tmp_path: Path, backend: str) -> None:
    reference = save(tmp_path)
    configure(tmp_path, quantization_config=None)
    older = {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    model = load(tmp_path, backend)
    assert "quant_config.json" in model.quantization_reason
    agrees(model, reference)
    configure(tmp_path, quantization_config={**SETTINGS, "group_size": 32})
    with pytest.raises(ModelError, match=r"quant_config\.json disagree: group_size is 32 .* 16"):
        load(tmp_path)


@pytest.mark.parametrize("version", ["gemv", "GEMV", "marlin", "gemv_fast"])
def test_other_versions_are_refused_by_name(tmp_path: Path, version: str) -> None:
    save(tmp_path, settings={**SETTINGS, "version": version})
    with pytest.raises(ModelError, match=f"AWQ version '{version}'"):
        load(tmp_path)


def test_a_gemv_file_labelled_gemm_is_refused_by_its_shapes(tmp_path: Path) -> None:
    """gemv packs along the inputs: qweight [N, K / 8]."""
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({f"{V}.qweight": torch.zeros(16, 4, dtype=torch.int32)}))
    with pytest.raises(ModelError, match=rf"{V}\.qweight is int32 \[16, 4\].*int32 \[32, 2\]"):
        load(tmp_path)


def test_a_gptq_file_labelled_awq_is_refused(tmp_path: Path) -> None:
    quantize_model(save_tiny(tmp_path), tmp_path, "gptq", settings=SETTINGS)
    with pytest.raises(ModelError, match="AWQ"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, part: str) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{Q}.{part}"))
    with pytest.raises(ModelError, match=rf"lacks .*{Q}\.{part}"):
        load(tmp_path)
