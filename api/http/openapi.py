"""What handlers say of themselves for the OpenAPI document: bodies, answers and errors as the types they really use.

Bodies are read by hand, within limits, so a handler's signature cannot say what it takes; `documented(…)` beside it
does. What the signature, the route and the error table know already is not said again.
"""

from __future__ import annotations

from typing import Any

import msgspec

KEY = "operation"
"""Under which a handler's `opt` holds its `Operation`."""


class Text(msgspec.Struct, frozen=True):
    """An answer that is no JSON."""

    media_type: str = "text/plain"


class AnyObject(msgspec.Struct, frozen=True):
    """An answer that is some JSON object, of which others say what it holds."""


Answer = type[msgspec.Struct] | Text | AnyObject | None
"""A struct as JSON, a text, an object, or no content."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One handler."""

    answers: dict[int, Answer]
    """By status; errors are not among them."""
    body: type[msgspec.Struct] | None = None
    body_optional: bool = False
    """No body at all means all defaults."""
    upload: type[msgspec.Struct] | None = None
    """What a multipart body holds, where one is taken as well: its text and file parts."""
    events: type[msgspec.Struct] | None = None
    """What a stream's events hold, where the answer may be one."""
    query: dict[str, type] = {}
    errors: tuple[str, ...] = ()
    """Codes, besides those that every call, and every call with a body or a query, can end with."""


def documented(
    answers: dict[int, Answer],
    *,
    body: type[msgspec.Struct] | None = None,
    body_optional: bool = False,
    upload: type[msgspec.Struct] | None = None,
    events: type[msgspec.Struct] | None = None,
    query: dict[str, type] | None = None,
    errors: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A handler's `opt`."""
    operation = Operation(
        answers=answers,
        body=body,
        body_optional=body_optional,
        upload=upload,
        events=events,
        query=query or {},
        errors=errors,
    )
    return {KEY: operation}
