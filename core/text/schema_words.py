"""The words of JSON schemas that would be passed over in silence. Control code: no torch.

llguidance refuses by name the keywords of Draft 2020-12 that it does not enforce. This adds those of older drafts,
and its own settings, which are the server's. Words that no draft knows are annotations, as the standard has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNENFORCED = frozenset({"additionalItems", "extends", "disallow", "divisibleBy", "x-guidance"})
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties")


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


def _sure_properties(schema: Mapping[str, Any]) -> int:
    """How many different names an object has at the least that has so many properties: further ones may all bear the
    same, which is none of the required ones."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return len({name for name in names if isinstance(name, str)}) + 1


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0
