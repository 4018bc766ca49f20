"""Settings and tensors that say different things: refused, with the setting's place and the tensor both named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.core.model.config import ModelError

from ..model.conftest import load, save_tiny
from ..model.test_int8_model import save_packed
from .packers import configure, edit, quantize_model

Q = "model.layers.0.self_attn.q_proj"
OUT = "model.layers.1.self_attn.o_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as refused:
        load(folder, **options)
    return str(refused.value)


class TestGptq:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        quantize_model(save_tiny(tmp_path), tmp_path, "gptq", act_order="group")
        return tmp_path

    @pytest.mark.parametrize(
        ("changes", "said", "tensor"),
        [
            ({"bits": 8}, "8 bit", "qweight is int32 [4, 32]"),
            ({"group_size": 32}, "groups of 32", "qzeros is int32 [2, 4]"),
            ({"group_size": -1}, "one group a row", "qzeros is int32 [2, 4]"),
            ({"sym": True}, "sym is true", ".qzeros"),
            ({"desc_act": False}, "desc_act is false", ".g_idx"),
        ],
    )
    def test_a_setting_that_the_tensors_deny(
        self, folder: Path, changes: dict[str, Any], said: str, tensor: str
    ) -> None:
        configure(folder, quantization_config={**GPTQ, **changes})
        message = refusal(folder)
        assert said in message
        assert tensor in message
        assert "config.json" in message

    def test_act_order_without_its_order_of_features(self, folder: Path) -> None:
        edit(folder, lambda tensors: tensors.pop(f"{OUT}.g_idx"))
        message = refusal(folder)
        assert f"{OUT}.g_idx" in message
        assert "act-order" in message
        assert "config.json" in message

    @pytest.mark.parametrize(
        ("value", "said"), [(2, "names groups from 0 to 2"), (1, "does not fill groups of 16")]
    )
    def test_an_order_of_features_that_does_not_fit_the_groups(
        self, folder: Path, value: int, said: str
    ) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            index = tensors[f"{OUT}.g_idx"]
            index[(index == 0).nonzero()[0]] = value

        edit(folder, change)
        message = refusal(folder)
        assert f"{OUT}.g_idx {said}" in message
        assert "groups of 16, act-order (config.json)" in message


class TestAwq:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        quantize_model(save_tiny(tmp_path), tmp_path, "awq")
        return tmp_path

    @pytest.mark.parametrize(
        ("changes", "said", "tensor"),
        [
            ({"group_size": 32}, "groups of 32", "qzeros is int32 [2, 4]"),
            ({"zero_point": False}, "zero_point is false", ".qzeros"),
            (
                {**GPTQ, "desc_act": False, "zero_point": None, "version": None},
                "GPTQ, 4 bit",
                "qweight is int32 [32, 4]",
            ),
        ],
    )
    def test_a_setting_that_the_tensors_deny(
        self, folder: Path, changes: dict[str, Any], said: str, tensor: str
    ) -> None:
        configure(folder, quantization_config={**AWQ, **changes})
        message = refusal(folder)
        assert said in message
        assert tensor in message
        assert "config.json" in message

    def test_zeros_that_are_promised_and_missing(self, folder: Path) -> None:
        edit(folder, lambda tensors: tensors.pop(f"{OUT}.qzeros"))
        message = refusal(folder)
        assert f"{OUT}.qzeros" in message
        assert "AWQ, 4 bit, groups of 16 (config.json) asks for" in message


class TestInt8:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_packed(_Saves(), tmp_path)
        return tmp_path / "packed"

    def test_weights_without_their_scales(self, folder: Path) -> None:
        edit(folder, lambda tensors: tensors.pop(f"{OUT}.SCB"))
        message = refusal(folder)
        assert f"lacks 1 tensors: {OUT}.SCB" in message
        assert f"{OUT}.weight in int8 asks for" in message

    def test_scales_of_another_shape(self, folder: Path) -> None:
        edit(folder, lambda tensors: tensors.update({f"{OUT}.SCB": torch.ones(16)}))
        message = refusal(folder)
        assert f"{OUT}.SCB is float32 [16], but {OUT}.weight in int8 asks for float32 [32]" in message

    def test_settings_of_another_tool(self, folder: Path) -> None:
        configure(folder, quantization_config=GPTQ)
        message = refusal(folder)
        assert "quantization_config says gptq" in message
        assert "no tensor is packed" in message

    def test_settings_without_a_tensor_in_that_form(self, folder: Path) -> None:
        configure(
            folder.parent / "float",
            quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True},
        )
        message = refusal(folder.parent / "float")
        assert "quantization_config says bitsandbytes 8 bit, but no weight is int8" in message


def test_shapes_that_the_model_s_own_settings_deny(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    configure(tmp_path, intermediate_size=96)
    message = refusal(tmp_path)
    assert "gate_proj.weight is float32 [64, 32], but config.json asks for" in message
    assert "[96, 32]" in message


@pytest.mark.parametrize("form", ["none", "int8", "gptq", "awq"])
def test_auto_says_what_decided(tmp_path: Path, form: str) -> None:
    if form == "int8":
        save_packed(_Saves(), tmp_path)
        tmp_path /= "packed"
    else:
        reference = save_tiny(tmp_path)
        if form != "none":
            quantize_model(reference, tmp_path, form)
    model = load(tmp_path)
    assert model.quantization == form
    named = {
        "none": "plain float",
        "int8": "bitsandbytes INT8",
        "gptq": "GPTQ, 4 bit, groups of 16",
        "awq": "AWQ, 4 bit",
    }
    assert named[form] in model.quantization_reason
    assert ("config" in model.quantization_reason) == (form != "none")


class _Saves:
    save = staticmethod(save_tiny)
