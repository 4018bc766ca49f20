"""From what the user calls a model to a local Hugging Face folder."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .cache import Progress, make_once, silent
from .errors import CheckpointError
from .gguf import convert
from .hub import fetch

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """The folder of `model`: a local folder (as it is), a `.gguf` file (converted once into the cache), or a
    hub name `org/name` or `org/name@revision`. What exists here counts before a hub name.

    `cache_dir` replaces the caches of conversions and of the hub. Raises `CheckpointError`.
    """
    path = Path(os.path.expanduser(model))  # Path's own raises where there is no such user
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{model} is a folder without config.json, so it is no model")
        return path.absolute()
    if path.is_file():
        return _from_gguf(path.resolve(), cache_dir, progress)
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise CheckpointError(
            f"there is no file or folder {model!r}, and it is no hub name (org/name or org/name@revision)"
        )
    repo, _, revision = model.partition("@")
    hub_cache = None if cache_dir is None else Path(cache_dir) / "hub"
    return fetch(repo, revision or None, cache_dir=hub_cache, progress=progress)


def _from_gguf(path: Path, cache_dir: Path | None, progress: Progress) -> Path:
    """The conversion of the file as it is now: another size or time of change makes it another file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file; a model is a folder, a .gguf file or a hub name")
    identity = f"{path}\n{status.st_size}\n{status.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return make_once(
        name, lambda folder: convert(path, folder, progress), cache_dir=cache_dir, progress=progress
    )
