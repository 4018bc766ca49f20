"""The access log: one line a call, with the id of the request and never its texts or keys."""

from __future__ import annotations

from typing import Any

import structlog

from ..core.logs import configure
from .http.calls import Call

__all__ = ["configure", "log_call"]

logger = structlog.get_logger(__name__)

PATH_CHARACTERS = 512
"""Of a path, at most."""


def log_call(call: Call, *, quiet: bool) -> None:
    """The line of a call that is over; `quiet`: at level debug. Its `request_id` is in the context."""
    fields: dict[str, Any] = {
        "method": call.method,
        "path": call.path[:PATH_CHARACTERS],
        "status": call.status,
        "code": call.code,
        "tenant": call.tenant,
        "aborted": True if call.left else None,
    }
    if (generated := call.generated) is not None:
        after = generated.first_token_after
        fields |= {
            "model": generated.model,
            "adapter": generated.adapter,
            "prompt_tokens": generated.prompt_tokens,
            "completion_tokens": generated.completion_tokens,
            "cached_tokens": generated.cached_tokens,
            "ttft": None if after is None else round(after, 4),
        }
    fields["duration"] = round(call.seconds, 4)
    log = logger.debug if quiet else logger.info
    log("call", **{name: value for name, value in fields.items() if value is not None})
