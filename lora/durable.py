"""Folders whose names survive a power failure. Control code: no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Like mkdir -p, with every name fsynced into its parent. `mode`: of the last one, if it is made here.

    The last one also where it was there already: whoever made it may have died before that.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a parent we may not read: the name in it is not ours
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in `folder` stays so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
