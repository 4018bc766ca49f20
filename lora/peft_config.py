"""Reads `adapter_config.json` with the meaning PEFT 0.21 gives it; what cannot be served exactly is refused
by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from .errors import AdapterInvalid
from .patterns import Matcher, names, trailing_parts

_REFUSED = {
    "use_dora": "DoRA changes the base's own weights and is not served",
    "modules_to_save": "fully trained modules are not served",
    "trainable_token_indices": "trained token rows of the embedding are not served",
    "layer_replication": "a base with repeated layers is not served",
    "lora_bias": "LoRA with a bias is not served",
    "target_parameters": "LoRA on bare parameters is not served",
    "use_qalora": "QALoRA pools its inputs and is not served",
    "alora_invocation_tokens": "Activated LoRA switches on inside a prompt and is not served",
    "arrow_config": "Arrow routing is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "kasa_config": "KaSA changes the base's own weights and is not served",
    "monteclora_config": "MonteCLoRA samples its weights and is not served",
    "velora_config": "VeLoRA is not served",
    "megatron_config": "Megatron's parallel layers are not served",
}
"""Keys that change what an adapter computes, refused when they are on."""

_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Keys about training, or that act only together with one that is refused (or with a refused
`init_lora_weights`)."""

_READ = {
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora",
}  # fmt: skip

_INIT_KEEPS_BASE = {"gaussian", "eva", "orthogonal", "mica"}
_INIT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_DEFAULT_TARGETS = ["q_proj", "v_proj"]
"""What PEFT adapts in the LLaMA family when `target_modules` is null."""


@dataclass(kw_only=True)
class PeftConfig:
    """What of `adapter_config.json` decides the numbers."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    use_rslora: bool
    target_modules: str | list[str]
    exclude_modules: str | list[str]
    layers: list[int] | None
    """None: all."""
    layers_pattern: list[str]
    base_name: str | None
    warnings: list[str]
    modules_to_save: list[str]
    """Not empty: to be refused, once the tensors are known that belong to it."""

    _targets: frozenset[str] = field(init=False)
    _excluded: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._targets = (
            frozenset() if isinstance(self.target_modules, str) else frozenset(self.target_modules)
        )
        self._excluded = (
            frozenset() if isinstance(self.exclude_modules, str) else frozenset(self.exclude_modules)
        )

    def excludes(self, path: str, matcher: Matcher) -> bool:
        """Whether `exclude_modules` takes the module at `path` out."""
        if isinstance(self.exclude_modules, str):
            return bool(self.exclude_modules) and matcher.fullmatch(
                self.exclude_modules, path, "exclude_modules"
            )
        return names(self._excluded, path)

    def targets(self, path: str, matcher: Matcher) -> bool:
        """Whether PEFT puts an adapter on the linear at `path` (a path inside the base, one of its
        projections)."""
        if self.excludes(path, matcher):
            return False
        if isinstance(self.target_modules, str):
            return self.all_linear or matcher.fullmatch(self.target_modules, path, "target_modules")
        if path in self._targets:
            return True
        if not names(self._targets, path):
            return False
        return self.layers is None or matcher.layer_index(self.layers_pattern, path) in self.layers

    def idle_targets(self, paths: Iterable[str]) -> list[str]:
        """Entries of the list `target_modules` that name none of `paths`."""
        known = {part for path in paths for part in trailing_parts(path)}
        return sorted(self._targets - known)

    @property
    def all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def rank_at(self, path: str, matcher: Matcher) -> tuple[int, str | None]:
        """The rank of the module at `path`, and the `rank_pattern` key it comes from."""
        key = _pattern_key(self.rank_pattern, path, matcher, "rank_pattern")
        return (self.rank, None) if key is None else (self.rank_pattern[key], key)

    def scale_at(self, path: str, matcher: Matcher) -> tuple[float, str | None]:
        """The factor on B @ A at `path` (float64), and the `alpha_pattern` key its alpha comes from."""
        key = _pattern_key(self.alpha_pattern, path, matcher, "alpha_pattern")
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank, _ = self.rank_at(path, matcher)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank), key


def _pattern_key(pattern: dict[str, Any], path: str, matcher: Matcher, key: str) -> str | None:
    """The first entry that matches wins."""
    return next((entry for entry in pattern if matcher.ends_path(entry, path, key)), None)


def parse(text: bytes) -> PeftConfig:
    """Raises AdapterInvalid naming the key."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterInvalid("adapter_config.json is not JSON") from None
    if not isinstance(config, dict):
        raise AdapterInvalid("adapter_config.json is not a JSON object")
    _refuse(config)
    notes: list[str] = []
    if config.get("fan_in_fan_out"):
        notes.append("fan_in_fan_out is set and, as in PEFT, has no effect on the base's linears")
    if _bias(config) != "none":
        notes.append(f"bias is {config['bias']!r} but the file holds no biases: there is nothing to apply")
    if "lora_alpha" not in config:
        notes.append("lora_alpha is not given: PEFT's default, 8, is used")
    targets = _modules(config, "target_modules")
    layers = _layers(config)
    layers_pattern = _texts(config, "layers_pattern")
    if isinstance(targets, str) and layers is not None:
        raise AdapterInvalid("layers_to_transform cannot be used when target_modules is a text")
    if layers_pattern and layers is None:
        raise AdapterInvalid("layers_pattern is given without layers_to_transform")
    base_name = config.get("base_model_name_or_path")
    return PeftConfig(
        rank=_rank(config.get("r", 8), "r"),
        alpha=_number(config.get("lora_alpha", 8), "lora_alpha"),
        rank_pattern={
            k: _rank(v, f"rank_pattern {k!r}") for k, v in _mapping(config, "rank_pattern").items()
        },
        alpha_pattern={
            k: _number(v, f"alpha_pattern {k!r}") for k, v in _mapping(config, "alpha_pattern").items()
        },
        use_rslora=_flag(config, "use_rslora"),
        target_modules=list(_DEFAULT_TARGETS) if targets is None else targets,
        exclude_modules=_modules(config, "exclude_modules") or [],
        layers=layers,
        layers_pattern=layers_pattern,
        base_name=base_name if isinstance(base_name, str) else None,
        warnings=notes,
        modules_to_save=_texts(config, "modules_to_save"),
    )


def _refuse(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterInvalid(f"peft_type is {_show(kind)}: only LORA is served")
    for key, value in config.items():
        if key == "modules_to_save" or not value:
            continue
        if key in _REFUSED:
            raise AdapterInvalid(f"{key}: {_REFUSED[key]}")
        if key not in _READ and key not in _WITHOUT_EFFECT:
            raise AdapterInvalid(
                f"{key} = {_show(value)}: this key is not known, so its effect cannot be served"
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str):
        if init.lower().startswith(_INIT_CHANGES_BASE):
            raise AdapterInvalid(
                f"init_lora_weights {init!r} trains against a changed base; save the adapter with PEFT's "
                "path_initial_model_for_weight_conversion to make it a plain LoRA"
            )
        if init.lower() not in _INIT_KEEPS_BASE:
            raise AdapterInvalid(f"init_lora_weights {_show(init)} is not known")
    elif init is not None and not isinstance(init, bool):
        raise AdapterInvalid(f"init_lora_weights {_show(init)} is not known")


def _bias(config: dict[str, Any]) -> str:
    bias = config.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise AdapterInvalid(f"bias {_show(bias)} is not one of none, all, lora_only")
    return cast(str, bias)


def _rank(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterInvalid(f"{key} is {_show(value)}: a rank is a whole number from 1")
    return value


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterInvalid(f"{key} is {_show(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterInvalid(f"{key} is {_show(value)}, not a finite number")
    return number


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise AdapterInvalid(f"{key} is {_show(value)}, not true or false")
    return value


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{key} is {_show(value)}, not a map")
    return value


def _texts(config: dict[str, Any], key: str) -> list[str]:
    """A list of texts; one text counts as a list of one."""
    value = config.get(key) or []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise AdapterInvalid(f"{key} is {_show(value)}, not a list of texts")
    return value


def _modules(config: dict[str, Any], key: str) -> str | list[str] | None:
    """A text stays one (a regular expression); null is None."""
    value = config.get(key)
    if value is None or isinstance(value, str):
        return value
    return _texts(config, key)


def _layers(config: dict[str, Any]) -> list[int] | None:
    value = config.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in layers):
        raise AdapterInvalid(f"layers_to_transform is {_show(value)}, not a layer or a list of layers")
    return layers


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "…"
