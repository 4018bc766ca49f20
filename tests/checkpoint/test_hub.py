"""From a hub only what is needed is fetched, broken downloads go on, and every refusal says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heddle.core.checkpoint import CheckpointError, resolve

WEIGHTS = bytes(range(256)) * 20_000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"x",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "pytorch_model.bin": b"pickled",
    "model.pt": b"pickled",
    "consolidated.safetensors": b"a second copy",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"another form",
    "README.md": b"words",
}
SHARD = "model-00001-of-00002.safetensors"
NEEDED = {
    name
    for name in FILES
    if "/" not in name
    and not name.startswith("consolidated")
    and Path(name).suffix not in (".bin", ".pt", ".md")
}


def test_only_safetensors_configuration_and_tokenizer_are_fetched_and_only_once(hub, tmp_path):
    hub.repositories["org/model"] = dict(FILES)
    reports = []
    folder = resolve("org/model", cache_dir=tmp_path, progress=lambda *report: reports.append(report))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
    what, done, total = reports[-1]
    assert what == "downloading org/model"
    assert done == total == sum(len(FILES[name]) for name in NEEDED)
    assert [report[1] for report in reports] == sorted(report[1] for report in reports)

    hub.requests.clear()
    assert resolve("org/model", cache_dir=tmp_path) == folder
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_revision_is_part_of_the_name(hub, tmp_path):
    hub.repositories["org/model"] = dict(FILES)
    folder = resolve("org/model@v1", cache_dir=tmp_path)
    assert (folder / "config.json").is_file()
    with pytest.raises(CheckpointError, match="org/model has no revision 'v9'"):
        resolve("org/model@v9", cache_dir=tmp_path)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 65536)
    hub.repositories["org/model"] = dict(FILES)
    hub.break_after[SHARD] = 1_000_000
    folder = resolve("org/model", cache_dir=tmp_path)
    assert (folder / SHARD).read_bytes() == WEIGHTS
    first, resumed = hub.downloads(SHARD)
    assert first is None
    assert resumed is not None
    assert 0 < int(resumed.removeprefix("bytes=").rstrip("-")) <= 1_000_000


def test_a_download_that_failed_is_completed_by_the_next_call(hub, tmp_path):
    hub.repositories["org/model"] = dict(FILES)
    hub.break_after[SHARD], hub.refuse_after_break = 1_000_000, True
    with pytest.raises(CheckpointError, match="downloading org/model failed"):
        resolve("org/model", cache_dir=tmp_path)
    hub.refuse = hub.refuse_after_break = False
    done = {name for name in NEEDED if list(tmp_path.rglob(name))}
    assert SHARD not in done
    hub.requests.clear()
    folder = resolve("org/model", cache_dir=tmp_path)
    assert (folder / SHARD).read_bytes() == WEIGHTS
    assert {name for name in NEEDED if hub.downloads(name)} == NEEDED - done


def test_a_snapshot_that_is_only_partly_there_is_never_used(hub, tmp_path):
    hub.repositories["org/model"] = dict(FILES)
    folder = resolve("org/model", cache_dir=tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.refuse = True
    with pytest.raises(CheckpointError, match="org/model"):
        resolve("org/model", cache_dir=tmp_path)
    hub.refuse = False
    assert resolve("org/model", cache_dir=tmp_path) == folder
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second"


def test_what_is_in_the_cache_serves_without_a_network(hub, tmp_path, monkeypatch):
    hub.repositories["org/model"] = dict(FILES)
    folder = resolve("org/model", cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve("org/model", cache_dir=tmp_path) == folder
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        resolve("org/other", cache_dir=tmp_path)


def test_an_unknown_name_is_refused_as_folder_and_as_model(hub, tmp_path):
    with pytest.raises(CheckpointError, match="no folder 'org/nothing' here, and no model"):
        resolve("org/nothing", cache_dir=tmp_path)


def test_a_gated_model_says_what_to_do(hub, tmp_path, monkeypatch):
    hub.repositories["org/gated"] = dict(FILES)
    hub.gated.add("org/gated")
    with pytest.raises(CheckpointError, match=r"gated.*HF_TOKEN"):
        resolve("org/gated", cache_dir=tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    assert resolve("org/gated", cache_dir=tmp_path).is_dir()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model-00002-of-00002.safetensors", "missing, for instance model-00002-of-00002.safetensors"),
    ],
)
def test_a_repository_that_lacks_a_file_is_refused(hub, tmp_path, missing, message):
    hub.repositories["org/model"] = {name: data for name, data in FILES.items() if name != missing}
    with pytest.raises(CheckpointError, match=message):
        resolve("org/model", cache_dir=tmp_path)


def test_pickled_weights_are_no_weights(hub, tmp_path):
    hub.repositories["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"pickled"}
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        resolve("org/old", cache_dir=tmp_path)
    assert hub.downloads("pytorch_model.bin") == []
