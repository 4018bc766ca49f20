"""The access log: one line a call, with the id of the request and never its texts or keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from ..core import logs
from .http import calls
from .http.calls import Call

logger = structlog.get_logger(__name__)

PATH_CHARACTERS = 512
"""Of a path, at most."""


_lines: logs.JsonLines | None = None
"""None: nobody has configured it, or lines are for people."""


def configure(level: str) -> None:
    """Set up the logging of this process. What is logged for a call has its request's id."""
    global _lines
    _lines = logs.configure(level, _of_call)


def _of_call() -> dict[str, Any]:
    call = calls.current()
    return {} if call is None else {"request_id": call.request_id}


def log_calls(over: Sequence[tuple[str, Call]]) -> None:
    """The lines of calls that are over, each at its level."""
    if (lines := _lines) is not None:
        lines.write(
            (level, {**_fields(call), "event": "call", "request_id": call.request_id})
            for level, call in over
            if lines.writes(level)
        )
        return
    for level, call in over:
        calls.begin(call)
        getattr(logger, level)("call", **_fields(call))


def _fields(call: Call) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": call.method,
        "path": call.path[:PATH_CHARACTERS],
        "status": call.status,
        "duration": round(call.seconds, 4),
    }
    if call.code is not None:
        fields["code"] = call.code
    if call.tenant is not None:
        fields["tenant"] = call.tenant
    if call.left:
        fields["aborted"] = True
    if (generated := call.generated) is not None:
        fields["model"] = generated.model
        if generated.adapter is not None:
            fields["adapter"] = generated.adapter
        fields["prompt_tokens"] = generated.prompt_tokens
        fields["completion_tokens"] = generated.completion_tokens
        fields["cached_tokens"] = generated.cached_tokens
        if generated.first_token_after is not None:
            fields["ttft"] = round(generated.first_token_after, 4)
    return fields
