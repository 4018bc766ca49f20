"""`config.json` and `generation_config.json` of a GGUF file, from its metadata and tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .errors import CheckpointError
from .gguf_file import ARCHITECTURES, GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""The one tensor that is configuration: Llama 3's scaling of the rotary frequencies."""
LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def read_config(file: GgufFile, tensors: set[str], dtype: str) -> dict[str, Any]:
    """`config.json`, given the tensors by their Hugging Face names and the type they will be stored in.

    Raises `CheckpointError` where a tensor is missing or the model is none that is served.
    """
    model_type, class_name = ARCHITECTURES[file.architecture]
    if file.count("expert_count", 0) > 0:
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not served")
    layers = file.count("block_count")
    _check_tensors(file, tensors, layers)
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    head_dim = file.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := file.count(key, head_dim)) != head_dim:
            raise CheckpointError(f"{file.path}: {key} {found} differs from the head size {head_dim}")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": _decimal(file.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(file.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": dtype,
    }
    if model_type == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    if window := file.count("attention.sliding_window", 0):
        config["sliding_window"] = window
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := file.token(name)) is not None:
            config[f"{key}_token_id"] = token
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Every token that ends an answer: end of text, and end of turn or message where the file names them."""
    ends = [token for token in map(file.token, ("eos", "eot", "eom")) if token is not None]
    unique = list(dict.fromkeys(ends))
    tokens = {
        "bos_token_id": file.token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": file.token("padding"),
    }
    return {key: value for key, value in tokens.items() if value is not None}


def _check_tensors(file: GgufFile, tensors: set[str], layers: int) -> None:
    missing = [name for name in _expected(layers) if name not in tensors]
    if missing:
        few = ", ".join(missing[:3])
        raise CheckpointError(f"{file.path}: {len(missing)} tensors are missing, for instance {few}")
    for name in sorted(tensors):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:
            raise CheckpointError(f"{file.path}: {name} lies beyond the {layers} layers of the model")


def _expected(layers: int) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    for layer in range(layers):
        for module in LAYER_MODULES:
            yield f"model.layers.{layer}.{module}.weight"


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    kind = file.value("rope.scaling.type") or "none"
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.number("rope.scaling.factor")}
    if kind != "none":
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not served")
    if ROPE_FACTORS not in file.tensors:
        return None
    # llama.cpp stores Llama 3's scaling as one divisor per frequency. The largest is the factor, and the
    # other settings have been the same in every Llama 3.x; recomputing the divisors proves that this file's
    # are those.
    import numpy as np

    stored = np.asarray(file.tensors[ROPE_FACTORS].data, dtype=np.float64)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * file.number("rope.freq_base", 10000.0) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} is no scaling of Llama 3 that is known here")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
