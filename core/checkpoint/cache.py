"""The user's cache of model folders: where it is, and how a folder in it is made exactly once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError

FORMAT = "v1"
"""Names the layout of what we write; raised when a change makes older folders wrong."""

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, done, total); done and total count bytes, and total 0 means unknown."""


def silent(what: str, done: int, total: int) -> None:
    """The progress callback of a caller that wants none."""


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir`, else `$HEDDLE_CACHE`, else `$XDG_CACHE_HOME/heddle`, else `~/.cache/heddle`."""
    if cache_dir is not None:
        return Path(cache_dir)
    if own := os.environ.get("HEDDLE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "heddle"
    return Path.home() / ".cache" / "heddle"


def make_once(
    name: str, build: Callable[[Path], None], *, cache_dir: Path | None, progress: Progress
) -> Path:
    """The cached folder `name`, made by `build(empty folder)` where it does not exist yet.

    `build` works in a temporary sibling that is flushed to disk and renamed only when complete, so a folder
    of that name is never half made, whatever interrupts it. A lock file keeps a second process (or thread)
    waiting, and it then finds the folder ready. What a killed run left behind is removed by the next.
    """
    parent = cache_root(cache_dir) / FORMAT
    target = parent / name
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(
            parent / f".{name}.lock", lambda: progress(f"waiting for another process to make {name}", 0, 0)
        ):
            if target.is_dir():
                return target
            for stale in parent.glob(f".{name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            write_folder(target, build)
    except OSError as error:
        raise CheckpointError(f"cannot write the model cache {parent}: {error}") from error
    return target


def write_folder(target: Path, build: Callable[[Path], None]) -> None:
    """Make `target` by `build(empty folder)`, which works in a hidden sibling that is renamed when complete.

    OSError where it cannot be written, or there is something of that name in the end.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        made = work / "made"
        made.mkdir()
        build(made)
        _flush(made)
        made.rename(target)
        _flush_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; the system lets go of it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
