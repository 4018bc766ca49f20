"""Written checkpoints have the settings and tensors that vLLM's loaders ask for; vLLM itself is not needed here.

Source: vLLM's `quantization/auto_gptq.py`, `auto_awq.py`, `bitsandbytes.py` and its `bitsandbytes_loader.py`: the
keys they read without a default, the combinations they accept, and the parameters they fill.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.core.quantize.driver import quantize
from heddle.core.quantize.settings import QuantizeSettings

from .write_models import TEXT, read_tensors, save_float

GROUP = 16
LAYER = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj\.(\w+)")


def written(
    tmp_path: Path, method: str, model: dict[str, Any] | None = None, **how: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings in config.json and all tensors."""
    save_float(tmp_path / "float", **(model or {}))
    (tmp_path / "text.txt").write_text(TEXT)
    if method != "int8":
        how |= {"calibration": tmp_path / "text.txt", "samples": 40, "sample_tokens": 32, "group_size": GROUP}
    quantize(tmp_path / "float", tmp_path / "out", QuantizeSettings(method=method, **how))  # type: ignore[arg-type]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    return config["quantization_config"], read_tensors(tmp_path / "out")


def shapes(tensors: dict[str, torch.Tensor], module: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of one linear, by the last part of the name."""
    prefix = f"model.layers.0.{module}."
    return {
        name.removeprefix(prefix): (tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(("bits", "desc_act"), [(4, False), (4, True), (8, True)])
def test_gptq(tmp_path: Path, bits: int, desc_act: bool) -> None:
    settings, tensors = written(tmp_path, "gptq", bits=bits, desc_act=desc_act)
    assert settings["quant_method"] == "gptq"
    assert {key: settings[key] for key in ("bits", "group_size", "desc_act", "sym")} == {
        "bits": bits, "group_size": GROUP, "desc_act": desc_act, "sym": True,
    }  # fmt: skip
    k, n = 32, 64
    found = shapes(tensors, "mlp.up_proj")
    bias = found.pop("bias")
    assert found == {
        "qweight": ((k * bits // 32, n), torch.int32),
        "qzeros": ((k // GROUP, n * bits // 32), torch.int32),
        "scales": ((k // GROUP, n), torch.float16),
        "g_idx": ((k,), torch.int32),
    }
    # A bias that the model does not have is passed over there; it must be nothing.
    assert bias == ((n,), torch.float16)
    assert not any(tensor.any() for name, tensor in tensors.items() if name.endswith("bias"))


def test_awq(tmp_path: Path) -> None:
    settings, tensors = written(tmp_path, "awq")
    assert settings["quant_method"] == "awq"
    assert settings["version"].lower() == "gemm"
    assert {key: settings[key] for key in ("bits", "group_size", "zero_point")} == {
        "bits": 4, "group_size": GROUP, "zero_point": True,
    }  # fmt: skip
    assert shapes(tensors, "mlp.up_proj") == {
        "qweight": ((32, 8), torch.int32),
        "qzeros": ((32 // GROUP, 8), torch.int32),
        "scales": ((32 // GROUP, 64), torch.float16),
    }


def test_int8(tmp_path: Path) -> None:
    settings, tensors = written(tmp_path, "int8")
    assert settings["quant_method"] == "bitsandbytes"
    assert (settings["load_in_8bit"], settings["load_in_4bit"]) == (True, False)
    assert settings["bnb_4bit_quant_storage"] == "uint8"
    assert not settings["llm_int8_skip_modules"]
    assert shapes(tensors, "mlp.up_proj") == {
        "weight": ((64, 32), torch.int8),
        "SCB": ((64,), torch.float32),
        "weight_format": ((), torch.uint8),
    }


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
def test_what_is_no_linear_of_a_layer_stays_float(tmp_path: Path, method: str) -> None:
    """vLLM tells by the tensors' types which linears are not quantised."""
    _, tensors = written(tmp_path, method)
    others = {name: tensor for name, tensor in tensors.items() if not LAYER.fullmatch(name)}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= others.keys()
    assert all(tensor.is_floating_point() for tensor in others.values())


def test_a_tied_head_is_in_the_file_for_gptq_alone(tmp_path: Path) -> None:
    """AutoGPTQ breaks the tie and loads zeros where the file has no head; it writes a copy itself."""
    for method in ("gptq", "awq", "int8"):
        _, tensors = written(tmp_path / method, method, {"tie_word_embeddings": True})
        head = tensors.get("lm_head.weight")
        assert (head is not None) == (method == "gptq")
        assert head is None or torch.equal(head, tensors["model.embed_tokens.weight"])
