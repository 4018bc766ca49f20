"""Compares the copies of the base's embedding and head that some adapter files carry with the base's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np

from .base import BaseModel
from .errors import AdapterInvalid
from .floats import NUMPY, FloatForm, convert
from .safetensors_file import CHUNK, SafetensorsFile

_BASE_NAMES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
_BASE_HEADER_LIMIT = 100 << 20


def check_copy(file: SafetensorsFile, name: str, which: str, base: BaseModel) -> None:
    """Raises AdapterInvalid unless the tensor equals the base's `which`, rounded to the tensor's number
    form."""
    entry = file.entries[name]
    expected = (base.vocab_size, base.hidden_size)
    if entry.shape != expected:
        raise AdapterInvalid(
            f"{name} has shape {list(entry.shape)}, the base has {list(expected)}: "
            "a changed vocabulary is not served"
        )
    if entry.dtype not in NUMPY:
        raise AdapterInvalid(f"{name} has dtype {entry.dtype}; F32, F16 and BF16 are served")
    with _base_file(name, which, base) as (own, own_name):
        form: FloatForm = entry.dtype
        own_form = cast(FloatForm, own.entries[own_name].dtype)
        sizes = (NUMPY[form].itemsize, NUMPY[own_form].itemsize)
        values = CHUNK // 4
        for copied, kept in zip(
            file.chunks(name, values * sizes[0]), own.chunks(own_name, values * sizes[1]), strict=True
        ):
            theirs = np.frombuffer(copied, NUMPY[form])
            try:
                ours = convert(np.frombuffer(kept, NUMPY[own_form]), own_form, form)
            except OverflowError:
                ours = None
            if ours is None or not np.array_equal(theirs, ours):
                raise AdapterInvalid(
                    f"{name} differs from the base's own weights: trained embeddings are not served"
                )


class _base_file:
    """The base's file that holds `which`, opened; with tied embeddings the head is the embedding."""

    def __init__(self, name: str, which: str, base: BaseModel) -> None:
        wanted = _BASE_NAMES[which]
        unknown = AdapterInvalid(f"{name} cannot be compared with the base's own weights and is not served")
        if base.folder is None:
            raise unknown
        candidates = [wanted, _BASE_NAMES["embed_tokens"]] if base.tied_embeddings else [wanted]
        for candidate in candidates:
            path = _shard(Path(base.folder), candidate)
            if path is None:
                continue
            file = SafetensorsFile(path, header_limit=_BASE_HEADER_LIMIT)
            own = file.entries.get(candidate)
            if own is not None and own.dtype in NUMPY and own.shape == (base.vocab_size, base.hidden_size):
                self._found = (file, candidate)
                return
            file.close()
        raise unknown

    def __enter__(self) -> tuple[SafetensorsFile, str]:
        return self._found

    def __exit__(self, *_: object) -> None:
        self._found[0].close()


def _shard(folder: Path, tensor: str) -> Path | None:
    index = folder / "model.safetensors.index.json"
    name: object = "model.safetensors"
    if index.is_file():
        name = json.loads(index.read_bytes()).get("weight_map", {}).get(tensor)
    path = folder / name if isinstance(name, str) else None
    return path if path is not None and path.is_file() else None
