"""A process that dies at any step of a registration leaves the whole adapter or none, and no litter after a
restart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heddle.lora import blobs, canonical, registry
from heddle.lora.blobs import LocalBlobs
from heddle.lora.canonical import open_adapter
from heddle.lora.store import AdapterStore
from sqlalchemy import event
from sqlalchemy.orm import Session

from .peft_adapters import AdapterFolder, base_of

DIED = 77
STEPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the blob is complete": lambda patch: die(patch, canonical.os, "fsync", before=True),
    "before the rename": lambda patch: die(patch, blobs.os, "replace", before=True),
    "after the rename": lambda patch: die(patch, blobs.os, "replace", before=False),
    "before the row": lambda patch: die(patch, registry, "add_version", before=True),
    "before the commit": lambda patch: die(patch, registry, "add_version", before=False),
    "after the commit": lambda _: event.listen(Session, "after_commit", lambda _: os._exit(DIED)),
    "before the removal's commit": lambda patch: die(patch, registry, "remove_versions", before=False),
    "before the file is deleted": lambda patch: die(patch, LocalBlobs, "delete", before=True),
    "after the file is deleted": lambda patch: die(patch, LocalBlobs, "delete", before=False),
}


def die(patch: pytest.MonkeyPatch, owner: Any, name: str, before: bool) -> None:
    """Let the process end without any clean-up before or after the function does its work."""
    real = getattr(owner, name)

    def run(*arguments: Any, **options: Any) -> None:
        if not before:
            real(*arguments, **options)
        os._exit(DIED)

    patch.setattr(owner, name, run)


def killed(step: str, data: Path, database: str | None, act: Callable[[AdapterStore], object]) -> bool:
    """Whether a process that opens the store and acts on it dies at `step`."""
    child = os.fork()
    if child == 0:
        try:
            store = AdapterStore.open(data, base_of(2), database=database)
            STEPS[step](pytest.MonkeyPatch())
            act(store)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED


@pytest.fixture
def folders(qv: AdapterFolder, tmp_path: Path) -> list[Path]:
    other = AdapterFolder(Path(shutil.copytree(qv.path, tmp_path / "other")))
    other.store({name: value + 1 for name, value in other.tensors.items()})
    return [qv.path, other.path]


def check_whole(store: AdapterStore, data: Path) -> None:
    """Every version has its sound file, and there is no other file."""
    digests = {record.digest for record in store.all_versions()}
    for digest in digests:
        with open_adapter(store.path(digest)) as stored:
            assert stored.digest == digest
    files = [path.name for path in (data / "blobs").rglob("*") if path.is_file()]
    assert sorted(files) == sorted(f"{digest.removeprefix('sha256:')}.safetensors" for digest in digests)


@pytest.mark.parametrize(
    ("step", "registered"),
    [
        ("before the blob is complete", False),
        ("before the rename", False),
        ("after the rename", False),
        ("before the row", False),
        ("before the commit", False),
        ("after the commit", True),
    ],
)
def test_a_kill_during_registration_leaves_the_whole_adapter_or_none(
    step: str, registered: bool, folders: list[Path], tmp_path: Path, database: str | None
) -> None:
    data = tmp_path / "data"
    first = AdapterStore.open(data, base_of(2), database=database)
    one = first.register(folders[0], name="a").record
    first.close()
    assert killed(step, data, database, lambda store: store.register(folders[1], name="a", replace=True))
    store = AdapterStore.open(data, base_of(2), database=database)
    assert [record.version for record in store.versions("a")] == ([1, 2] if registered else [1])
    assert store.get("a@1").digest == one.digest
    check_whole(store, data)
    # And the same registration then goes through.
    assert store.register(folders[1], name="a", replace=True).record.version == 2
    check_whole(store, data)
    store.close()


@pytest.mark.parametrize(
    ("step", "removed"),
    [
        ("before the removal's commit", False),
        ("before the file is deleted", True),
        ("after the file is deleted", True),
    ],
)
def test_a_kill_during_removal_loses_no_file_that_a_version_names(
    step: str, removed: bool, folders: list[Path], tmp_path: Path, database: str | None
) -> None:
    data = tmp_path / "data"
    first = AdapterStore.open(data, base_of(2), database=database)
    first.register(folders[0], name="a")
    first.register(folders[0], name="same-weights")
    first.register(folders[1], name="a", replace=True)
    first.close()
    assert killed(step, data, database, lambda store: store.collect(store.remove("a").unreferenced))
    store = AdapterStore.open(data, base_of(2), database=database)
    names = sorted({record.name for record in store.all_versions()})
    assert names == (["same-weights"] if removed else ["a", "same-weights"])
    check_whole(store, data)
    store.close()
