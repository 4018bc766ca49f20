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


def refuse_unenforced(schema: Mapping[str, Any]) -> str | None:
    """The first keyword in `schema`, at any depth, that means something and would not be enforced."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        for word in UNENFORCED & one.keys():
            return word
        for word in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(one.get(word), bool):  # Draft 4's, which says how to read `minimum`
                return word
        for word in MAPS:
            held = one.get(word)
            waiting += held.values() if isinstance(held, Mapping) else ()
        for word in LISTS:
            held = one.get(word)
            waiting += held if isinstance(held, list) else ()
        waiting += (one[word] for word in SINGLE if word in one)
    return None
