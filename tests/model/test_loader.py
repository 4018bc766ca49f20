"""Every tensor of a checkpoint is used once, or named in a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.core.model.config import ModelError
from safetensors.torch import load_file, save_file

Q = "model.layers.0.self_attn.q_proj"


def edit(folder: Path, change: Any) -> None:
    """Let `change` alter the dict of a one-file checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shards_are_read_through_their_index(tiny: Any, tmp_path: Path) -> None:
    reference = tiny.save(tmp_path, shards="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = [3, 1, 4, 1, 5]
    tiny.close(tiny.Bench(tiny.load(tmp_path)).step({"a": tokens})["a"], tiny.oracle(reference, tokens))


def test_missing_shards_are_all_named(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path, shards="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1:3]
    for path in lost:
        path.unlink()
    with pytest.raises(ModelError) as refusal:
        tiny.load(tmp_path)
    assert all(path.name in str(refusal.value) for path in lost)


def test_missing_tensors_are_all_named(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    lost = [f"{Q}.weight", "model.norm.weight"]
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in lost])
    with pytest.raises(ModelError) as refusal:
        tiny.load(tmp_path)
    assert all(name in str(refusal.value) for name in lost)


def test_an_index_that_promises_more_than_its_shards_hold_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path, shards="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][f"{Q}.weight"]
    tensors = load_file(shard)
    del tensors[f"{Q}.weight"]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match=rf"{Q}\.weight"):
        tiny.load(tmp_path)


def test_one_tensor_in_two_shards_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path, shards="20KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    tensors = load_file(second)
    twice = next(iter(load_file(first)))
    save_file({**tensors, twice: load_file(first)[twice]}, second)
    with pytest.raises(ModelError, match="two shards"):
        tiny.load(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path / "model", shards="20KB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"][f"{Q}.weight"]
    (tmp_path / "model" / shard).rename(tmp_path / shard)
    index["weight_map"] = {
        name: f"../{shard}" if file == shard else file for name, file in index["weight_map"].items()
    }
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="beside"):
        tiny.load(tmp_path / "model")


@pytest.mark.parametrize("length", [0, 4, 100, -1, -5000])
def test_a_truncated_file_is_refused_by_name(tiny: Any, tmp_path: Path, length: int) -> None:
    tiny.save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        tiny.load(tmp_path)


def test_a_header_of_exabytes_is_refused_before_it_is_allocated(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{}")
    with pytest.raises(ModelError, match="safetensors"):
        tiny.load(tmp_path)


def test_a_folder_without_safetensors_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no weights"):
        tiny.load(tmp_path)


def test_unknown_tensors_are_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    extra = {"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 32), "surprise": torch.zeros(1)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(ModelError) as refusal:
        tiny.load(tmp_path)
    assert all(name in str(refusal.value) for name in extra)


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_does_not_mention_are_refused(tiny: Any, tmp_path: Path, flag: str) -> None:
    tiny.save(tmp_path, attention_bias=True, mlp_bias=True)
    configure(tmp_path, **{flag: False})
    with pytest.raises(ModelError, match=r"proj\.bias"):
        tiny.load(tmp_path)


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_promises_must_be_there(tiny: Any, tmp_path: Path, flag: str) -> None:
    tiny.save(tmp_path)
    configure(tmp_path, **{flag: True})
    with pytest.raises(ModelError, match=r"lacks .*proj\.bias"):
        tiny.load(tmp_path)


def test_frequencies_stored_by_old_files_are_not_read(tiny: Any, tmp_path: Path) -> None:
    reference = tiny.save(tmp_path)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    edit(tmp_path, lambda tensors: tensors.update(buffers))
    model = tiny.load(tmp_path)
    assert any("inv_freq" in note for note in model.notes)
    tiny.close(tiny.Bench(model).step({"a": [1, 2, 3]})["a"], tiny.oracle(reference, [1, 2, 3]))


def test_wrong_shapes_are_named_with_both(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(16, 32)}))
    with pytest.raises(ModelError, match=rf"{Q}\.weight .*\[16, 32\].*\[32, 32\]"):
        tiny.load(tmp_path)


def test_wrong_number_types_are_named(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    edit(
        tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.float64)})
    )
    with pytest.raises(ModelError, match=r"model\.norm\.weight is float64"):
        tiny.load(tmp_path)
    odd = {f"{Q}.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn)}
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32), **odd}))
    with pytest.raises(ModelError, match=rf"{Q}\.weight is float8_e4m3fn"):
        tiny.load(tmp_path)


def test_a_tied_head_may_be_stored_too(tiny: Any, tmp_path: Path) -> None:
    reference = tiny.save(tmp_path, tie_word_embeddings=True)
    expected = tiny.oracle(reference, [1, 2, 3])
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = tiny.load(tmp_path)
    assert model.notes == ()
    tiny.close(tiny.Bench(model).step({"a": [1, 2, 3]})["a"], expected)


def test_a_stored_head_that_differs_from_the_tie_is_noted_and_not_used(tiny: Any, tmp_path: Path) -> None:
    reference = tiny.save(tmp_path, tie_word_embeddings=True)
    expected = tiny.oracle(reference, [1, 2, 3])
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    model = tiny.load(tmp_path)
    assert any("lm_head.weight differs" in note for note in model.notes)
    tiny.close(tiny.Bench(model).step({"a": [1, 2, 3]})["a"], expected)


def test_an_untied_model_without_a_head_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        tiny.load(tmp_path)


def test_progress_counts_up_to_every_layer(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    seen: list[tuple[str, int, int]] = []
    tiny.load(tmp_path, progress=lambda *step: seen.append(step))
    assert [(done, total) for _, done, total in seen] == [(0, 2), (1, 2), (2, 2)]


def test_weights_do_not_change_with_the_file(tiny: Any, tmp_path: Path) -> None:
    """Nothing of a loaded model lies in mapped file memory."""
    reference = tiny.save(tmp_path)
    model = tiny.load(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8)
        file.write(b"\xff" * (path.stat().st_size // 2))
    tiny.close(tiny.Bench(model).step({"a": [1, 2, 3]})["a"], tiny.oracle(reference, [1, 2, 3]))
