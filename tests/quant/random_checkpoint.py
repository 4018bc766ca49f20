"""A random checkpoint in any number form, large enough for its bytes to be seen from outside; no code of Heddle's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from .packers import awq, gptq, spread

LAYERS, HIDDEN, INNER, VOCAB, KV, GROUP = 3, 1024, 2816, 8192, 512, 64
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PROJECTIONS = LAYERS * sum(rows * columns for rows, columns in SHAPES.values())
"""Weights in the layers' linears."""
TABLE = VOCAB * HIDDEN
"""Weights in the embedding, and in the head."""
LARGEST = TABLE * 2
"""Bytes of a checkpoint's largest tensor, in float16."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": KV // 64,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def random_checkpoint(folder: Path, form: str, *, tied: bool = False) -> Path:
    """Write one of `form`: none (float16), int8 (as bitsandbytes saves it), gptq (act-order) or awq."""
    random = np.random.default_rng(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32) * 0.02).half()

    first = {
        f"{module}.{part}": tensor
        for stage, (module, shape) in enumerate(SHAPES.items())
        for part, tensor in _linear(
            random, form, *shape, seed=min(stage, 5 if "mlp" in module else 3)
        ).items()
    }
    first |= {f"{norm}.weight": floats(HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")}
    tensors = {"model.embed_tokens.weight": floats(VOCAB, HIDDEN), "model.norm.weight": floats(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = floats(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": tensor.clone() for name, tensor in first.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "tie_word_embeddings": tied}
    if form != "none":
        config["quantization_config"] = SETTINGS[form]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _linear(
    random: np.random.Generator, form: str, rows: int, columns: int, seed: int
) -> dict[str, torch.Tensor]:
    """One linear's tensors by the last part of their names. `seed`: of the order of features, under act-order."""
    if form == "none":
        return {
            "weight": torch.from_numpy(
                random.standard_normal((rows, columns), dtype=np.float32) * 0.02
            ).half()
        }
    if form == "int8":
        codes = random.integers(-127, 128, (rows, columns), dtype=np.int8)
        return {
            "weight": torch.from_numpy(codes),
            "SCB": torch.full((rows,), 0.05),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
    groups = columns // GROUP
    codes = random.integers(0, 16, (rows, columns), dtype=np.int64)
    zeros = random.integers(1, 16, (groups, rows), dtype=np.int64)
    scales = np.full((groups, rows), 0.01, np.float16)
    if form == "gptq":
        return gptq(codes, zeros, scales, spread(columns, GROUP, seed), 4).tensors
    return awq(codes, zeros, scales, GROUP).tensors
