"""Local sources: nothing outside the roots is opened, whatever the source says."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from heddle.lora.errors import AdapterInvalid, StoreError
from heddle.lora.inspect import inspect
from heddle.lora.sources import fetch

from .peft_adapters import AdapterFolder, base_of

REFUSED = "source must be an adapter folder below one of this server's --adapter-root folders"


class Opened:
    """Records every path that the interpreter opens or lists."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if (
            self.on
            and event in ("open", "os.listdir", "os.scandir")
            and isinstance(arguments[0], str | bytes | os.PathLike)
        ):
            self.paths.append(os.fsdecode(arguments[0]))


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture
def roots(tmp_path: Path, qv: AdapterFolder) -> list[Path]:
    """A root with the adapter `good`, and beside it, outside, the same as `outside`."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copytree(qv.path, root / "good")
    shutil.copytree(qv.path, tmp_path / "outside")
    return [tmp_path / "missing-root", root]


def take(source: str, roots: list[Path], tmp_path: Path, max_bytes: int = 1 << 20) -> Path:
    folder = tmp_path / "taken"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    fetch(source, roots, folder, max_bytes=max_bytes)
    return folder


def test_a_folder_below_a_root_is_copied_out(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (roots[1] / "good" / "tokenizer_config.json").write_text("{}")
    (roots[1] / "good" / "README.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    for source in ("good", str(roots[1] / "good"), "root/good", "good/", "./good"):
        folder = take(source, roots, tmp_path)
        assert sorted(os.listdir(folder)) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "tokenizer_config.json",
        ]
        assert inspect(folder, base_of(2), max_rank=8, max_bytes=1 << 20).matched == 8


@pytest.mark.parametrize(
    "source",
    [
        "", "../outside", "good/../../outside", "good/../good", "/etc", "/", "%2e%2e/outside", "..", "a\0b",
        "\0",
        "nothing-here", "good\ud800", "good/adapter_config.json", "~/x", "x" * 5000, "/" + "x/" * 3000,
    ],
    ids=range(16),
)  # fmt: skip
def test_every_other_source_is_refused_in_the_same_words(
    source: str, roots: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(StoreError) as error:
        take(source, roots, tmp_path)
    assert (error.value.code, error.value.param, error.value.message) == (
        "invalid_request",
        "source",
        REFUSED,
    )
    with pytest.raises(StoreError, match="--adapter-root"):
        take(str(tmp_path / "outside"), roots, tmp_path)
    with pytest.raises(StoreError, match="--adapter-root"):
        take(str(tmp_path / "not-even-there"), roots, tmp_path)


def test_links_that_lead_outside_are_refused_and_their_targets_never_opened(
    roots: list[Path], tmp_path: Path, opened: Opened
) -> None:
    root, outside = roots[1], tmp_path / "outside"
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    (root / "up").symlink_to("..")
    for name, target in (
        ("file-link", outside / "adapter_model.safetensors"),
        ("broken-file", tmp_path / "nothing"),
    ):
        shutil.copytree(root / "good", root / name)
        (root / name / "adapter_model.safetensors").unlink()
        (root / name / "adapter_model.safetensors").symlink_to(target)
    shutil.copytree(root / "good", root / "tokenizer-link")
    (root / "tokenizer-link" / "tokenizer.json").symlink_to(outside / "adapter_config.json")
    opened.paths.clear()
    opened.on = True
    try:
        for source in ("link", "dangling", "up/outside", "file-link", "broken-file"):
            with pytest.raises(StoreError) as error:
                take(source, roots, tmp_path)
            assert error.value.message == REFUSED
        assert not (take("tokenizer-link", roots, tmp_path) / "tokenizer.json").exists()
    finally:
        opened.on = False
    assert opened.paths
    beyond = (str(outside), str(tmp_path / "nothing"))
    assert not [path for path in opened.paths if path.startswith(beyond)]


def test_links_that_stay_below_the_root_work(roots: list[Path], tmp_path: Path) -> None:
    """As a hub cache has them: snapshots of links into a folder of blobs."""
    root = roots[1]
    (root / "blobs").mkdir()
    shutil.move(root / "good" / "adapter_model.safetensors", root / "blobs" / "weights")
    (root / "good" / "adapter_model.safetensors").symlink_to("../blobs/weights")
    (root / "alias").symlink_to("good")
    assert inspect(take("alias", roots, tmp_path), base_of(2), max_rank=8, max_bytes=1 << 20).matched == 8


def test_a_root_that_is_itself_a_link_works(roots: list[Path], tmp_path: Path) -> None:
    (tmp_path / "root-link").symlink_to(roots[1])
    for source in ("good", str(tmp_path / "root-link" / "good"), str(roots[1] / "good")):
        assert (take(source, [tmp_path / "root-link"], tmp_path) / "adapter_config.json").exists()


def test_a_link_swapped_in_after_the_check_is_not_followed(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = roots[1]
    real_open = os.open

    def swap_then_open(path: str, flags: int, *arguments: int, **options: int) -> int:
        if path == "good":
            shutil.rmtree(root / "good")
            (root / "good").symlink_to(tmp_path / "outside")
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(StoreError, match="--adapter-root"):
        take("good", roots, tmp_path)


def test_sizes_pipes_and_pickles_are_refused_before_they_are_copied(
    roots: list[Path], tmp_path: Path
) -> None:
    weights = roots[1] / "good" / "adapter_model.safetensors"
    with pytest.raises(AdapterInvalid, match="limit of 100"):
        take("good", roots, tmp_path, max_bytes=100)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterInvalid, match="not a regular file"):
        take("good", roots, tmp_path)
    weights.unlink()
    (roots[1] / "good" / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.bin is a pickle"):
        take("good", roots, tmp_path)
