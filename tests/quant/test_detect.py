"""Which number form a checkpoint is in: seen, explained, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heddle.quant.base import QuantError
from heddle.quant.detect import detect

Q = "model.layers.0.self_attn.q_proj"
FLOAT = {f"{Q}.weight": torch.float16, "model.norm.weight": torch.float16}
INT8 = {f"{Q}.weight": torch.int8, f"{Q}.SCB": torch.float32}
PACKED = {f"{Q}.qweight": torch.int32, f"{Q}.scales": torch.float16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}


@pytest.mark.parametrize(
    ("requested", "settings", "tensors", "name", "reason"),
    [
        ("auto", None, FLOAT, "none", "plain float"),
        ("none", None, FLOAT, "none", "asked for"),
        ("int8", None, FLOAT, "int8", "made on loading"),
        ("auto", BITSANDBYTES, INT8, "int8", "quantization_config"),
        ("int8", BITSANDBYTES, INT8, "int8", "quantization_config"),
        ("auto", None, INT8, "int8", f"{Q}.weight is int8"),
        ("auto", GPTQ, PACKED, "gptq", "GPTQ, 4 bit, groups of 32 (config.json)"),
        ("gptq", GPTQ | {"desc_act": True, "group_size": -1}, PACKED, "gptq", "one group a row, act-order"),
        ("auto", AWQ, PACKED, "awq", "AWQ, 4 bit, groups of 32 (config.json)"),
    ],
)
def test_the_form_is_found_and_explained(
    requested: Any, settings: dict[str, Any] | None, tensors: dict[str, torch.dtype], name: str, reason: str
) -> None:
    form = detect(requested, settings, tensors)
    assert form.name == name
    assert reason in form.reason


@pytest.mark.parametrize(
    ("requested", "settings", "tensors", "named"),
    [
        ("int8", GPTQ, PACKED, "GPTQ"),
        ("none", AWQ, PACKED, "AWQ"),
        ("awq", GPTQ, PACKED, "GPTQ"),
        ("auto", GPTQ, FLOAT, "no tensor is packed"),
        ("auto", {"quant_method": "fp8"}, FLOAT, "fp8"),
        ("auto", {"quant_method": "compressed-tensors"}, FLOAT, "compressed-tensors"),
        ("auto", {"bits": 4}, FLOAT, "method None"),
        ("auto", {**BITSANDBYTES, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, FLOAT, "nf4"),
        ("auto", {"quant_method": "bitsandbytes"}, INT8, "load_in_8bit"),
        ("auto", BITSANDBYTES, FLOAT, "no weight is int8"),
        ("auto", BITSANDBYTES, {**INT8, **PACKED}, "qweight"),
        ("auto", None, PACKED, "no quantisation settings"),
        ("none", BITSANDBYTES, INT8, "INT8"),
        ("gptq", None, FLOAT, "gptq"),
        ("awq", BITSANDBYTES, INT8, "awq"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    requested: Any, settings: dict[str, Any] | None, tensors: dict[str, torch.dtype], named: str
) -> None:
    with pytest.raises(QuantError, match=named):
        detect(requested, settings, tensors)
