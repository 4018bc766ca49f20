"""What a bitsandbytes checkpoint's settings say beside "8 bit": linears left in float, activations kept in float."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from .base import QuantError
from .settings import Exceptions, covers, module_names

SKIP, THRESHOLD = "llm_int8_skip_modules", "llm_int8_threshold"

DEFAULT_THRESHOLD = 6.0
"""bitsandbytes'."""


def outlier_threshold(settings: Mapping[str, Any], source: str) -> float:
    """The magnitude from which on an activation stays in float; 0: none does."""
    value = settings.get(THRESHOLD, DEFAULT_THRESHOLD)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise QuantError(f"{source}: {THRESHOLD} must be a number from 0 on, got {value!r}")
    return float(value)


def left_in_float(settings: Mapping[str, Any], source: str) -> Exceptions:
    """Which linears bitsandbytes did not quantise, as versions of transformers have read the setting.

    An entry was and is a module's name or that of its parent. At times it was also any whole part of the name; now it
    is a regular expression for the beginning of a name, up to the end of a part, or a name's ending.
    """
    entries = module_names(settings, SKIP, source)
    patterns = []
    for entry in entries:
        try:
            patterns.append(re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))"))
        except re.error as error:
            raise QuantError(f"{source}: {SKIP} holds no regular expression: {entry!r} ({error})") from error
    return Exceptions(
        SKIP,
        may_be_float=lambda name: (
            any(name.endswith(entry) or covers(entry, name) for entry in entries)
            or any(pattern.match(name) for pattern in patterns)
        ),
        must_be_float=lambda name: any(f"{name}.".startswith(f"{entry}.") for entry in entries),
    )
