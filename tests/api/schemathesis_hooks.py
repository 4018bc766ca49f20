"""What schemathesis cannot know: names that exist, so that calls get past "not found"."""

from __future__ import annotations

from typing import Any

import schemathesis

KNOWN: dict[str, list[str]] = {
    "name": ["one", "one@1", "two"],
    "tenant": ["public", "someone"],
    "model": ["tiny", "one"],
    "adapter": ["one", "two"],
    "source": ["one", "five"],
    "lora_name": ["one", "two"],
    "lora_path": ["one", "five"],
}


def known(fields: dict[str, Any]) -> dict[str, Any]:
    """Half of the texts become a name that exists, by what was generated, so that runs repeat."""
    result = dict(fields)
    for name, values in KNOWN.items():
        text = fields.get(name)
        if isinstance(text, str) and len(text) % 2 == 0:
            result[name] = values[len(text) // 2 % len(values)]
    return result


@schemathesis.hook
def map_path_parameters(_: schemathesis.HookContext, path_parameters: dict[str, Any]) -> dict[str, Any]:
    return known(path_parameters) if path_parameters else path_parameters


@schemathesis.hook
def map_body(_: schemathesis.HookContext, body: Any) -> Any:
    return known(body) if isinstance(body, dict) else body
