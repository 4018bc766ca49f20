"""Where an adapter may be taken from besides an upload: a folder below an allowed root, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .errors import ApiError, invalid
from .uploads import FILES

_HUB = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def is_hub(source: str) -> bool:
    return source.startswith("hf:")


def local_folder(source: str, roots: Sequence[Path]) -> Path:
    """The folder that `source` means: absolute, relative to the working directory, or relative to a root.

    It, and whatever its entries link to, must lie below one of `roots`. Links are followed by name alone, nothing is
    opened, and the refusal is the same whether something exists outside or not.
    """
    if "\0" in source or not source:
        raise _outside()
    real_roots = [Path(os.path.realpath(root)) for root in roots]
    candidates = [Path(os.path.realpath(source))]
    if not os.path.isabs(source):
        candidates += [Path(os.path.realpath(root / source)) for root in real_roots]
    inside = [path for path in candidates if _below(path, real_roots)]
    if not inside:
        raise _outside()
    folder = next((path for path in inside if path.is_dir()), None)
    if folder is None:
        raise ApiError("adapter_invalid", "source is not a folder", "source")
    for entry in os.scandir(folder):
        if entry.is_symlink() and not _below(Path(os.path.realpath(entry.path)), real_roots):
            raise invalid(f"source: {entry.name} is a link that leads out of the adapter root", "source")
    return folder


def _below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _outside() -> ApiError:
    return invalid("source must be a folder below one of this server's --adapter-root folders", "source")


def fetch_from_hub(source: str, folder: Path, max_bytes: int) -> None:
    """Download the adapter's files of `hf:org/name[@revision]` into `folder`. Blocks; call it in a thread."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise invalid("source: a hub adapter is written hf:org/name or hf:org/name@revision", "source")
    # Imported here: it takes a while, and few servers ever fetch from a hub.
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, revision = match.groups()
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = [name for name in FILES if name in sizes]
        if sum(sizes[name] for name in wanted) > max_bytes:
            raise ApiError("body_too_large", f"{source} is larger than the {max_bytes} bytes allowed", "source")
        for name in wanted:
            hf_hub_download(repository, name, revision=info.sha or revision, local_dir=folder)
    except (HfHubHTTPError, OSError) as error:
        raise ApiError("adapter_invalid", f"cannot fetch {source}: {_first_line(error)}", "source") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
