"""Reads a PEFT adapter folder and says exactly what it does to the base, or why it is refused. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from .base import MODULES, BaseModel
from .canonical import Digest
from .embedding_copies import check_copy
from .errors import AdapterInvalid
from .floats import NUMPY, FloatForm, is_finite, magnitude, magnitude_bits
from .patterns import Matcher
from .peft_config import PeftConfig, parse
from .safetensors_file import SafetensorsFile, TensorEntry
from .spec import AdapterSpec, Delta, Part
from .tensor_names import Names, Place, module_path, understand
from .tokenizer_files import OTHER_FILES, differences

__all__ = ["OTHER_FILES", "AdapterSpec", "Delta", "inspect"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_LIMIT = 1 << 20
"""Bytes of adapter_config.json."""


def inspect(folder: Path, base: BaseModel, *, max_rank: int, max_bytes: int) -> AdapterSpec:
    """Check the adapter in `folder` wholly against `base`, reading every byte of it.

    Raises AdapterInvalid, whose message names the tensor or key; nothing is ever applied in part. `max_bytes`
    bounds the safetensors file. Takes a few MiB of memory whatever the size.
    """
    config = parse(_config_text(folder))
    with SafetensorsFile(_weights_path(folder), max_bytes=max_bytes) as file:
        if config.modules_to_save:
            raise AdapterInvalid(_modules_to_save(config, file, base))
        names = understand(list(file.entries))
        matcher = Matcher()
        warnings = list(config.warnings)
        deltas = _deltas(config, names, file, base, matcher, max_rank, warnings)
        for name, which in names.copies:
            check_copy(file, name, which, base)
            warnings.append(f"{name} equals the base's own weights and is not needed")
        tensors = [(_tensor(names, delta, "A"), _tensor(names, delta, "B")) for delta in deltas]
        digest, max_abs = _read_values(file, deltas, tensors, warnings)
        warnings += _unmatched(config, names, base, matcher) + _other_base(config, base)
        warnings += differences(folder, base)
        entries = [file.entries[name] for pair in tensors for name in pair]
        return AdapterSpec(
            digest=digest,
            deltas=deltas,
            tensors=tensors,
            rank=max(delta.rank for delta in deltas),
            target_modules=[MODULES[module] for module in sorted({delta.module for delta in deltas})],
            matched=len(entries) + len(names.copies),
            total=len(file.entries),
            warnings=warnings,
            base_model=base.name,
            size_bytes=sum(entry.nbytes for entry in entries),
            dtype="+".join(sorted({entry.dtype for entry in entries})),
            max_abs=max_abs,
        )


def _config_text(folder: Path) -> bytes:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise AdapterInvalid(f"{CONFIG_FILE} is missing")
    with path.open("rb") as file:
        text = file.read(CONFIG_LIMIT + 1)
    if len(text) > CONFIG_LIMIT:
        raise AdapterInvalid(f"{CONFIG_FILE} has more than {CONFIG_LIMIT} bytes")
    return text


def _weights_path(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    raise missing_weights(entry.name for entry in folder.iterdir())


def missing_weights(names: Iterable[str]) -> AdapterInvalid:
    """The error for a folder with these files, in which the safetensors file is missing."""
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if not pickles:
        return AdapterInvalid(f"{WEIGHTS_FILE} is missing")
    return AdapterInvalid(
        f"{pickles[0]} is a pickle, which can run code, and is never read: save the adapter as "
        f"{WEIGHTS_FILE} (PEFT: save_pretrained(..., safe_serialization=True))"
    )


def _modules_to_save(config: PeftConfig, file: SafetensorsFile, base: BaseModel) -> str:
    """Why `modules_to_save` is refused, with the tensors that belong to it."""
    found = [
        f"{name} {list(entry.shape)}"
        for name, entry in file.entries.items()
        if any(f".{module}." in f".{name}" for module in config.modules_to_save) and ".lora_" not in name
    ]
    held = f"the file holds {', '.join(found[:4])}" if found else "and the file holds none of them"
    size = f"; the base's embedding is {[base.vocab_size, base.hidden_size]}"
    return f"modules_to_save {config.modules_to_save}: fully trained modules are not served: {held}{size}"


def _tensor(names: Names, delta: Delta, part: Part) -> str:
    return names.tensors[Place(delta.layer, delta.module, part)]


def _deltas(
    config: PeftConfig,
    names: Names,
    file: SafetensorsFile,
    base: BaseModel,
    matcher: Matcher,
    max_rank: int,
    warnings: list[str],
) -> list[Delta]:
    """Every adapted linear with its rank and scale, checked against config, base and both tensors' shapes."""
    deltas: list[Delta] = []
    used: dict[str, set[str | None]] = {"rank_pattern": set(), "alpha_pattern": set()}
    for (layer, module), path in sorted(names.paths.items()):
        found = [names.tensors.get(Place(layer, module, part)) for part in ("A", "B")]
        if found[0] is None or found[1] is None:
            raise AdapterInvalid(
                f"{found[0] or found[1]} has no {'lora_B' if found[0] else 'lora_A'} beside it"
            )
        if layer >= base.num_layers:
            raise AdapterInvalid(
                f"{found[0]} is for layer {layer}, the base has layers 0 to {base.num_layers - 1}"
            )
        if not config.targets(path, matcher):
            key = (
                "exclude_modules excludes"
                if config.excludes(path, matcher)
                else "target_modules does not cover"
            )
            raise AdapterInvalid(f"{found[0]}: {key} {path}, so PEFT would not apply it")
        rank, rank_key = config.rank_at(path, matcher)
        if rank > max_rank:
            raise AdapterInvalid(f"{found[0]}: rank {rank} is above the limit of {max_rank}")
        scale, alpha_key = config.scale_at(path, matcher)
        used["rank_pattern"].add(rank_key)
        used["alpha_pattern"].add(alpha_key)
        outputs, inputs = base.shapes[MODULES[module]]
        _check_shape(found[0], file.entries[found[0]], (rank, inputs), rank_key)
        _check_shape(found[1], file.entries[found[1]], (outputs, rank), rank_key)
        with np.errstate(over="ignore"):
            single = float(np.float32(scale))
        if not np.isfinite(single):
            raise AdapterInvalid(f"{path}: its scale {scale:g} is beyond float32")
        deltas.append(Delta(layer, module, rank, single))
    silent = [names.paths[delta.layer, delta.module] for delta in deltas if delta.scale == 0.0]
    if silent:
        warnings.append(f"alpha is 0: these contribute nothing ({_some(silent)})")
    for key, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        warnings += _idle_patterns(
            key, [entry for entry in patterns if entry not in used[key]], names, matcher
        )
        warnings += _ambiguous_patterns(key, patterns, names, matcher)
    return deltas


def _check_shape(name: str, entry: TensorEntry, expected: tuple[int, int], rank_key: str | None) -> None:
    if entry.dtype not in NUMPY:
        raise AdapterInvalid(f"{name} has dtype {entry.dtype}; F32, F16 and BF16 are served")
    if entry.shape != expected:
        source = "r" if rank_key is None else f"rank_pattern {rank_key!r}"
        raise AdapterInvalid(
            f"{name} has shape {list(entry.shape)}, but base and config ({source}) ask for {list(expected)}"
        )


def _read_values(
    file: SafetensorsFile, deltas: list[Delta], tensors: list[tuple[str, str]], warnings: list[str]
) -> tuple[str, float]:
    """Read all values once: their digest, the largest magnitude; refuse what is not a number, note what is
    all zero."""
    digest = Digest(deltas, [(file.entries[a], file.entries[b]) for a, b in tensors])
    largest, silent = 0.0, []
    for pair in tensors:
        zero = False
        for name in pair:
            form = cast(FloatForm, file.entries[name].dtype)
            bits = 0
            for chunk in file.chunks(name):
                bits = max(bits, magnitude_bits(np.frombuffer(chunk, NUMPY[form]), form))
                digest.update(chunk)
            if not is_finite(bits, form):
                raise AdapterInvalid(f"{name} holds values that are infinite or not a number")
            zero |= bits == 0
            largest = max(largest, magnitude(bits, form))
        if zero:
            silent.append(pair[1])
    if silent:
        whole = (
            "the adapter contributes nothing" if len(silent) == len(tensors) else "these contribute nothing"
        )
        warnings.append(f"all values of A or B are zero: {whole} ({_some(silent)})")
    return digest.result(), largest


def _idle_patterns(key: str, entries: list[str], names: Names, matcher: Matcher) -> list[str]:
    """Notes on `rank_pattern` or `alpha_pattern` entries that decided nothing."""
    notes = []
    for entry in entries:
        hidden = any(matcher.ends_path(entry, path, key) for path in names.paths.values())
        why = "an earlier entry matches first" if hidden else "it matches no adapted module"
        notes.append(f"{key} {entry!r} changes nothing: {why}")
    return notes


def _ambiguous_patterns(key: str, patterns: Mapping[str, float], names: Names, matcher: Matcher) -> list[str]:
    """A note if entries of different value match one module: their order, which PEFT changes, decides."""
    for _, path in sorted(names.paths.items()):
        values = {patterns[entry] for entry in patterns if matcher.ends_path(entry, path, key)}
        if len(values) > 1:
            return [
                f"{key}: several entries match {path}; as in PEFT the first in the file counts, "
                "and PEFT sorts them when it saves"
            ]
    return []


def _unmatched(config: PeftConfig, names: Names, base: BaseModel, matcher: Matcher) -> list[str]:
    """Notes on modules that the config adapts and the file has nothing for: they stay as the base has
    them."""
    missing, wanted = [], 0
    notes = []
    for layer in range(base.num_layers):
        for module in range(len(MODULES)):
            path = module_path(layer, module, bare=names.bare)
            if config.targets(path, matcher):
                wanted += 1
                if (layer, module) not in names.paths:
                    missing.append(path)
    if missing:
        have = wanted - len(missing)
        notes.append(f"of {wanted} linears the config adapts, the file has {have}; without: {_some(missing)}")
    idle = config.idle_targets(
        module_path(layer, module, bare=names.bare)
        for layer in range(base.num_layers)
        for module in range(len(MODULES))
    )
    if idle:
        notes.append(f"target_modules names what the base's layers do not have: {_some(idle)}")
    return notes


def _other_base(config: PeftConfig, base: BaseModel) -> list[str]:
    """A note on another base's name."""
    if config.base_name:
        own = {Path(base.name).name.lower(), Path(base.folder or base.name).name.lower()}
        if Path(config.base_name).name.lower() not in own:
            named = config.base_name[:200]
            return [f"a different base is named in the config: {named!r}; served is {base.name!r}"]
    return []


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
