"""The power fails after any write, fsync, rename or commit: each adapter is whole or absent, and nothing that
was acknowledged is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from heddle.lora import canonical, durable
from heddle.lora.canonical import open_adapter
from heddle.lora.errors import AdapterCorrupt
from heddle.lora.inspect import inspect
from heddle.lora.store import AdapterStore

from .peft_adapters import base_of
from .power_loss import Cut, Disk

Act = Callable[[AdapterStore, list[Path]], object]
OPERATIONS: dict[str, tuple[Act | None, Act, list[str], list[str]]] = {
    "a registration": (
        None,
        lambda store, folders: store.register(folders[0], name="a"),
        [],
        ["a@1"],
    ),
    "a replacement": (
        lambda store, folders: store.register(folders[0], name="a"),
        lambda store, folders: store.register(folders[1], name="a", replace=True),
        ["a@1"],
        ["a@1", "a@2"],
    ),
    "weights that are there under another name": (
        lambda store, folders: store.register(folders[0], name="a"),
        lambda store, folders: store.register(folders[0], name="b"),
        ["a@1"],
        ["a@1", "b@1"],
    ),
    "a removal": (
        lambda store, folders: (
            store.register(folders[0], name="a"),
            store.register(folders[1], name="b"),
        ),
        lambda store, folders: store.collect(store.remove("a").unreferenced),
        ["a@1", "b@1"],
        ["b@1"],
    ),
}
"""What was done before, what is being done, and the versions before and after."""


def check(data: Path, allowed: list[list[str]], then: Callable[[AdapterStore], object]) -> list[str]:
    """The versions that are found, one of the `allowed` lists, each whole; and everything goes on."""
    store = AdapterStore.open(data, base_of(2))
    try:
        records = store.all_versions()
        for record in records:
            with open_adapter(store.path(record.digest)) as stored:
                assert stored.digest == record.digest
        found = [record.reference for record in records]
        assert found in allowed
        files = [path.stem for path in (data / "blobs").rglob("*") if path.is_file()]
        assert sorted(files) == sorted({record.digest.removeprefix("sha256:") for record in records})
        then(store)
    finally:
        store.close()
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_power_fails_at_any_moment_of(operation: str, folders: list[Path], tmp_path: Path) -> None:
    prepare, act, before, after = OPERATIONS[operation]
    root = tmp_path / "disk"
    root.mkdir()
    store = AdapterStore.open(root / "data", base_of(2))
    if prepare is not None:
        prepare(store, folders)
    disk = Disk(root, tmp_path / "cuts")
    with disk.recording():
        act(store, folders)
        unacknowledged = len(disk.cuts)
        acknowledge(disk)
    store.close()
    assert "commit" in {cut.after for cut in disk.cuts}
    found = []
    for number, cut in enumerate(disk.cuts):
        acknowledged = number >= unacknowledged
        allowed = [after] if acknowledged else [before, after]
        print(f"cut after {cut.after}: {cut.outcome}")
        found.append(check(cut.folder / "data", allowed, lambda store: again(store, folders)))
    assert before in found


def acknowledge(disk: Disk) -> list[Cut]:
    """The caller has its answer; then the power fails."""
    before = len(disk.cuts)
    disk.cut("the acknowledgement", anew=True)
    return disk.cuts[before:]


def again(store: AdapterStore, folders: list[Path]) -> None:
    """Registering goes on as if nothing had happened."""
    record = store.register(folders[2], name="next").record
    with open_adapter(store.path(record.digest)) as stored:
        assert stored.digest == record.digest


def test_the_power_fails_at_any_moment_of_a_servers_first_start_and_registration(
    folders: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    data = root / "new" / "data"
    disk = Disk(root, tmp_path / "cuts")
    with disk.recording():
        store = AdapterStore.open(data, base_of(2))
        store.register(folders[0], name="a")
        unacknowledged = len(disk.cuts)
        acknowledge(disk)
    store.close()
    for number, cut in enumerate(disk.cuts):
        allowed = [["a@1"]] if number >= unacknowledged else [[], ["a@1"]]
        print(f"cut after {cut.after}: {cut.outcome}")
        check(cut.folder / "new" / "data", allowed, lambda store: again(store, folders))


def test_a_file_whose_writer_died_before_its_name_was_fsynced_lasts_once_it_is_registered(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    store = AdapterStore.open(root / "data", base_of(2))
    spec = inspect(folders[0], base_of(2), max_rank=8, max_bytes=1 << 20)
    disk = Disk(root, tmp_path / "cuts")
    with disk.recording():
        with monkeypatch.context() as dying:
            dying.setattr(durable, "sync_folder", lambda folder: None)
            store._blobs.put(spec.digest, lambda path: canonical.write(spec, folders[0], path))
        store.register(folders[0], name="a")
        acknowledged = acknowledge(disk)
    store.close()
    for cut in acknowledged:
        check(cut.folder / "data", [["a@1"]], lambda store: None)


@pytest.mark.parametrize("of_folder", [False, True], ids=["of the file", "of the folder"])
def test_these_tests_notice_an_fsync_that_is_left_out(
    of_folder: bool, folders: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    store = AdapterStore.open(root / "data", base_of(2))
    disk = Disk(root, tmp_path / "cuts")
    with disk.recording(), pytest.MonkeyPatch.context() as patch:  # undone before the recording's own
        real = os.fsync
        patch.setattr(
            os, "fsync", lambda handle: None if os.path.isdir(handle) == of_folder else real(handle)
        )
        store.register(folders[0], name="a")
        acknowledged = acknowledge(disk)
    store.close()
    lost = 0
    for cut in acknowledged:
        try:
            check(cut.folder / "data", [["a@1"]], lambda store: None)
        except (AdapterCorrupt, AssertionError):
            lost += 1
    assert lost
