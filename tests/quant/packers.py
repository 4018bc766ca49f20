"""GPTQ and AWQ checkpoints packed number by number, as the formats are described; no code of Heddle's."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SHARED = Path(os.environ.get("HEDDLE_CHECKPOINTS") or Path(__file__).parents[3] / "shared" / "checkpoints")
"""Layers of the demo base as AutoGPTQ and AutoAWQ wrote them, where they are at hand."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's gemm layout: nibble i of a word, from the lowest on, holds column AWQ_ORDER[i] of its eight."""


def words_along_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] -> int32 [R * bits / 32, C]: field i of a word is the i-th of its rows."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0] // per_word, codes.shape[1]), np.uint32)
    for row in range(codes.shape[0]):
        words[row // per_word] |= codes[row].astype(np.uint32) << np.uint32(row % per_word * bits)
    return words.view(np.int32)


def words_along_columns(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[R, C] -> int32 [R, C * bits / 32]: field i of a word is the i-th (or order[i]-th) of its columns."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        column = order[place] if order else place
        words |= codes[:, column::per_word].astype(np.uint32) << np.uint32(place * bits)
    return words.view(np.int32)


@dataclass
class Packed:
    """One linear as a file has it, and what it stands for."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    """float32 [N, K]"""


def grid(
    weight: np.ndarray, g_idx: np.ndarray, bits: int, symmetric: bool, scale_dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round to nearest: codes [N, K], zeros [G, N], scales [G, N], a group's range from its own values."""
    top, groups = 2**bits - 1, int(g_idx.max()) + 1
    zeros, scales = np.zeros((groups, len(weight)), np.int64), np.zeros((groups, len(weight)), scale_dtype)
    codes = np.zeros(weight.shape, np.int64)
    for g in range(groups):
        part = weight[:, g_idx == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(np.abs(low), high)
            low = -high
        scales[g] = np.maximum((high - low) / top, 1e-4).astype(scale_dtype)
        wide = scales[g].astype(np.float64)
        zeros[g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / wide), 0, top)
        codes[:, g_idx == g] = np.clip(np.round(part / wide[:, None]) + zeros[g][:, None], 0, top)
    return codes, zeros, scales


def stands_for(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray) -> torch.Tensor:
    """(code - zero) * scale of each feature's group: float32 [N, K], the product in float32."""
    return torch.from_numpy(
        ((codes - zeros[g_idx].T).astype(np.float32)) * scales[g_idx].T.astype(np.float32)
    )


def gptq(
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    g_idx: np.ndarray,
    bits: int,
    *,
    v2: bool = False,
) -> Packed:
    """codes [N, K], zeros and scales [G, N]."""
    stored = zeros if v2 else (zeros - 1) % 2**bits
    return Packed(
        {
            "qweight": torch.from_numpy(words_along_rows(codes.T, bits)),
            "qzeros": torch.from_numpy(words_along_columns(stored, bits)),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        },
        stands_for(codes, zeros, scales, g_idx),
    )


def awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int) -> Packed:
    """codes [N, K], zeros and scales [G, N]."""
    return Packed(
        {
            "qweight": torch.from_numpy(words_along_columns(codes.T, 4, AWQ_ORDER)),
            "qzeros": torch.from_numpy(words_along_columns(zeros, 4, AWQ_ORDER)),
            "scales": torch.from_numpy(scales),
        },
        stands_for(codes, zeros, scales, np.arange(codes.shape[1]) // group_size),
    )


def spread(k: int, group_size: int, seed: int | None) -> np.ndarray:
    """g_idx [K]: in order, or shuffled as act-order does."""
    index = np.arange(k) // (k if group_size == -1 else group_size)
    return index if seed is None else np.random.default_rng(seed).permutation(index)


def quantize_model(
    reference: Any,
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group_size: int = 16,
    symmetric: bool = False,
    act_order: str = "no",
    v2: bool = False,
    zero_biases: bool = False,
    skip: tuple[str, ...] = (),
    head: bool = False,
    scale_dtype: Any = np.float16,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Rewrite the float checkpoint in `folder` with every linear of the layers packed.

    `act_order`: "no", "group" (linears of one input share their order, as AutoGPTQ writes them) or "each".
    Returns `reference` with the dequantised weights in their places.
    """
    tensors = load_file(folder / "model.safetensors")
    members = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    stage = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2, "gate_proj": 3, "up_proj": 3, "down_proj": 4}
    for name, module in list(reference.named_modules()):
        last = name.rsplit(".", 1)[-1]
        if not isinstance(module, torch.nn.Linear) or last in skip or (last == "lm_head" and not head):
            continue
        weight = module.weight.detach().numpy()
        seed = None
        if act_order != "no":
            seed = members.index(last) if act_order == "each" else stage.get(last, 0)
        g_idx = spread(weight.shape[1], group_size, seed)
        codes, zeros, scales = grid(weight, g_idx, bits, symmetric, scale_dtype)
        if method == "gptq":
            packed = gptq(codes, zeros, scales, g_idx, bits, v2=v2)
        else:
            packed = awq(codes, zeros, scales, weight.shape[1] if group_size == -1 else group_size)
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed.tensors.items()}
        if zero_biases and module.bias is None:
            tensors[f"{name}.bias"] = torch.zeros(len(weight), dtype=torch.float16)
        if last == "lm_head" and reference.config.tie_word_embeddings:
            module.weight = torch.nn.Parameter(packed.weight)
        else:
            module.weight.data = packed.weight
    save_file(tensors, folder / "model.safetensors")
    if settings is None:
        settings = {"quant_method": method, "bits": bits, "group_size": group_size}
        if method == "gptq":
            settings |= {"sym": symmetric, "desc_act": act_order != "no"}
            settings |= {"checkpoint_format": "gptq_v2"} if v2 else {}
            settings |= {"lm_head": True} if head else {}
        else:
            settings |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": list(skip) or None}
    configure(folder, quantization_config=settings)
    return reference


def configure(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None takes one away."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit(folder: Path, change: Any) -> None:
    """Let `change` alter the dict of a one-file checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


class Tensors:
    """A checkpoint in memory, as the forms read it."""

    def __init__(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {f"{name}.{part}": tensor for part, tensor in tensors.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        return self.tensors[name].dtype if name in self.tensors else None

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]
