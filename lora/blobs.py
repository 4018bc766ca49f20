"""Canonical adapter files by digest: in a local folder, or in any fsspec store with a local copy of what is
used.

A file appears under its digest whole or not at all: it is written under another name, fsynced, verified by
its writer, then renamed, and the folder is fsynced. Who needs a file keeps a shared lock on it, and none is
deleted while anyone does: also between the servers that share a folder, and a lock ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from . import durable
from .canonical import open_adapter
from .errors import AdapterCorrupt, StoreError

_BLOB = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = ".writing-"


class Blobs(Protocol):
    """Files by digest (`sha256:` and 64 hex digits). Thread-safe, and safe beside other processes."""

    def put(self, digest: str, write: Callable[[Path], None]) -> None:
        """Make sure that the blob is there and sound; `write` writes it (fsynced) to the path it is given."""

    def path(self, digest: str) -> Path:
        """A local file with the blob's bytes. Raises AdapterCorrupt if there is none."""

    def exists(self, digest: str) -> bool:
        """Whether the blob is there; its bytes are not looked at."""

    def keep(self, digest: str) -> Kept | None:
        """See to it that the local file is not deleted before `close` is called on what is returned.

        None: there is no such file, or it is just being deleted.
        """

    def delete(self, digest: str) -> bool:
        """Remove the blob; False where somebody keeps it. True also if it was not there."""

    def digests(self) -> list[str]:
        """All that are there, local copies included."""


class Kept:
    """A file that nobody deletes until it is closed."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        os.close(self._handle)


def open_blobs(url: str | None, data_dir: Path, installation: str) -> Blobs:
    """The store at fsspec URL `url` (None: in `data_dir`), in a folder of this installation's own.

    Raises StoreError invalid_request if there is none that can be used.
    """
    try:
        if url is None:
            return LocalBlobs(data_dir / "blobs" / installation)
        filesystem, root = fsspec.core.url_to_fs(url)
        if isinstance(filesystem, LocalFileSystem):
            return LocalBlobs(Path(root) / installation)
        cache = LocalBlobs(data_dir / "blob-cache" / installation)
        return RemoteBlobs(filesystem, f"{root.rstrip('/')}/{installation}", cache)
    except (ValueError, ImportError, OSError) as error:
        raise StoreError(
            "invalid_request", f"the blob store cannot be used: {error}", "blob_store"
        ) from error


class LocalBlobs:
    """A folder of files `{hex digest}.safetensors`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        durable.make_folder(root)
        self._clear_temporary()

    def put(self, digest: str, write: Callable[[Path], None]) -> None:
        target = self._target(digest)
        if not (target.exists() and _is_sound(target, digest)):
            with self._temporary() as temporary:
                write(temporary)
                os.replace(temporary, target)
        durable.sync_folder(self.root)  # also for who found it there: its writer may not have come to this

    def path(self, digest: str) -> Path:
        target = self._target(digest)
        if not target.is_file():
            raise AdapterCorrupt(_missing(digest))
        return target

    def exists(self, digest: str) -> bool:
        return self._target(digest).is_file()

    def keep(self, digest: str) -> Kept | None:
        handle = _locked(self._target(digest), fcntl.LOCK_SH)
        return None if handle is None else Kept(handle)

    def delete(self, digest: str) -> bool:
        target = self._target(digest)
        if not target.exists():
            return True
        handle = _locked(target, fcntl.LOCK_EX)
        if handle is None:
            return not target.exists()
        try:
            target.unlink(missing_ok=True)
        finally:
            os.close(handle)
        durable.sync_folder(self.root)
        return True

    def digests(self) -> list[str]:
        return _digests(entry.name for entry in os.scandir(self.root))

    def _target(self, digest: str) -> Path:
        return self.root / _file_name(digest)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A new file under a temporary name, locked while its writer lives and gone afterwards."""
        path = self.root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    def _clear_temporary(self) -> None:
        """Remove what writers left that died: nobody holds their lock."""
        for entry in os.scandir(self.root):
            if not entry.name.startswith(_TEMPORARY):
                continue
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                handle = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(handle)


class RemoteBlobs:
    """An fsspec file system; files are copied to a local folder when they are used."""

    def __init__(self, filesystem: Any, root: str, cache: LocalBlobs) -> None:
        self._fs = filesystem
        self._root = root
        self._cache = cache
        self._fs.makedirs(root, exist_ok=True)

    def put(self, digest: str, write: Callable[[Path], None]) -> None:
        self._cache.put(digest, write)
        target = self._target(digest)
        local = self._cache.path(digest)
        self._fs.invalidate_cache()
        if self._fs.exists(target) and self._fs.size(target) == local.stat().st_size:
            return
        temporary = f"{self._root}/{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._fs.put_file(str(local), temporary)
            self._fs.mv(temporary, target)
        finally:
            if self._fs.exists(temporary):
                self._fs.rm_file(temporary)

    def path(self, digest: str) -> Path:
        if not self._cache.exists(digest):
            self._cache.put(digest, lambda path: self._download(digest, path))
        return self._cache.path(digest)

    def exists(self, digest: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._target(digest)))

    def keep(self, digest: str) -> Kept | None:
        """Of the local copy."""
        return self._cache.keep(digest)

    def delete(self, digest: str) -> bool:
        """Who uses it elsewhere has a copy."""
        if not self._cache.delete(digest):
            return False
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._target(digest))
        return True

    def digests(self) -> list[str]:
        self._fs.invalidate_cache()
        remote = _digests(entry.rsplit("/", 1)[-1] for entry in self._fs.ls(self._root, detail=False))
        return sorted({*remote, *self._cache.digests()})

    def _download(self, digest: str, path: Path) -> None:
        try:
            self._fs.get_file(self._target(digest), str(path))
        except FileNotFoundError:
            raise AdapterCorrupt(_missing(digest)) from None
        if not _is_sound(path, digest):
            raise AdapterCorrupt(
                f"the stored file of adapter {digest} has other bytes than it was stored with"
            )
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    def _target(self, digest: str) -> str:
        return f"{self._root}/{_file_name(digest)}"


def _missing(digest: str) -> str:
    return f"the stored file of adapter {digest} is missing"


def _file_name(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')}.safetensors"


def _digests(names: Iterator[str]) -> list[str]:
    return sorted(f"sha256:{found[1]}" for name in names if (found := _BLOB.fullmatch(name)))


def _is_sound(path: Path, digest: str) -> bool:
    try:
        with open_adapter(path) as adapter:
            return adapter.digest == digest
    except AdapterCorrupt:
        return False


def _locked(path: Path, how: int) -> int | None:
    """A handle of the file at `path` with a lock on it (LOCK_SH or LOCK_EX); None where it is gone, or locked
    otherwise."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:  # else it was deleted before the lock was ours
            return handle
    except BlockingIOError:
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None
