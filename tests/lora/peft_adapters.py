"""Tiny random LLaMAs and adapters that PEFT itself writes for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.lora.base import BaseModel
from heddle.lora.errors import AdapterInvalid
from heddle.lora.inspect import AdapterSpec, inspect
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "q_proj": (32, 32),
    "k_proj": (16, 32),
    "v_proj": (16, 32),
    "o_proj": (32, 32),
    "gate_proj": (64, 32),
    "up_proj": (64, 32),
    "down_proj": (32, 64),
}
"""(out_features, in_features) of the tiny LLaMA."""


def tiny_llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def make_peft(model: LlamaForCausalLM, config: dict[str, Any], seed: int = 0) -> PeftModel:
    """`model` wrapped by PEFT, with every LoRA weight random (PEFT starts B at zero)."""
    wrapped = get_peft_model(model, LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


def lora_layers(wrapped: PeftModel) -> dict[str, LoraLayer]:
    """PEFT's own layers by path inside the base."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in wrapped.named_modules()
        if isinstance(module, LoraLayer)
    }


def base_of(layers: int, **changes: Any) -> BaseModel:
    fields: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": "sha256:" + "0" * 64,
        "num_layers": layers,
        "hidden_size": 32,
        "vocab_size": 64,
        "shapes": SHAPES,
    }
    return BaseModel(**(fields | changes))


class AdapterFolder:
    """A private copy of an adapter folder whose config and tensors a test changes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "adapter_config.json").read_text())

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.path / "adapter_model.safetensors")

    def configure(self, **changes: Any) -> AdapterFolder:
        (self.path / "adapter_config.json").write_text(json.dumps(self.config | changes))
        return self

    def store(self, tensors: dict[str, np.ndarray]) -> AdapterFolder:
        save_file(tensors, self.path / "adapter_model.safetensors")
        return self

    def rename(self, change: Callable[[str], str]) -> AdapterFolder:
        return self.store({change(name): value for name, value in self.tensors.items()})


def check(folder: AdapterFolder | Path, base: BaseModel | None = None, max_rank: int = 64) -> AdapterSpec:
    path = folder.path if isinstance(folder, AdapterFolder) else folder
    return inspect(path, base or base_of(2), max_rank=max_rank, max_bytes=1 << 20)


def refusal(folder: AdapterFolder | Path, base: BaseModel | None = None, max_rank: int = 64) -> str:
    with pytest.raises(AdapterInvalid) as error:
        check(folder, base, max_rank)
    return str(error.value)
