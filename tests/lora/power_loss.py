"""A folder that remembers what of it would survive the power failing now.

Only fsync makes things last: a file's bytes when the file is fsynced, the names in a folder when the folder is.
Everything else may or may not be on the disk, so each moment has several outcomes. SQLite's files are taken as
they are: what it has committed with `synchronous = FULL` it has fsynced itself, names of its journals included.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

Outcome = Literal[
    "all unsynced is lost", "names without bytes", "names with half the bytes", "nothing is lost"
]
OUTCOMES: tuple[Outcome, ...] = (
    "all unsynced is lost",
    "names without bytes",
    "names with half the bytes",
    "nothing is lost",
)


@dataclass(frozen=True)
class Cut:
    """The disk as it is found after the power failed."""

    after: str
    """What was the last thing done."""
    outcome: Outcome
    folder: Path


class Disk:
    """Everything below `root`, and copies of what it would be after a power failure, below `copies`."""

    def __init__(self, root: Path, copies: Path) -> None:
        self._root = root
        self._copies = copies
        self._bytes: dict[int, bytes] = {}
        """Of files, by inode, when last fsynced."""
        self._names: dict[int, dict[str, int]] = {}
        """Of folders, by inode, when last fsynced: names with their inodes."""
        self._seen: set[str] = set()
        self._cutting = False
        self.cuts: list[Cut] = []
        for folder, _, files in os.walk(root):  # what is there has long been written
            self._names[os.stat(folder).st_ino] = _entries(folder)
            for file in files:
                path = Path(folder, file)
                self._bytes[path.stat().st_ino] = path.read_bytes()

    def cut(self, after: str, anew: bool = False) -> None:
        """Let the power fail here, with every outcome that was not there before; `anew`: also those that
        were."""
        self._cutting = True
        if anew:
            self._seen.clear()
        for outcome in OUTCOMES:
            folder = self._copies / str(len(self.cuts))
            folder.mkdir(parents=True)
            if outcome == "nothing is lost":
                shutil.copytree(self._root, folder, dirs_exist_ok=True)
            else:
                self._restore(self._root, folder, outcome)
            state = _fingerprint(folder)
            if state in self._seen:
                shutil.rmtree(folder)
            else:
                self._seen.add(state)
                self.cuts.append(Cut(after, outcome, folder))
        self._cutting = False

    def _restore(self, folder: Path, target: Path, outcome: Outcome) -> None:
        now = _entries(folder)
        then = self._names.get(folder.stat().st_ino, {})
        for name, inode in now.items():
            path = folder / name
            by_sqlite = name.startswith("registry.sqlite")
            lasting = then.get(name) == inode or (by_sqlite and "registry.sqlite" in then)
            if outcome == "all unsynced is lost" and not lasting:
                continue
            if path.is_dir():
                (target / name).mkdir()
                self._restore(path, target / name, outcome)
            elif by_sqlite:
                shutil.copy(path, target)
            else:
                half = (
                    path.read_bytes()[: path.stat().st_size // 2]
                    if outcome.endswith("half the bytes")
                    else b""
                )
                (target / name).write_bytes(self._bytes.get(inode, half))
        if outcome == "all unsynced is lost":  # removed or renamed, and the folder still says otherwise
            for name in then.keys() - now.keys():
                if then[name] in self._bytes:
                    (target / name).write_bytes(self._bytes[then[name]])

    def synced(self, handle: int) -> None:
        path, inode = f"/proc/self/fd/{handle}", os.fstat(handle).st_ino
        if os.path.isdir(path):
            self._names[inode] = _entries(path)
        else:
            self._bytes[inode] = Path(path).read_bytes()

    def created(self, path: Path) -> None:
        self._bytes.pop(path.stat().st_ino, None)  # a removed file's number may come again

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, the power fails after every write, fsync, rename, removal, flush and commit."""
        with pytest.MonkeyPatch.context() as patch:
            self._follow(patch, "fsync", lambda handle: self.synced(handle))
            self._follow(patch, "open", lambda path, *_: self.created(Path(path)))
            for name in ("replace", "unlink", "mkdir", "rmdir"):
                self._follow(patch, name, lambda *_: None)
            real_open = pathlib.Path.open

            def open_file(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
                if mode != "wb" or self._cutting:
                    return real_open(path, mode, *rest, **options)
                return _Writing(real_open(path, mode, buffering=0), lambda: self.cut("write"))

            patch.setattr(pathlib.Path, "open", open_file)
            events: dict[str, Callable[..., None]] = {
                "after_flush": lambda *_: self.cut("flush"),
                "after_commit": lambda *_: self.cut("commit"),
            }
            for name, listener in events.items():
                event.listen(Session, name, listener)
            try:
                yield
            finally:
                for name, listener in events.items():
                    event.remove(Session, name, listener)

    def _follow(self, patch: pytest.MonkeyPatch, name: str, note: Callable[..., None]) -> None:
        real = getattr(os, name)

        def run(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if not self._cutting and (name != "open" or arguments[1] & os.O_CREAT):
                note(*arguments)
                self.cut(name)
            return result

        patch.setattr(os, name, run)


class _Writing:
    """A file that is written through, call by call."""

    def __init__(self, file: Any, written: Callable[[], None]) -> None:
        self._file = file
        self._written = written

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        assert count == len(data)
        self._written()
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _entries(folder: str | Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if not entry.name.endswith("-shm")}


def _fingerprint(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state.update(f"{path.relative_to(folder)} {path.is_dir()}".encode())
        if path.is_file() and not path.name.endswith("-shm"):
            state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()
