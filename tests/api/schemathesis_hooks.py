"""What schemathesis cannot know: names that exist, so that calls get past "not found", and that a dry run creates
nothing."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import ensure_resource_availability

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


@schemathesis.check
def what_was_created_is_there(ctx: Any, response: Any, case: Any) -> bool | None:
    """`ensure_resource_availability`, which takes whatever answers a POST with success for a creation, dry runs too."""
    parent = ctx.internals.find_parent(case_id=case.id)
    if parent is not None and str((parent.query or {}).get("dry_run")).lower() in ("true", "1"):
        answered = ctx.internals.find_response(case_id=parent.id)
        assert answered is None or answered.status_code != 201, "a dry run is answered as a creation"
        return None
    return ensure_resource_availability(ctx, response, case)
