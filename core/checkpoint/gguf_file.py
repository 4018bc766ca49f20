"""Open a GGUF file: metadata as Python values, tensors mapped and not yet read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

ARCHITECTURES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM")}
"""`general.architecture` -> Hugging Face's `model_type` and class. Mistral is `llama` too."""


@dataclass(frozen=True)
class GgufFile:
    """An open file of an architecture that is converted."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    """Name -> `gguf.ReaderTensor`; dimensions stand innermost first."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str) -> Any:
        """The metadata `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """The same as a number; `CheckpointError` where it is none, or missing without a default."""
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {self.architecture}.{key} is not one number but {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def token(self, name: str) -> int | None:
        """The id `tokenizer.ggml.<name>_token_id`, or None."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None


def open_gguf(path: Path) -> GgufFile:
    """Raises `CheckpointError` for a file that is damaged, incomplete or of another architecture."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(f"{path} is one of several parts; join them first (llama-gguf-split --merge)")
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: architecture {file.architecture!r} is not served ({known} are)")
    return file
