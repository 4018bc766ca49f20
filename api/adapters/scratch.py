"""Where the files of registrations lie until they are registered."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class Scratch:
    """Folders below `root`, which servers may share. Its calls belong in a worker thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    def open(self) -> None:
        """What a killed server left goes, unless another one lives in this data folder."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in self._root.iterdir():
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def new(self) -> Path:
        """A folder that is the caller's alone, and for it to remove."""
        return Path(tempfile.mkdtemp(dir=self._root))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
