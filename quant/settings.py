"""What a GPTQ or AWQ checkpoint says about itself: found in either of two files, checked, refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ..kernels.packed_weight import BLOCK
from .base import QuantError

CONFIG = "config.json"
"""Has the settings under `quantization_config`."""

SIDE_FILES: Mapping[str, Literal["gptq", "awq"]] = MappingProxyType(
    {"quantize_config.json": "gptq", "quant_config.json": "awq"}
)
"""Files of settings alone that older tools write, and whose form it is where they do not say."""

OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size", "format": "checkpoint_format"}
"""Older and newer spellings of keys."""

READING_KEYS = (
    "quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "version", "zero_point",
    "lm_head", "dynamic", "modules_to_not_convert", "modules_in_block_to_quantize",
)  # fmt: skip
"""The keys that decide how tensors are read: where two files have one, it must be the same."""

NOT_SERVED = {
    "dynamic": "settings of its own for some modules",
    "rotation": "rotated weights",
    "adapter": "a correction adapter",
    "is_marlin_format": "the Marlin layout",
    "extra_config": "settings of its own for some modules",
}
"""Keys that change what tensors mean, or which exist, and how a refusal explains each."""


@dataclass(frozen=True)
class Exceptions:
    """Which linears of a quantised checkpoint are float, in the opinion of its settings."""

    key: str
    """The setting that has it."""
    may_be_float: Callable[[str], bool]
    """Whether the linear of that name is left in float, as the most generous tool would read the setting."""
    must_be_float: Callable[[str], bool] = lambda name: False
    """As the strictest would."""


@dataclass(frozen=True)
class PackedSettings:
    """How the packed linears of one checkpoint are to be read."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int
    """-1: all of a row is one group."""
    source: str
    """The file or files that say so."""
    act_order: bool | None = None
    """GPTQ: whether rows may be in any order of groups. None: the files do not say."""
    symmetric: bool = False
    """GPTQ: every zero is the middle of the range."""
    zero_offset: int = 0
    """GPTQ: what is added to a stored zero (1 in the original format, 0 in gptq_v2)."""
    zero_point: bool = True
    """AWQ: zeros are stored."""
    head: bool | None = None
    """Whether lm_head is packed too. None: the files do not say."""
    left: tuple[str, ...] = field(default=())
    """AWQ: modules (parts of names) left in float."""
    only: tuple[str, ...] = field(default=())
    """GPTQ: if any, the modules (ends of names) that are packed; all others are float."""

    def describe(self) -> str:
        """In words, for reasons and refusals."""
        groups = "one group a row" if self.group_size == -1 else f"groups of {self.group_size}"
        order = ", act-order" if self.act_order else ""
        return f"{self.method.upper()}, {self.bits} bit, {groups}{order} ({self.source})"

    @property
    def exceptions(self) -> Exceptions:
        if self.method == "gptq":
            return Exceptions("modules_in_block_to_quantize", self._not_among, self._not_among)
        return Exceptions(
            "modules_to_not_convert",
            lambda name: any(module in name for module in self.left),  # as AutoAWQ compares
            lambda name: any(covers(module, name) for module in self.left),
        )

    def _not_among(self, name: str) -> bool:
        return bool(self.only) and not any(f".{name}".endswith(f".{module}") for module in self.only)


def combine(
    config: Mapping[str, Any] | None, side_files: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | None, str]:
    """The settings of config.json and of side files as one, and where they came from; None where there are
    none.

    Raises QuantError where two of them disagree on how tensors are read.
    """
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    used = []
    sources: list[tuple[str, Mapping[str, Any]]] = list(side_files.items())
    if config is not None:
        sources.insert(0, (CONFIG, config))
    for file, raw in sources:
        settings = [(OTHER_NAMES.get(key, key), value) for key, value in raw.items() if value is not None]
        if file in SIDE_FILES and raw.get("quant_method") is None:
            settings.append(("quant_method", SIDE_FILES[file]))
        for key, value in settings:
            if key in READING_KEYS and key in found and not _same(value, found[key]):
                raise QuantError(
                    f"{origin[key]} and {file} disagree: "
                    f"{key} is {found[key]!r} in the one and {value!r} in the other"
                )
            found.setdefault(key, value)
            origin.setdefault(key, file)
        used.append(file)
    return (found, " and ".join(used)) if used else (None, "")


def parse(settings: Mapping[str, Any], source: str) -> PackedSettings:
    """Settings that say GPTQ or AWQ. Raises QuantError, naming the key, for what cannot be read exactly."""
    method: Literal["gptq", "awq"] = "gptq" if settings["quant_method"] == "gptq" else "awq"
    for key, meaning in NOT_SERVED.items():
        if settings.get(key):
            raise QuantError(f"{source}: {key} ({meaning}) is not supported")
    bits = settings.get("bits")
    served = (4, 8) if method == "gptq" else (4,)
    if type(bits) is not int or bits not in served:
        raise QuantError(
            f"{source}: bits {bits!r} is not supported for {method.upper()}, "
            f"only {' and '.join(map(str, served))}"
        )
    group_size = settings.get("group_size")
    if type(group_size) is not int or (group_size != -1 and (group_size < BLOCK or group_size % BLOCK)):
        raise QuantError(
            f"{source}: group_size {group_size!r} is not supported, only -1 and multiples of {BLOCK}"
        )
    if method == "awq":
        return _awq(settings, source, group_size)
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise QuantError(
            f"{source}: checkpoint_format {layout!r} is not supported, only 'gptq' and 'gptq_v2'"
        )
    if settings.get("pack_dtype", "int32") != "int32":
        raise QuantError(f"{source}: pack_dtype {settings['pack_dtype']!r} is not supported, only 'int32'")
    return PackedSettings(
        method="gptq",
        bits=bits,
        group_size=group_size,
        source=source,
        act_order=_flag(settings, "desc_act", source),
        symmetric=bool(_flag(settings, "sym", source)),
        zero_offset=1 if layout == "gptq" else 0,
        head=_flag(settings, "lm_head", source),
        only=tuple(module_names(settings, "modules_in_block_to_quantize", source)),
    )


def _awq(settings: Mapping[str, Any], source: str, group_size: int) -> PackedSettings:
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise QuantError(f"{source}: AWQ version {version!r} is not supported, only 'gemm'")
    zero_point = _flag(settings, "zero_point", source)
    return PackedSettings(
        method="awq",
        bits=4,
        group_size=group_size,
        source=source,
        zero_point=zero_point is not False,
        head=_flag(settings, "lm_head", source),
        left=tuple(module_names(settings, "modules_to_not_convert", source)),
    )


def _flag(settings: Mapping[str, Any], key: str, source: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise QuantError(f"{source}: {key} must be true or false, got {value!r}")
    return value


def module_names(settings: Mapping[str, Any], key: str, source: str) -> list[str]:
    """A list of module names; lists in it (the modules of one stage) are joined."""
    value = settings.get(key) or []
    names: list[str] = []
    for entry in value if isinstance(value, list) else [value]:
        names += entry if isinstance(entry, list) else [entry]
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in names):
        raise QuantError(f"{source}: {key} must be a list of module names, got {value!r}")
    return names


def covers(module: str, name: str) -> bool:
    """Whether an entry of a list of modules (a name, or a part of one) means `name` or a parent of it."""
    return f".{module}." in f".{name}."


def _same(left: Any, right: Any) -> bool:
    """Whether two files say the same; versions are compared as their tools do, without case."""
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right)
