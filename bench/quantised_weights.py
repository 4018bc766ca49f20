"""The weights a quantised checkpoint stands for, in the basis of the float model it was made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from heddle.core.model.config import ModelConfig
from heddle.core.model.llama import LlamaModel, Projection
from heddle.core.model.loader import load_model
from heddle.kernels.ops import for_device
from heddle.lora.base import MODULES
from heddle.quant.quantize.awq import dequantize, quantize
from safetensors.torch import save_file

Weights = Mapping[str, torch.Tensor]
"""Of one layer, by module name: float32 [N, K]."""


def load(folder: Path, quantization: Any = "auto") -> LlamaModel:
    """A checkpoint as Heddle holds it, on the CPU."""
    config = ModelConfig.load(folder)
    settings: dict[str, Any] = {"quantization": quantization, "dtype": torch.float32, "device": "cpu"}
    return load_model(folder, config, ops=for_device("cpu", "cpu"), max_positions=16, **settings)


def of_layer(model: LlamaModel, index: int, reference: LlamaModel) -> Weights:
    """What `model`'s linears stand for where they are given `reference`'s inputs and owe its outputs.

    AWQ divides a norm and multiplies the linears after it by one scale, which is undone here with the norms'
    quotient. Between up and down the scale is in no file; it is the one that fits both best, good to some
    0.3 % of a weight that is itself rounded by 10 %.
    """
    layer, floats = model.layers[index], reference.layers[index]
    weights = {**parts(layer.qkv), **parts(layer.out), **parts(layer.gate_up), **parts(layer.down)}
    for norm, original, names in (
        (layer.input_norm, floats.input_norm, ("q_proj", "k_proj", "v_proj")),
        (layer.mlp_norm, floats.mlp_norm, ("gate_proj", "up_proj")),
    ):
        scale = torch.where(original != 0, norm.float() / original.float(), 1.0)
        for name in names:
            weights[name] = weights[name] * scale
    if model.quantization == "awq":
        up, down = parts(floats.gate_up)["up_proj"], parts(floats.down)["down_proj"]
        scale = (_share(weights["down_proj"], down, 0) / _share(weights["up_proj"], up, 1)).sqrt()
        weights["up_proj"] = weights["up_proj"] * scale.unsqueeze(1)
        weights["down_proj"] = weights["down_proj"] / scale
    return weights


def parts(projection: Projection) -> dict[str, torch.Tensor]:
    """By module name, float32."""
    weight = projection.linear.dequantize()
    names = [MODULES[module] for module in projection.modules]
    ends = projection.offsets
    return {name: weight[ends[i] : ends[i + 1]] for i, name in enumerate(names)}


def _share(found: torch.Tensor, original: torch.Tensor, dim: int) -> torch.Tensor:
    """The factor that makes `original` come nearest to `found`, along `dim`."""
    square = original.square().sum(dim)
    return torch.where(square > 0, (found * original).sum(dim) / square, 1.0)


def rounded_to_nearest(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Each group's range in 16 even steps, and every weight to the nearest."""
    return dequantize(*quantize(weight, group_size=group_size))


def write_rounded_to_nearest(base: Path, folder: Path, group_size: int) -> None:
    """`base` with each layer's linears `rounded_to_nearest`, as a float32 checkpoint."""
    model = load(base, "none")
    tensors = {"model.embed_tokens.weight": model.embedding.dequantize(), "model.norm.weight": model.norm}
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.head.dequantize()
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        tensors[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        for name, weight in of_layer(model, index, model).items():
            room = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            tensors[f"{prefix}.{room}.{name}.weight"] = rounded_to_nearest(weight, group_size)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for path in base.iterdir():
        if path.suffix == ".json" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "dtype": "float32"}))
