"""The one form in which adapters are stored, and their digest.

A canonical file is a safetensors file whose bytes follow from the adapter alone: tensors
`layers.{l}.{module}.A` [rank, in_features] and `.B` [out_features, rank], ordered by layer, module, A before
B, in the number form of the adapter's own file; metadata holds each module's scale (the shortest text of its
float32) and the digest. The digest is SHA-256 over the header written without the digest, then the tensors'
bytes: it depends on places, ranks, scales, number form and values, and on nothing else (not on names,
folders, tensor order or other config keys).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np

from .base import MODULES
from .errors import AdapterCorrupt, AdapterInvalid
from .floats import Array, FloatForm
from .safetensors_file import SafetensorsFile, TensorEntry
from .spec import AdapterSpec, Delta, Part

FORMAT = "heddle-adapter-1"
_PARTS: tuple[Part, Part] = ("A", "B")
_KEY = re.compile(rf"layers\.(?P<layer>0|[1-9][0-9]{{0,5}})\.(?P<module>{'|'.join(MODULES)})\.A")


class CanonicalAdapter:
    """An open canonical file: `digest`, `deltas`, and reads of A and B. A context manager."""

    def __init__(self, file: SafetensorsFile, digest: str, deltas: list[Delta]) -> None:
        self._file = file
        self.digest = digest
        self.deltas = deltas

    def form(self, delta: Delta, part: Part) -> FloatForm:
        """The number form of one tensor."""
        return cast(FloatForm, self._file.entries[f"{delta.key}.{part}"].dtype)

    def forms(self) -> set[FloatForm]:
        """Those of all its tensors."""
        return {self.form(delta, part) for delta in self.deltas for part in _PARTS}

    def read(self, delta: Delta, part: Part) -> Array:
        """A [rank, in_features] or B [out_features, rank]; a BF16 tensor as the uint16 of its bits."""
        return self._file.read(f"{delta.key}.{part}")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CanonicalAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Digest:
    """Computes the digest while the tensors' bytes pass by in canonical order."""

    def __init__(self, deltas: Sequence[Delta], entries: Sequence[tuple[TensorEntry, TensorEntry]]) -> None:
        self._hash = hashlib.sha256(_header(deltas, entries, None))

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def result(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def write(spec: AdapterSpec, folder: Path, path: Path) -> None:
    """Write the canonical form of the adapter in `folder` that `inspect` returned `spec` for, fsynced.

    Streams: takes a few MiB of memory whatever the size. Raises AdapterInvalid if the folder changed since.
    """
    with SafetensorsFile(folder / "adapter_model.safetensors") as source, path.open("wb") as target:
        try:
            entries = [(source.entries[a], source.entries[b]) for a, b in spec.tensors]
        except KeyError:
            raise AdapterInvalid("adapter_model.safetensors changed while it was read") from None
        digest = Digest(spec.deltas, entries)
        target.write(_header(spec.deltas, entries, spec.digest))
        for name in (name for pair in spec.tensors for name in pair):
            for chunk in source.chunks(name):
                digest.update(chunk)
                target.write(chunk)
        if digest.result() != spec.digest:
            raise AdapterInvalid("adapter_model.safetensors changed while it was read")
        target.flush()
        os.fsync(target.fileno())


def open_adapter(path: Path | str, *, verify: bool = True) -> CanonicalAdapter:
    """Open a canonical file; with `verify` every byte is read and checked against the digest it carries.

    Raises AdapterCorrupt if it is missing, not canonical, or has other bytes than it was written with.
    """
    path = Path(path)
    try:
        file = SafetensorsFile(path)
        try:
            digest, deltas = _read_header(file)
            if verify:
                _verify(file, digest, deltas)
        except BaseException:
            file.close()
            raise
    except AdapterInvalid as error:
        if not path.exists():
            raise AdapterCorrupt("its stored file is missing") from None
        reason = str(error).replace(path.name, "it")
        raise AdapterCorrupt(f"its stored file is damaged: {reason}") from None
    return CanonicalAdapter(file, digest, deltas)


def _read_header(file: SafetensorsFile) -> tuple[str, list[Delta]]:
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        raise AdapterInvalid(f"it is not in the form {FORMAT}")
    deltas: list[Delta] = []
    for name, entry in file.entries.items():
        if found := _KEY.fullmatch(name):
            module = MODULES.index(found["module"])
            try:
                scale = float(np.float32(metadata[f"{name[:-2]}.scale"]))
            except (KeyError, ValueError):
                raise AdapterInvalid(f"{name} has no scale") from None
            deltas.append(Delta(int(found["layer"]), module, entry.shape[0] if entry.shape else 0, scale))
    deltas.sort(key=lambda delta: (delta.layer, delta.module))
    digest = metadata.get("digest", "")
    # Writing the header again from what was understood must give the very bytes: nothing is left unread.
    if (
        2 * len(deltas) != len(file.entries)
        or _header(deltas, _entries(file, deltas), digest)[8:] != file.header
    ):
        raise AdapterInvalid("its header is not the one it was written with")
    return digest, deltas


def _verify(file: SafetensorsFile, digest: str, deltas: list[Delta]) -> None:
    found = Digest(deltas, _entries(file, deltas))
    for chunk in file.data_chunks():
        found.update(chunk)
    if found.result() != digest:
        raise AdapterInvalid("it has other bytes than it was written with")


def _entries(file: SafetensorsFile, deltas: Sequence[Delta]) -> list[tuple[TensorEntry, TensorEntry]]:
    try:
        return [(file.entries[f"{delta.key}.A"], file.entries[f"{delta.key}.B"]) for delta in deltas]
    except KeyError as error:
        raise AdapterInvalid(f"it lacks the tensor {error.args[0]}") from None


def _header(
    deltas: Sequence[Delta], entries: Sequence[tuple[TensorEntry, TensorEntry]], digest: str | None
) -> bytes:
    """Length and JSON of a canonical file's header; of `entries` only dtype, shape and size are used."""
    metadata = {"format": FORMAT} | ({} if digest is None else {"digest": digest})
    metadata |= {f"{delta.key}.scale": repr(float(np.float32(delta.scale))) for delta in deltas}
    header: dict[str, Any] = {"__metadata__": metadata}
    header |= _tensors(deltas, entries)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensors(
    deltas: Sequence[Delta], entries: Sequence[tuple[TensorEntry, TensorEntry]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    position = 0
    for delta, pair in zip(deltas, entries, strict=True):
        for part, entry in zip(_PARTS, pair):
            end = position + entry.nbytes
            yield (
                f"{delta.key}.{part}",
                {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]},
            )
            position = end
