"""The folder that compiled kernels are kept in: one for each version of the sources, old ones removed in time.

A process holds its folder, by a shared lock on a file in it, until it ends. Whoever makes the folder of a new version
removes those of other versions that no process holds, where they have not been used for `KEPT_SECONDS` or are not among
the `KEPT` that were used last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import IO

KEPT = 8
KEPT_SECONDS = 30 * 24 * 3600
PREFIX, HOLD, REMOVED = "kernels-", "in-use", ".removed"

_held: list[IO[bytes]] = []
"""Open files, whose locks end with the process."""


def sources_digest(folder: Path) -> str:
    """A hash over all Python files of `folder`."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def own_folder(sources: Path) -> Path | None:
    """A writable folder for the kernels of this version of `sources`, held from now on; None if there is none."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heddle"
    folder = root / f"{PREFIX}{sources_digest(sources)[:16]}"
    new = not folder.is_dir()
    try:
        _held.append(hold(folder))
    except OSError:
        return None
    if new:
        prune(root, folder)
    return folder


def hold(folder: Path) -> IO[bytes]:
    """Make the folder if need be, and hold it until what is returned is closed. OSError where it cannot be written to.

    The time of the file says when the folder was used last.
    """
    path = folder / HOLD
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # removed since the line above
            continue
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(file, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                os.utime(path)
                return file
        except FileNotFoundError:
            pass
        file.close()  # removed before the lock was there


def prune(root: Path, own: Path) -> None:
    """Remove what is not to be kept of the folders in `root`, `own` excepted, as far as that can be done."""
    for folder in root.glob(f"{PREFIX}*{REMOVED}"):  # somebody was killed while removing it
        shutil.rmtree(folder, ignore_errors=True)
    others = [(_last_use(folder), folder) for folder in root.glob(f"{PREFIX}*") if folder != own]
    oldest = time.time() - KEPT_SECONDS
    for place, (used, folder) in enumerate(sorted(others, reverse=True)):
        if place >= KEPT or used < oldest:
            _remove(folder)


def _last_use(folder: Path) -> float:
    """When it was used last, as far as that can be seen."""
    with contextlib.suppress(OSError):
        return (folder / HOLD).stat().st_mtime
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _remove(folder: Path) -> None:
    """Unless a process holds it, or it is not ours to remove."""
    gone = folder.with_name(folder.name + REMOVED)
    with contextlib.suppress(OSError):
        with (folder / HOLD).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(gone)  # whoever waits for the lock finds the folder gone, and makes another
        shutil.rmtree(gone)
