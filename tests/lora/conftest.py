"""Tiny random LLaMAs and adapters that PEFT itself writes for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.lora.base import BaseModel
from peft import LoraConfig, PeftModel, get_peft_model
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


@pytest.fixture(scope="session")
def base() -> BaseModel:
    return base_of(2)


@pytest.fixture(scope="session")
def base12() -> BaseModel:
    return base_of(12)


@pytest.fixture(scope="session")
def save_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, float]]]:
    """`save_adapter(layers=2, seed=0, **lora_config)` -> (folder PEFT wrote, PEFT's scale of each module
    path)."""

    def make(layers: int = 2, seed: int = 0, **config: Any) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp("adapter")
        wrapped = make_peft(tiny_llama(layers), config, seed)
        wrapped.save_pretrained(folder)
        scales = {
            name.removeprefix("base_model.model."): float(module.scaling["default"])
            for name, module in wrapped.named_modules()
            if hasattr(module, "scaling") and module.scaling
        }
        return folder, scales

    return make


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


@pytest.fixture(scope="session")
def _qv(save_adapter: Callable[..., tuple[Path, dict[str, float]]]) -> Path:
    return save_adapter(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])[0]


@pytest.fixture
def qv(_qv: Path, tmp_path: Path) -> AdapterFolder:
    """A rank-2 adapter on q and v of the two-layer model, scale 2, written by PEFT."""
    return AdapterFolder(Path(shutil.copytree(_qv, tmp_path / "qv")))
