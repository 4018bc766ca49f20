"""The JSON files of a model folder, read with errors that name file and key. Control code: no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec


class ModelError(ValueError):
    """A base model cannot be served; the message is for the user and names the file, key or tensor."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; ModelError where it is not one."""
    try:
        values = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return values


class Keys:
    """An object of a JSON file, read key by key; errors name file and key. null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, null included."""
        return self.values.get(key, default)

    def require(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise ModelError(f"{self.where}: the key {key} is missing")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        value = self.require(key)
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.where}: {key} must be a positive integer, got {value!r}")
        return value

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
        default: float | None = None,
    ) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} must be a finite number, got {value!r}")
        if above is not None and not value > above:
            raise ModelError(f"{self.where}: {key} must be above {above:g}, got {value!r}")
        if at_least is not None and not value >= at_least:
            raise ModelError(f"{self.where}: {key} must be at least {at_least:g}, got {value!r}")
        return float(value)
