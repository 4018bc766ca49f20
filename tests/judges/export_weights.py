"""Write what Heddle reads a checkpoint as: every weight dequantised, under its Hugging Face name.

Part of `check_written.py`; `check_checkpoint.py` compares the file with what the tools read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from heddle.core.model.config import ModelConfig
from heddle.core.model.llama import LlamaModel
from heddle.core.model.loader import load_model
from heddle.kernels.ops import for_device
from heddle.lora.base import MODULES
from safetensors.torch import save_file


def weights(model: LlamaModel) -> dict[str, torch.Tensor]:
    """float32, all but the embedding where the head is the same table."""
    found = {"model.norm.weight": model.norm, "lm_head.weight": model.head.dequantize()}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        found[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        found[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
            rows = projection.linear.dequantize()
            for i, module in enumerate(projection.modules):
                part = "mlp" if MODULES[module] in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                first, last = projection.offsets[i], projection.offsets[i + 1]
                found[f"{prefix}.{part}.{MODULES[module]}.weight"] = rows[first:last]
    return {name: tensor.float().clone() for name, tensor in found.items()}


def export(checkpoint: Path, out: Path) -> str:
    """Read the folder `checkpoint` as the engine does and write all of `weights` to `out`; returns the form."""
    model = load_model(
        checkpoint,
        ModelConfig.load(checkpoint),
        quantization="auto",
        dtype=torch.float32,
        device="cpu",
        ops=for_device("cpu", "reference"),
        max_positions=64,
    )
    save_file(weights(model), out)
    print(f"{checkpoint}: {model.quantization_reason}", flush=True)
    return model.quantization
