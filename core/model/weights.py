"""A checkpoint's tensors: found over all shards, checked against what the model needs, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ...quant.base import Expected
from .json_file import ModelError, read_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of number types."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

RECOMPUTED = ".rotary_emb.inv_freq"
"""Buffers that old transformers saved in every layer; the frequencies follow from config.json."""

LISTED = 20
"""So many names a message gives before it counts the rest."""


class Checkpoint:
    """The safetensors of one folder. `read` maps a file for one tensor, so memory never holds two."""

    def __init__(
        self, files: Mapping[str, Path], stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        self._files = files
        self._stored = stored

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read every header. ModelError for missing or broken files, and where index and files disagree."""
        index, single = folder / INDEX, folder / SINGLE
        if not index.is_file() and not single.is_file():
            index, single = cls._other_names(folder)
        if index.is_file():
            return cls._open_sharded(index)
        stored = _header(single)
        return cls(dict.fromkeys(stored, single), stored)

    @staticmethod
    def _other_names(folder: Path) -> tuple[Path, Path]:
        """The one index or file of weights under a name of its tool's (gptq_model-4bit-64g.safetensors)."""
        indices = sorted(folder.glob("*.safetensors.index.json"))
        singles = sorted(folder.glob("*.safetensors"))
        if len(indices) == 1 or (not indices and len(singles) == 1):
            return (indices or [folder / INDEX])[0], (singles or [folder / SINGLE])[0]
        raise ModelError(f"{folder}: no weights: neither {INDEX} nor {SINGLE} is there")

    @classmethod
    def _open_sharded(cls, index: Path) -> Checkpoint:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: the key weight_map is missing or empty")
        shards = sorted(set(map(str, weight_map.values())))
        outside = [name for name in shards if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: shards must lie beside it: {_listed(outside)}")
        absent = [name for name in shards if not (index.parent / name).is_file()]
        if absent:
            raise ModelError(f"{index.parent}: missing shards: {_listed(absent)}")
        files: dict[str, Path] = {}
        stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for shard in shards:
            path = index.parent / shard
            for name, form in _header(path).items():
                if name in files:
                    raise ModelError(f"{name} is in two shards: {files[name].name} and {shard}")
                files[name], stored[name] = path, form
        lost = [name for name, shard in weight_map.items() if name not in files or files[name].name != shard]
        if lost:
            raise ModelError(f"{index}: tensors that are not in the shard it names: {_listed(lost)}")
        return cls(files, stored)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, (_, dtype) in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        return self._stored[name][1] if name in self._stored else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name][0]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in mapped file memory: keep a copy of it."""
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {error}") from error

    def check(self, expected: Mapping[str, Expected], notes: list[str]) -> None:
        """ModelError unless the checkpoint holds exactly `expected`; lists every name that is wrong."""
        missing = [name for name in expected if name not in self._stored]
        if missing:
            asking = ", ".join(dict.fromkeys(expected[name].source for name in missing))
            raise ModelError(
                f"the checkpoint lacks {len(missing)} tensors: {_listed(missing)}; {asking} asks for them"
            )
        wrong = []
        for name, want in expected.items():
            shape, dtype = self._stored[name]
            if shape != want.shape or dtype not in want.dtypes:
                wanted = " or ".join(_short(kind) for kind in want.dtypes)
                wrong.append(
                    f"{name} is {_short(dtype)} {list(shape)}, "
                    f"but {want.source} asks for {wanted} {list(want.shape)}"
                )
        if wrong:
            raise ModelError("tensors that do not fit: " + _listed(wrong, "; "))
        left = [name for name in self._stored if name not in expected]
        recomputed = [name for name in left if name.endswith(RECOMPUTED)]
        unknown = sorted(set(left) - set(recomputed))
        if unknown:
            raise ModelError(
                f"the checkpoint has {len(unknown)} tensors that this config.json has no place for: "
                + _listed(unknown)
            )
        if recomputed:
            notes.append(
                f"{len(recomputed)} stored rotary_emb.inv_freq are not read: config.json determines them"
            )


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a file; its length is checked too."""
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in DTYPES:
                    raise ModelError(f"{path}: {name} has the unknown number type {kind}")
                found[name] = tuple(part.get_shape()), DTYPES[kind]
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or no safetensors file: {error}") from error
    return found


def _listed(names: list[str], separator: str = ", ") -> str:
    more = len(names) - LISTED
    return separator.join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
