"""A base model's `config.json`, read, checked and brought into one form. Control code: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ...lora.base import BaseModel
from .json_file import Keys, ModelError, read_json
from .tokens import end_token_ids, vocabulary_digest

__all__ = ["ModelConfig", "ModelError", "Rope"]

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
"""Architectures this forward computes exactly -> their `model_type`."""

DTYPES = ("float32", "float16", "bfloat16")

MISTRAL_WINDOW = 4096
"""What transformers takes for a Mistral whose config does not mention `sliding_window`."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn into angles; `rope.inverse_frequencies` computes them."""

    type: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """linear, llama3"""
    low_freq_factor: float = 1.0
    """llama3, as the next two"""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the forward, the pool and the adapters need to know of a base."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """q, k and v have a bias."""
    attention_output_bias: bool
    """o has one (never in Qwen2)."""
    mlp_bias: bool
    torch_dtype: str | None
    """What the checkpoint says it was saved in; None where it does not say."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer, ascending: of config.json, generation_config.json, the tokenizer."""
    quantization_config: dict[str, Any] | None

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `folder`; ModelError names the file and key that is missing, wrong or not supported."""
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json")
        return _parse(Keys(read_json(path), "config.json"), folder)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of each linear of a layer, by module name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    def base_model(self, name: str, folder: Path) -> BaseModel:
        """What adapters are checked against.

        The fingerprint covers architecture, shapes and vocabulary alone, so that a float checkpoint and its
        quantised forms share their adapters.
        """
        identity = {
            "architecture": self.architecture,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "shapes": self.linear_shapes,
        }
        return BaseModel(
            name=name,
            fingerprint=vocabulary_digest(Path(folder), msgspec.json.encode(identity, order="sorted")),
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            shapes=self.linear_shapes,
            tied_embeddings=self.tie_word_embeddings,
            folder=str(folder),
        )


def _parse(keys: Keys, folder: Path) -> ModelConfig:
    architecture = _architecture(keys)
    activation = keys.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    num_heads = keys.positive_int("num_attention_heads")
    if architecture != "LlamaForCausalLM" and "num_key_value_heads" not in keys.values:
        raise ModelError("config.json: the key num_key_value_heads is missing")  # only Llama 1 goes without
    num_kv_heads = keys.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    hidden_size = keys.positive_int("hidden_size")
    max_positions = keys.positive_int("max_position_embeddings")
    num_layers = keys.positive_int("num_hidden_layers")
    vocab_size = keys.positive_int("vocab_size")
    _refuse_window(keys, architecture, num_layers, max_positions)
    llama_bias = architecture == "LlamaForCausalLM" and keys.flag("attention_bias")
    quantization = keys.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise ModelError(f"config.json: quantization_config must be an object, got {quantization!r}")
    dtype = keys.get("dtype", keys.get("torch_dtype"))
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"config.json: torch_dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    bos = keys.get("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, hidden_size, num_heads),
        rms_norm_eps=keys.number("rms_norm_eps", above=0.0),
        rope=_rope(keys, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=llama_bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=llama_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias"),
        torch_dtype=dtype,
        bos_token_id=bos if type(bos) is int and 0 <= bos < vocab_size else None,
        eos_token_ids=end_token_ids(folder, keys.get("eos_token_id"), vocab_size),
        quantization_config=quantization,
    )


def _architecture(keys: Keys) -> str:
    names = keys.require("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"config.json: architectures must be a list of one name, got {names!r}")
    name = names[0]
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    kind = keys.get("model_type", ARCHITECTURES[name])
    if kind != ARCHITECTURES[name]:
        raise ModelError(f"config.json: architectures says {name}, but model_type says {kind!r}")
    return name


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    head_dim = keys.positive_int("head_dim", default=0)
    if not head_dim:
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
                f"({num_heads}) and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    return head_dim


def _refuse_window(keys: Keys, architecture: str, num_layers: int, max_positions: int) -> None:
    """Refuse a sliding window that would hide any position from another, not one that is off or too wide.

    Off: `sliding_window` null, `use_sliding_window` false (and absent, in Qwen2), or no layer that uses it.
    """
    default = MISTRAL_WINDOW if architecture == "MistralForCausalLM" else None
    window = keys.get("sliding_window", default)
    if window is None or not keys.flag("use_sliding_window", default=architecture != "Qwen2ForCausalLM"):
        return
    window = keys.positive_int("sliding_window", default=default)
    kinds = keys.get("layer_types")
    if kinds is not None:
        used = "sliding_attention" in kinds
    else:
        used = architecture != "Qwen2ForCausalLM" or keys.get("max_window_layers", 28) < num_layers
    if used and window < max_positions:
        raise ModelError(
            f"config.json: sliding_window ({window}) is in use, and attention with a window below "
            f"max_position_embeddings ({max_positions}) is not supported"
        )


def _rope(keys: Keys, max_positions: int) -> Rope:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`."""
    ropes = [
        _rope_of(keys, name, keys.get(name), max_positions)
        for name in ("rope_parameters", "rope_scaling")
        if keys.get(name)
    ]
    if not ropes:
        return _rope_of(keys, "rope_scaling", {}, max_positions)
    if ropes[0] != ropes[-1]:
        raise ModelError("config.json: rope_parameters and rope_scaling contradict each other")
    return ropes[0]


def _rope_of(keys: Keys, name: str, values: object, max_positions: int) -> Rope:
    if not isinstance(values, dict):
        raise ModelError(f"config.json: {name} must be an object, got {values!r}")
    inner = Keys(values, f"config.json: {name}")
    partial = inner.get("partial_rotary_factor", keys.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ModelError(f"config.json: partial_rotary_factor {partial!r} is not supported")
    kind = inner.get("rope_type") or inner.get("type") or "default"
    theta = inner.number("rope_theta", above=0.0, default=keys.number("rope_theta", above=0.0, default=1e4))
    if theta != keys.number("rope_theta", above=0.0, default=theta):
        raise ModelError(f"config.json: rope_theta differs from that in {name}")
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"config.json: {name}: rope type {kind!r} is not supported, only default, linear and llama3"
        )
    factor = inner.number("factor", at_least=1.0)
    if kind == "linear":
        return Rope(type="linear", theta=theta, factor=factor)
    low = inner.number("low_freq_factor", above=0.0)
    high = inner.number("high_freq_factor", above=0.0)
    if high <= low:
        raise ModelError(f"config.json: {name}: high_freq_factor {high} is not above low_freq_factor {low}")
    original = inner.positive_int("original_max_position_embeddings", default=max_positions)
    original = keys.positive_int("original_max_position_embeddings", default=original)
    return Rope(
        type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
