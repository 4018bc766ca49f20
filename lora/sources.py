"""Takes adapters from where a request says they lie: a folder below an allowed root, or the Hugging Face hub.

Files are copied into a private folder before anything looks at them, so nothing can be swapped between check
and use.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import AdapterInvalid, StoreError
from .inspect import CONFIG_FILE, CONFIG_LIMIT, OTHER_FILES, WEIGHTS_FILE, missing_weights

OTHER_LIMIT = 64 << 20
"""Bytes of a tokenizer or template file, which is only compared; a larger one is left out."""
_COPY = 1 << 20
_HUB = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def is_hub(source: str) -> bool:
    return source.startswith("hf:")


def fetch(
    source: str, roots: Sequence[Path], folder: Path, *, max_bytes: int, token: str | None = None
) -> None:
    """Copy or download the adapter at `source` into the empty `folder`. Blocks; call it in a thread.

    `token` is for the hub; without one only public repositories are seen. Raises StoreError invalid_request
    for a source that is not allowed or not well-formed, AdapterInvalid for one that cannot be taken.
    """
    if is_hub(source):
        fetch_hub(source, folder, max_bytes=max_bytes, token=token)
    else:
        fetch_local(source, roots, folder, max_bytes=max_bytes)


# ------------------------------------------------------------------ local folders


def resolve_source(source: str, roots: Sequence[Path]) -> tuple[Path, Path]:
    """(real root, path below it) of the folder that `source` means: absolute, or relative to a root or to the
    working directory. Links are followed by name and must stay below the root; nothing is opened.

    Raises StoreError invalid_request, in the same words whether or not something exists outside.
    """
    if not source or "\0" in source or ".." in Path(source).parts or not _encodable(source):
        raise _refused()
    for root in roots:
        real_root = Path(os.path.realpath(root))
        for path in _candidates(source, Path(os.path.abspath(root)), real_root):
            real = Path(os.path.realpath(path))
            if real.is_relative_to(real_root) and os.path.isdir(real):
                return real_root, real.relative_to(real_root)
    raise _refused()


def fetch_local(source: str, roots: Sequence[Path], folder: Path, *, max_bytes: int) -> None:
    """Copy the adapter's files from below a root into `folder`."""
    root, relative = resolve_source(source, roots)
    with _opened_folder(root, relative) as handle:
        names = os.listdir(handle)
        if WEIGHTS_FILE not in names and CONFIG_FILE in names:
            raise missing_weights(names)
        for name, limit in ((CONFIG_FILE, CONFIG_LIMIT), (WEIGHTS_FILE, max_bytes)):
            if name in names:
                _copy(root, relative, handle, name, folder / name, limit)
        for name in OTHER_FILES:
            if name in names and _is_plain(handle, name, OTHER_LIMIT):
                _copy(root, relative, handle, name, folder / name, OTHER_LIMIT)


def _candidates(source: str, root: Path, real_root: Path) -> Iterator[Path]:
    """Where `source` may lie, as far as its text goes: only paths below the root."""
    paths = [Path(source)] if os.path.isabs(source) else [root / source, Path(os.path.abspath(source))]
    for path in paths:
        if path.is_relative_to(root) or path.is_relative_to(real_root):
            yield path


@contextmanager
def _opened_folder(root: Path, relative: Path) -> Iterator[int]:
    """A handle of root/relative, reached through real folders alone: a link put there meanwhile is not
    followed.
    """
    try:
        handle = os.open(root, _FOLDER)
        for part in relative.parts:
            try:
                inner = os.open(part, _FOLDER, dir_fd=handle)
            finally:
                os.close(handle)
            handle = inner
    except OSError:
        raise _refused() from None
    try:
        yield handle
    finally:
        os.close(handle)


def _copy(root: Path, relative: Path, handle: int, name: str, target: Path, limit: int) -> None:
    real = Path(os.path.realpath(root / relative / name))
    if not real.is_relative_to(root):
        raise _refused()
    inner = real.relative_to(root)
    with _opened_folder(root, inner.parent) as parent:
        try:
            source = os.open(inner.name, _FILE, dir_fd=parent)
        except OSError:
            raise _refused() from None
    try:
        info = os.fstat(source)
        if not stat.S_ISREG(info.st_mode):
            raise AdapterInvalid(f"{name} is not a regular file")
        if info.st_size > limit:
            raise AdapterInvalid(f"{name} has {info.st_size} bytes, more than the limit of {limit}")
        left = info.st_size
        with target.open("xb") as out:
            while left and (data := os.read(source, min(_COPY, left))):
                out.write(data)
                left -= len(data)
    finally:
        os.close(source)


def _is_plain(handle: int, name: str, limit: int) -> bool:
    info = os.stat(name, dir_fd=handle, follow_symlinks=False)
    return stat.S_ISREG(info.st_mode) and info.st_size <= limit


def _encodable(source: str) -> bool:
    try:
        os.fsencode(source)
    except UnicodeEncodeError:
        return False
    return True


def _refused() -> StoreError:
    message = "source must be an adapter folder below one of this server's --adapter-root folders"
    return StoreError("invalid_request", message, "source")


# ------------------------------------------------------------------ the hub


def fetch_hub(
    source: str, folder: Path, *, max_bytes: int, token: str | None = None, endpoint: str | None = None
) -> None:
    """Download the adapter's files of `hf:org/name[@revision]` into `folder`, sizes checked before.

    `endpoint`: the hub's address (None: huggingface_hub's own, which HF_ENDPOINT sets). No code is ever
    fetched.
    """
    found = _HUB.fullmatch(source)
    if found is None or ".." in source:
        raise StoreError("invalid_request", "source must be hf:org/name or hf:org/name@revision", "source")
    # Imported here: it takes a while, and few servers ever fetch from a hub. HTTPError is the one of whatever
    # HTTP client the installed huggingface_hub stands on.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    api = HfApi(endpoint=endpoint, token=token or False)
    repository = found["repository"]
    try:
        info = api.model_info(repository, revision=found["revision"], files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        if WEIGHTS_FILE not in sizes:
            raise missing_weights(sizes)
        for name in (CONFIG_FILE, WEIGHTS_FILE, *OTHER_FILES):
            if name not in sizes:
                continue
            limit = {CONFIG_FILE: CONFIG_LIMIT, WEIGHTS_FILE: max_bytes}.get(name, OTHER_LIMIT)
            size = sizes[name]
            if size is None or size > limit:
                if name in OTHER_FILES:
                    continue
                raise AdapterInvalid(f"{source}: {name} has {size} bytes, more than the limit of {limit}")
            api.hf_hub_download(repository, name, revision=info.sha, local_dir=folder)
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AdapterInvalid(f"{source} cannot be fetched: {reason}") from error
