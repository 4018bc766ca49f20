"""The words of JSON schemas that would be passed over in silence. Control code: no torch.

llguidance refuses by name the keywords of Draft 2020-12 that it does not enforce. This adds those of older drafts,
and its own settings, which are the server's. Words that no draft knows are annotations, as the standard has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

UNENFORCED = frozenset({"additionalItems", "extends", "disallow", "divisibleBy", "x-guidance"})
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties")
VALUES = ("const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
EXACT, DIGITS = 1 << 53, 15
"""llguidance reads numbers as float64 and writes them with some 16 digits: integers of at most so much, and so many
digits of others, are surely kept."""
LAST_INTEGER = 2**63 - 1
"""What schemas of 64-bit integers have as `maximum`; llguidance's integers end there too."""
_NUL = re.compile(r"\x00 | \\(?: 0 | x00 | u0000 | [xu]\{0+\} )", re.VERBOSE)
"""In a pattern, itself or escaped."""


def unenforced(schema: Mapping[str, Any]) -> str | None:
    """Of the first keyword in `schema`, at any depth, that means something and would not be enforced: what it is, and
    that it is not supported."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        for word in UNENFORCED & one.keys():
            return f"the schema's keyword {word!r} is not supported"
        for word in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(one.get(word), bool):  # Draft 4's, which says how to read `minimum`
                return f"the schema's keyword {word!r} is not supported where it is true or false"
        if (fault := _changed(one)) is not None:
            return fault
        if (most := _sure_properties(one)) < _number(one.get("minProperties")):
            return f"the schema's keyword 'minProperties' is not supported above {most} here: a name may come twice"
        for word in MAPS:
            held = one.get(word)
            waiting += held.values() if isinstance(held, Mapping) else ()
        for word in LISTS:
            held = one.get(word)
            waiting += held if isinstance(held, list) else ()
        waiting += (one[word] for word in SINGLE if word in one)
    return None


def _changed(schema: Mapping[str, Any]) -> str | None:
    """Of the first value in a schema's own keywords that would become another one."""
    for word in VALUES:
        for value in _scalars(schema.get(word)):
            if isinstance(value, str) and "\0" in value:
                return f"the schema's keyword {word!r} is not supported for texts with NUL"
            if not _is_kept(value):
                return f"the schema's keyword {word!r} is not supported for numbers of so many digits"
    for word in BOUNDS:
        bound = schema.get(word)
        if not _is_kept(bound) and (word, bound) != ("maximum", LAST_INTEGER):
            return f"the schema's keyword {word!r} is not supported for numbers of so many digits"
    if isinstance(pattern := schema.get("pattern"), str) and _NUL.search(pattern.replace("\\\\", "")):
        return "the schema's keyword 'pattern' is not supported for texts with NUL"
    return None


def _is_kept(value: object) -> bool:
    if isinstance(value, float):
        return abs(value) <= EXACT and float(f"{value:.{DIGITS}g}") == value
    return not isinstance(value, int) or abs(value) <= EXACT


def _scalars(value: Any) -> Iterator[Any]:
    """In a value, at any depth."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        else:
            yield one


def _sure_properties(schema: Mapping[str, Any]) -> int:
    """How many different names an object has at the least that has so many properties: further ones may all bear the
    same, which is none of the required ones."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return len({name for name in names if isinstance(name, str)}) + 1


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0
