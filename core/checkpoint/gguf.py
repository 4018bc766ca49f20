"""Turn a `.gguf` file of the LLaMA family into a Hugging Face folder.

Tensors are dequantised one by one, so memory holds one at a time; names, the row order of the query and key
projections and the configuration become Hugging Face's. Formats: llama.cpp's `gguf` specification and its
`convert_hf_to_gguf`, whose steps are undone here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import Progress, silent
from .errors import CheckpointError
from .gguf_config import ROPE_FACTORS, generation_config, read_config
from .gguf_file import GgufFile, open_gguf
from .gguf_tokenizer import write_tokenizer
from .safetensors_writer import write_safetensors

if TYPE_CHECKING:
    import numpy as np

TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
STORED_TYPES = {"F32": "F32", "BF16": "BF16"}
"""Weights kept in their own type; all others (F16 and every quantised one) are stored as float16."""
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def convert(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the model in `path` to the empty `folder`: configuration, weights, tokenizer, chat template.

    Raises `CheckpointError` for a file that is damaged, of another architecture, or holds anything that is
    not understood.
    """
    progress("reading the model file", 0, 0)
    file = open_gguf(path)
    names = {_hf_name(file, name): name for name in file.tensors if name != ROPE_FACTORS}
    stored = _stored_type(file)
    config = read_config(file, set(names), DTYPE_NAMES[stored])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    write_tokenizer(file.path, file.metadata, config["vocab_size"], folder)
    shapes = {
        name: tuple(int(n) for n in reversed(file.tensors[source].shape)) for name, source in names.items()
    }

    def read(name: str) -> np.ndarray:
        return _in_hf_order(_dequantised(file, names[name]), name, config)

    write_safetensors(folder / "model.safetensors", shapes, stored, read, progress)


def _hf_name(file: GgufFile, name: str) -> str:
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is not None and match[2] in LAYER_TENSORS:
        return f"model.layers.{int(match[1])}.{LAYER_TENSORS[match[2]]}.{match[3]}"
    raise CheckpointError(f"{file.path}: tensor {name} is not understood")


def _stored_type(file: GgufFile) -> str:
    """One safetensors dtype for all weights: that of the first projection."""
    projection = file.tensors.get("blk.0.attn_q.weight")
    return "F16" if projection is None else STORED_TYPES.get(projection.tensor_type.name, "F16")


def _dequantised(file: GgufFile, name: str) -> np.ndarray:
    """Tensor `name` as float32."""
    import gguf
    import numpy as np

    tensor = file.tensors[name]
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:  # how the library says that it does not know a type
        raise CheckpointError(
            f"{file.path}: tensor {name} has type {tensor.tensor_type.name}: {error}"
        ) from error
    return np.asarray(values, dtype=np.float32)


def _in_hf_order(values: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """Undo llama.cpp's row order of query and key projections.

    Its rotary embedding pairs rows 2i and 2i + 1 of a head, Hugging Face's rows i and i + head_dim / 2.
    """
    heads = {".q_proj.": config["num_attention_heads"], ".k_proj.": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name and config["model_type"] == "llama":
            pairs = values.reshape(count, config["head_dim"] // 2, 2, *values.shape[1:])
            return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
