"""The access log: one line a call, with the id of the request and never its texts or keys."""

from __future__ import annotations

from typing import Any

import structlog

from ..core import logs
from .http import calls
from .http.calls import Call

logger = structlog.get_logger(__name__)

PATH_CHARACTERS = 512
"""Of a path, at most."""


def configure(level: str) -> None:
    """Set up the logging of this process. What is logged for a call has its request's id."""
    logs.configure(level, _of_call)


def _of_call() -> dict[str, Any]:
    call = calls.current()
    return {} if call is None else {"request_id": call.request_id}


def log_call(call: Call, *, quiet: bool) -> None:
    """The line of a call that is over; `quiet`: at level debug."""
    calls.begin(call)
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
    log = logger.debug if quiet else logger.info
    log("call", **fields)
