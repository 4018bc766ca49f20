"""The stored form: one digest for one meaning, streamed writing, and corruption that is noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heddle.lora.canonical import open_adapter, write
from heddle.lora.errors import AdapterCorrupt, AdapterInvalid
from heddle.lora.inspect import AdapterSpec, inspect
from safetensors.numpy import load_file, save_file

from .peft_adapters import AdapterFolder, base_of


def spec_of(folder: AdapterFolder) -> AdapterSpec:
    return inspect(folder.path, base_of(2), max_rank=64, max_bytes=1 << 30)


def stored(folder: AdapterFolder, path: Path) -> bytes:
    write(spec_of(folder), folder.path, path)
    return path.read_bytes()


def test_one_meaning_gives_one_file_and_one_digest(qv: AdapterFolder, tmp_path: Path) -> None:
    digest = spec_of(qv).digest
    first = stored(qv, tmp_path / "first")
    moved = AdapterFolder(Path(shutil.copytree(qv.path, tmp_path / "elsewhere")))
    tensors = dict(reversed(list(moved.tensors.items())))
    spelled = {
        name.replace("base_model.model.", "").replace(".weight", ".default.weight"): t
        for name, t in tensors.items()
    }
    moved.store(spelled).configure(
        lora_dropout=0.5,
        base_model_name_or_path="somewhere/tiny",
        inference_mode=False,
        target_modules=r".*\.[qv]_proj",
        peft_version="0.1",
        # The same scale of 2, put differently.
        lora_alpha=999,
        alpha_pattern={"q_proj": 4, "v_proj": 4},
    )
    assert spec_of(moved).digest == digest
    assert stored(moved, tmp_path / "second") == first


@pytest.mark.parametrize(
    "change", [{"lora_alpha": 5}, {"alpha_pattern": {"layers.0.self_attn.q_proj": 5}}, {"use_rslora": True}]
)
def test_another_scale_is_another_digest(change: dict[str, Any], qv: AdapterFolder) -> None:
    digest = spec_of(qv).digest
    assert spec_of(qv.configure(**change)).digest != digest


def test_other_values_places_and_number_forms_are_other_digests(qv: AdapterFolder) -> None:
    tensors = qv.tensors
    digests = {spec_of(qv).digest}
    changed = {name: value.copy() for name, value in tensors.items()}
    changed["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][15, 1] *= -1
    digests.add(spec_of(qv.store(changed)).digest)
    digests.add(spec_of(qv.store({k: v.astype(np.float16) for k, v in tensors.items()})).digest)
    swapped = {
        k.replace("layers.0", "layers.9").replace("layers.1", "layers.0").replace("layers.9", "layers.1"): v
        for k, v in tensors.items()
    }
    digests.add(spec_of(qv.store(swapped)).digest)
    assert len(digests) == 4


def test_the_file_is_ordinary_safetensors_with_documented_names(qv: AdapterFolder, tmp_path: Path) -> None:
    stored(qv, tmp_path / "x.safetensors")
    tensors, original = load_file(tmp_path / "x.safetensors"), qv.tensors
    assert sorted(tensors) == sorted(
        f"layers.{layer}.{m}.{p}" for layer in (0, 1) for m in ("q_proj", "v_proj") for p in "AB"
    )
    for name, value in tensors.items():
        layer, module, part = name.split(".")[1:]
        theirs = original[f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"]
        assert np.array_equal(value, theirs)


def test_every_flipped_byte_is_noticed(qv: AdapterFolder, tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = stored(qv, path)
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in [*range(0, header, 7), *range(header, len(whole), 501), len(whole) - 1]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(AdapterCorrupt):
            open_adapter(path)
    path.write_bytes(whole)
    open_adapter(path).close()


def test_a_cut_or_missing_or_strange_file_is_corrupt(qv: AdapterFolder, tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = stored(qv, path)
    path.write_bytes(whole[:-1])
    with pytest.raises(AdapterCorrupt, match="cut off"):
        open_adapter(path, verify=False)
    path.unlink()
    with pytest.raises(AdapterCorrupt, match="its stored file is missing"):
        open_adapter(path)
    save_file(
        {"layers.0.q_proj.A": np.zeros((2, 32), np.float32)}, path, metadata={"format": "heddle-adapter-1"}
    )
    with pytest.raises(AdapterCorrupt):
        open_adapter(path)


def test_a_folder_that_changes_between_check_and_write_is_refused(qv: AdapterFolder, tmp_path: Path) -> None:
    spec = spec_of(qv)
    tensors = {name: value + 1 for name, value in qv.tensors.items()}
    qv.store(tensors)
    with pytest.raises(AdapterInvalid, match="changed while it was read"):
        write(spec, qv.path, tmp_path / "x")
    qv.rename(lambda name: name.replace("q_proj", "k_proj"))
    with pytest.raises(AdapterInvalid, match="changed while it was read"):
        write(spec, qv.path, tmp_path / "x")


def test_checking_and_storing_a_large_adapter_takes_little_memory(tmp_path: Path) -> None:
    """In a process of its own: the peak grows by far less than the file's 25 MB."""
    import subprocess
    import sys

    folder = tmp_path / "large"
    folder.mkdir()
    hidden, rank, layers = 4096, 256, 6
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rows = np.random.default_rng(0).standard_normal((rank, hidden)).astype(np.float16)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(layer, "A"): rows for layer in range(layers)}
    tensors |= {name.format(layer, "B"): np.ascontiguousarray(rows.T) for layer in range(layers)}
    save_file(
        {key: np.concatenate([value, value])[: len(value)] for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size > 24 << 20
    script = """
import resource, sys
from pathlib import Path
from heddle.lora import canonical
from heddle.lora.base import MODULES, BaseModel
from heddle.lora.inspect import inspect
base = BaseModel(name="b", fingerprint="", num_layers=6, hidden_size=4096, vocab_size=8,
                 shapes={m: (4096, 4096) for m in MODULES})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
spec = inspect(Path(sys.argv[1]), base, max_rank=512, max_bytes=1 << 31)
canonical.write(spec, Path(sys.argv[1]), Path(sys.argv[2]))
with canonical.open_adapter(Path(sys.argv[2])) as adapter:
    assert adapter.digest == spec.digest
print(peak() - before)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "stored")],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert int(done.stdout) < 16 << 20
