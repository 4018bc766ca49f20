"""The folder of a quantised checkpoint: safetensors in shards, settings where tools look, the rest copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...quant.settings import CONFIG, SIDE_FILES
from ..model.json_file import read_json
from ..model.weights import INDEX, SINGLE
from .settings import QuantizeSettings

SHARD_BYTES = 1 << 30
"""A file is closed once it holds so much: that is kept in memory until then."""

READABLE = 0o644

COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*")
"""Tokenizer, chat template, generation settings."""


class Shards:
    """Tensors come in one by one, files go out; their names, which tell how many there are, come last."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._waiting_bytes = self.bytes = 0

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if self._waiting and self._waiting_bytes + tensor.nbytes > self._limit:
                self._write()
            self._waiting[name] = tensor.clone(memory_format=torch.contiguous_format)  # of no other's memory
            self._waiting_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and the index where there is more than one file."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._written[0][0].rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            shard = f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self._folder / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(self._folder / INDEX, index)

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._written)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(READABLE)  # safetensors makes it the user's alone
        self._written.append((path, list(self._waiting)))
        self.bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0


def write_settings(source: Path, folder: Path, settings: QuantizeSettings) -> None:
    """config.json with the quantisation in it, the side file that older tools read, and all that is not weights."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.name not in (CONFIG, *SIDE_FILES) and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    config = read_json(source / CONFIG)
    _write_json(folder / CONFIG, {**config, "quantization_config": quantization_config(settings)})
    side_file = _side_file(settings)
    if side_file is not None:
        _write_json(folder / side_file[0], side_file[1])


def quantization_config(settings: QuantizeSettings) -> Mapping[str, Any]:
    """What AutoGPTQ 0.7.1, AutoAWQ 0.2.9 or transformers with bitsandbytes write into config.json."""
    if settings.method == "gptq":
        return {
            "bits": settings.bits,
            "group_size": settings.group_size,
            "damp_percent": settings.damp,
            "desc_act": settings.desc_act,
            "static_groups": False,
            "sym": settings.sym,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": None,
            "is_marlin_format": False,
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
        }
    if settings.method == "awq":
        return {
            "quant_method": "awq",
            "zero_point": True,
            "group_size": settings.group_size,
            "bits": settings.bits,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": False,
        "_load_in_8bit": True,
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
    }


def _side_file(settings: QuantizeSettings) -> tuple[str, Mapping[str, Any]] | None:
    if settings.method == "gptq":
        return "quantize_config.json", quantization_config(settings)
    if settings.method == "awq":
        return "quant_config.json", {
            "zero_point": True,
            "q_group_size": settings.group_size,
            "w_bit": settings.bits,
            "version": "GEMM",
        }
    return None


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
