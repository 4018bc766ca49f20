"""Turn a `.gguf` file of the LLaMA family into a Hugging Face folder.

The file's tensors are dequantised one by one, so memory holds one tensor at a time; names, the row order of the query
and key projections and the configuration become Hugging Face's. Formats: llama.cpp's `gguf` specification and its
`convert_hf_to_gguf` (whose steps are undone here), and the safetensors file format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import Progress, silent
from .errors import CheckpointError
from .gguf_tokenizer import write_tokenizer
from .safetensors_writer import write_safetensors

if TYPE_CHECKING:
    import numpy as np

ARCHITECTURES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM")}
"""`general.architecture` -> Hugging Face's `model_type` and class. llama.cpp writes Mistral as `llama` too."""

TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
ROPE_FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

FLOAT_TYPES = {"F32": "F32", "BF16": "BF16"}
"""Matrix types kept as they are; every other type (F16 and all quantised ones) is written as float16."""


@dataclass(frozen=True)
class GgufFile:
    """An open file: its metadata as Python values, and its tensors (mapped, not read)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    """Name -> `gguf.ReaderTensor`."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata `<architecture>.<key>`; without a default a missing one is a `CheckpointError`."""
        full = f"{self.architecture}.{key}"
        if full in self.metadata:
            return self.metadata[full]
        if default is None:
            raise CheckpointError(f"{self.path}: the metadata has no {full}")
        return default


def open_gguf(path: Path) -> GgufFile:
    """Open `path` and check that it is a file of an architecture we convert."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    if int(metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"{path} is one of several parts; join them first (llama-gguf-split --merge)")
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{path}: architecture {file.architecture!r} is not served (of GGUF files: {known})"
        )
    return file


def convert(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the model in the GGUF file `path` to the empty `folder`: config, weights, tokenizer, chat template.

    Raises `CheckpointError` for a file that is damaged, of another architecture, or holds anything not understood.
    """
    file = open_gguf(path)
    names = {name: _hf_name(file, name) for name in file.tensors if name != ROPE_FACTORS}
    config = read_config(file, set(names.values()))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file))
    write_tokenizer(file.path, file.metadata, int(config["vocab_size"]), folder)
    _write_weights(file, names, config, folder / "model.safetensors", progress)


def read_config(file: GgufFile, tensors: set[str]) -> dict[str, Any]:
    """`config.json` of the file, given its tensors by their Hugging Face names."""
    model_type, class_name = ARCHITECTURES[file.architecture]
    if int(file.value("expert_count", 0)) > 0:
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not served")
    hidden, heads = int(file.value("embedding_length")), int(file.value("attention.head_count"))
    head_dim = int(file.value("attention.key_length", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(file.value(key, head_dim)) != head_dim:
            raise CheckpointError(
                f"{file.path}: {key} {file.value(key)} differs from the head size {head_dim}"
            )
    layers = int(file.value("block_count"))
    missing = [name for name in _expected(layers) if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{file.path}: {len(missing)} tensors are missing, for instance {', '.join(missing[:3])}"
        )
    beyond = [name for name in tensors if name.startswith(f"model.layers.{layers}.")]
    if beyond:
        raise CheckpointError(f"{file.path}: {beyond[0]} lies beyond the {layers} layers of the model")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(file.value("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.value("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(file.value("context_length")),
        "rms_norm_eps": _decimal(file.value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(file.value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[_stored_type(file)],
    }
    if model_type == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    if window := int(file.value("attention.sliding_window", 0)):
        config["sliding_window"] = window
    for name in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.metadata:
            config[f"{'pad' if name == 'padding' else name}_token_id"] = int(file.metadata[key])
    return config


def _generation_config(file: GgufFile) -> dict[str, Any]:
    """Every token that ends an answer: end of text, and end of turn or message where the file names them."""
    config: dict[str, Any] = {}
    if "tokenizer.ggml.bos_token_id" in file.metadata:
        config["bos_token_id"] = int(file.metadata["tokenizer.ggml.bos_token_id"])
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(int(end) for end in ends if end is not None))
    if unique:
        config["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    if "tokenizer.ggml.padding_token_id" in file.metadata:
        config["pad_token_id"] = int(file.metadata["tokenizer.ggml.padding_token_id"])
    return config


def _hf_name(file: GgufFile, name: str) -> str:
    stem, _, suffix = name.partition(".")
    if stem in TOP_TENSORS and suffix == "weight":
        return f"{TOP_TENSORS[stem]}.weight"
    match = LAYER.fullmatch(name)
    if match is not None and match[2] in LAYER_TENSORS:
        return f"model.layers.{int(match[1])}.{LAYER_TENSORS[match[2]]}.{match[3]}"
    raise CheckpointError(f"{file.path}: tensor {name} is not understood")


def _expected(layers: int) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    for layer in range(layers):
        for module in LAYER_TENSORS.values():
            yield f"model.layers.{layer}.{module}.weight"


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    kind = file.value("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(file.value("rope.scaling.factor"))}
    if kind != "none":
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not served")
    if ROPE_FACTORS not in file.tensors:
        return None
    # llama.cpp stores Llama 3's scaling as one divisor per frequency; the largest is the factor, and the other
    # settings have been the same in every Llama 3.x. Recomputing the divisors proves that this file's are those.
    import numpy as np

    stored = np.asarray(file.tensors[ROPE_FACTORS].data, dtype=np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    original, base = 8192, float(file.value("rope.freq_base", 10000.0))
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} is no scaling of Llama 3 that is known here")
    return scaling | {"original_max_position_embeddings": original}


def _stored_type(file: GgufFile) -> str:
    """The safetensors dtype of all weights: that of the file's first projection where it is a plain float."""
    return FLOAT_TYPES.get(file.tensors["blk.0.attn_q.weight"].tensor_type.name, "F16")


def _write_weights(
    file: GgufFile, names: dict[str, str], config: dict[str, Any], path: Path, progress: Progress
) -> None:
    dtype = _stored_type(file)
    # gguf lists dimensions innermost first
    shapes = {hf: tuple(int(n) for n in reversed(file.tensors[name].shape)) for name, hf in names.items()}
    sources = {hf: name for name, hf in names.items()}

    def read(hf: str) -> np.ndarray:
        return _permuted(_dequantised(file, sources[hf]), sources[hf], config)

    write_safetensors(path, shapes, dtype, read, progress)


def _dequantised(file: GgufFile, name: str) -> np.ndarray:
    """Tensor `name` as float32."""
    import gguf
    import numpy as np

    tensor = file.tensors[name]
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{file.path}: tensor {name} has type {tensor.tensor_type.name}: {error}"
        ) from error
    return np.asarray(values, dtype=np.float32)


def _permuted(values: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """Undo llama.cpp's row order of query and key projections.

    Its rotary embedding pairs rows 2i and 2i + 1 of a head, Hugging Face's rows i and i + head_dim / 2.
    """
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name and config["model_type"] == "llama":
            pairs = values.reshape(count, config["head_dim"] // 2, 2, *values.shape[1:])
            return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
