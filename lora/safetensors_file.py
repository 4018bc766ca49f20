"""Reads one safetensors file with every claim of its header checked. Format: huggingface.co/docs/safetensors.

The file is read with `pread`, not mapped: a file that shrinks under us is an error and not a signal that ends
the process, and pages of an upload are not counted as the server's memory.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from .errors import AdapterInvalid
from .floats import NUMPY, Array

HEADER_LIMIT = 1 << 20
"""Bytes of JSON header that are accepted; a tensor takes about 150, and the largest LLaMA's adapter has 1764."""
CHUNK = 4 << 20
"""Bytes read at a time when streaming."""
_MAX_DIMS = 8
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Byte offset in the file."""
    nbytes: int


class SafetensorsFile:
    """An open file: `entries` by tensor name in file order, `metadata`, and reads. A context manager.

    Raises AdapterInvalid if the file is not exactly what the format asks for.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None, header_limit: int = HEADER_LIMIT) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a pipe that stands in the file's place must not wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise AdapterInvalid(f"{path.name} cannot be opened: {error.strerror}") from None
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise AdapterInvalid(f"{path.name} is not a regular file")
            self.size = info.st_size
            if max_bytes is not None and self.size > max_bytes:
                raise AdapterInvalid(f"{path.name} has {self.size} bytes, more than the limit of {max_bytes}")
            self.header, self.metadata, self.entries = self._parse(header_limit)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, name: str) -> Array:
        """The whole tensor, shaped; only for the forms of `floats.NUMPY`."""
        entry = self.entries[name]
        buffer = np.empty(entry.nbytes, dtype=np.uint8)
        self._read_into(buffer.data, entry.begin)
        return buffer.view(NUMPY[entry.dtype]).reshape(entry.shape)  # type: ignore[index]

    def chunks(self, name: str, nbytes: int = CHUNK) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces of at most `nbytes`; a piece is valid until the next one."""
        entry = self.entries[name]
        yield from self._chunks(entry.begin, entry.begin + entry.nbytes, nbytes)

    def data_chunks(self, nbytes: int = CHUNK) -> Iterator[memoryview]:
        """All bytes after the header, in pieces valid until the next one."""
        yield from self._chunks(8 + len(self.header), self.size, nbytes)

    def _chunks(self, begin: int, end: int, nbytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(nbytes, max(end - begin, 1))))
        for offset in range(begin, end, len(buffer)):
            piece = buffer[: min(len(buffer), end - offset)]
            self._read_into(piece, offset)
            yield piece

    def _read_into(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done:]], offset + done)
            if count == 0:
                raise AdapterInvalid(f"{self.path.name} became shorter while it was read")
            done += count

    def _parse(self, limit: int) -> tuple[bytes, dict[str, str], dict[str, TensorEntry]]:
        name = self.path.name
        if self.size < 8:
            raise AdapterInvalid(f"{name} is not a safetensors file: it has {self.size} bytes")
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > limit:
            raise AdapterInvalid(f"{name} claims a header of {length} bytes, more than the limit of {limit}")
        if 8 + length > self.size:
            raise AdapterInvalid(f"{name} is cut off: a header of {length} bytes in a file of {self.size}")
        raw = bytearray(length)
        self._read_into(memoryview(raw), 8)
        header = bytes(raw)
        fields = _json_object(header, name)
        metadata = fields.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise AdapterInvalid(f"{name}: __metadata__ is not a map from text to text")
        start = 8 + length
        entries = {key: _entry(name, key, value, start) for key, value in fields.items()}
        self._check_cover(entries, start)
        return header, metadata, entries

    def _check_cover(self, entries: dict[str, TensorEntry], start: int) -> None:
        """Tensors must fill the bytes after the header exactly: no hole, no overlap, nothing beyond the
        end."""
        position = start
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
            if entry.begin != position:
                problem = (
                    "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
                )
                raise AdapterInvalid(f"{self.path.name}: tensor {key!r} {problem}")
            position += entry.nbytes
        if position != self.size:
            what = "is cut off" if position > self.size else "has bytes that belong to no tensor"
            raise AdapterInvalid(f"{self.path.name} {what}: {position} bytes expected, {self.size} found")


def _json_object(text: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise AdapterInvalid(f"{name}: the header names {twice!r} twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except AdapterInvalid:
        raise
    except (ValueError, RecursionError):
        raise AdapterInvalid(f"{name}: the header is not JSON") from None
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{name}: the header is not a JSON object")
    return value


def _entry(file: str, key: str, value: object, start: int) -> TensorEntry:
    where = f"{file}: tensor {key[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid(f"{where} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise AdapterInvalid(f"{where} has the unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise AdapterInvalid(f"{where} has a shape that is not a list of at most {_MAX_DIMS} sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise AdapterInvalid(f"{where} has data_offsets that are not two byte positions")
    begin, end = offsets
    nbytes = math.prod(shape) * _BYTES[dtype]
    if end - begin != nbytes:
        raise AdapterInvalid(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets give it {end - begin}"
        )
    return TensorEntry(dtype, tuple(shape), start + begin, nbytes)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
