"""Files of an adapter's folder: missing, broken, hostile, or copies of the base's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heddle.lora.base import BaseModel
from heddle.lora.errors import AdapterInvalid
from heddle.lora.inspect import inspect

from .peft_adapters import AdapterFolder, base_of, check, make_peft, refusal, tiny_llama

P = "base_model.model.model.layers.0.self_attn."


# ------------------------------------------------------------------ files


class Marker:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_never_read(qv: AdapterFolder, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (qv.path / "adapter_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    assert check(qv).matched == 8
    (qv.path / "adapter_model.safetensors").unlink()
    message = refusal(qv)
    assert "adapter_model.bin" in message
    assert "adapter_model.safetensors" in message
    assert not marker.exists()


def test_missing_and_broken_files_are_refused(qv: AdapterFolder) -> None:
    weights = qv.path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "cut off" in refusal(qv)
    weights.unlink()
    assert "adapter_model.safetensors is missing" in refusal(qv)
    (qv.path / "adapter_config.json").write_text("{")
    assert "not JSON" in refusal(qv)
    (qv.path / "adapter_config.json").write_text("[" * 100_000)
    assert "not JSON" in refusal(qv)
    (qv.path / "adapter_config.json").write_bytes(b" " * (1 << 20) + b"{}")
    assert "more than" in refusal(qv)
    (qv.path / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in refusal(qv)


def test_a_file_above_the_size_limit_is_refused(qv: AdapterFolder, base: BaseModel) -> None:
    with pytest.raises(AdapterInvalid, match="limit of 100"):
        inspect(qv.path, base, max_rank=64, max_bytes=100)


# ------------------------------------------------------------------ copies of the base's embeddings


@pytest.fixture
def served(tmp_path: Path) -> BaseModel:
    """The tiny base as a checkpoint on disk."""
    tiny_llama(2).save_pretrained(tmp_path / "base")
    return base_of(2, folder=str(tmp_path / "base"))


def test_copies_equal_to_the_base_are_ignored_with_a_note(served: BaseModel, tmp_path: Path) -> None:
    wrapped = make_peft(tiny_llama(2), {"r": 2, "target_modules": ["q_proj"]})
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    spec = check(tmp_path / "adapter", served)
    assert (spec.matched, spec.total) == (6, 6)
    assert sum("equals the base's own weights" in warning for warning in spec.warnings) == 2
    assert spec.target_modules == ["q_proj"]


def test_copies_that_differ_from_the_base_or_cannot_be_compared_are_refused(
    served: BaseModel, qv: AdapterFolder
) -> None:
    name = "base_model.model.model.embed_tokens.weight"
    copy = tiny_llama(2).model.embed_tokens.weight.detach().numpy().copy()
    tensors = qv.tensors
    assert check(qv.store(tensors | {name: copy}), served).matched == 9
    assert check(qv.store(tensors | {name: copy.astype(np.float16)}), served).matched == 9
    assert name in refusal(qv.store(tensors | {name: copy}), base_of(2))
    copy[63, 31] += 1e-3
    assert f"{name} differs from the base's own" in refusal(qv.store(tensors | {name: copy}), served)


def test_with_tied_embeddings_a_copied_head_is_compared_with_the_embedding(
    tmp_path: Path, qv: AdapterFolder
) -> None:
    model = tiny_llama(2)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "base")
    served = base_of(2, folder=str(tmp_path / "base"), tied_embeddings=True)
    head = model.model.embed_tokens.weight.detach().numpy()
    tensors = qv.tensors
    assert check(qv.store(tensors | {"base_model.model.lm_head.weight": head}), served).matched == 9
    assert "differs" in refusal(qv.store(tensors | {"base_model.model.lm_head.weight": head * 2}), served)


def test_a_grown_vocabulary_is_refused_with_both_sizes(served: BaseModel, qv: AdapterFolder) -> None:
    qv.store(qv.tensors | {"base_model.model.model.embed_tokens.weight": np.zeros((72, 32), np.float32)})
    message = refusal(qv, served)
    assert "[72, 32]" in message
    assert "[64, 32]" in message
    message = refusal(qv.configure(modules_to_save=["embed_tokens"]), served)
    assert "[72, 32]" in message
    assert "[64, 32]" in message
