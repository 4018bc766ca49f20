"""Every error an HTTP call can end with: its code, its status, its body."""

from __future__ import annotations

import json
import math
import re

import msgspec

STATUS = {
    "invalid_request": 400,
    "adapter_invalid": 400,
    "context_length_exceeded": 400,
    "capacity_exceeded": 400,
    "invalid_api_key": 401,
    "permission_denied": 403,
    "model_not_found": 404,
    "adapter_not_found": 404,
    "tenant_not_found": 404,
    "adapter_exists": 409,
    "adapter_in_use": 409,
    "tenant_exists": 409,
    "pin_limit": 409,
    "body_too_large": 413,
    "rate_limit_exceeded": 429,
    "internal_error": 500,
    "overloaded": 503,
    "shutting_down": 503,
    "adapter_cold": 503,
    "adapter_failed": 503,
}
"""The stable codes and the status each is answered with."""

RETRY_AFTER = {"rate_limit_exceeded": 1, "overloaded": 1, "shutting_down": 5, "adapter_cold": 1}
"""Seconds a client should wait, where trying again makes sense."""

LONGEST_MESSAGE = 4000
"""Characters."""

SEARCHED_BYTES = 100_000
"""Of a body that is not JSON: in a longer one nobody looks for the field that is to blame."""

_PATH = re.compile(r" - at `\$\.?([A-Za-z0-9_]*)")
_MISSING = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]+)`")


class ApiError(Exception):
    """A call that is refused: a stable code, a message for the user, and the field that is to blame."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status or STATUS[code]
        self.retry_after = RETRY_AFTER.get(code) if retry_after is None else retry_after


class ClientGone(ApiError):
    """The client closed the connection; whatever is answered reaches nobody."""

    def __init__(self) -> None:
        super().__init__("invalid_request", "the client closed the connection", status=499)


class ErrorBody(msgspec.Struct):
    """OpenAI's error shape."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError("invalid_request", message, param)


def wrong_value(error: msgspec.ValidationError) -> ApiError:
    """A request's field has the wrong type or is missing; `param` names the outermost one."""
    found = _PATH.search(str(error)) or _MISSING.search(str(error))
    return invalid(str(error), (found and found[1]) or None)


def no_json(error: msgspec.DecodeError, body: bytes) -> ApiError:
    """A body that is not JSON. Where that is for a number that no float holds, `param` names its outermost field."""
    message = f"the body is not valid JSON: {error}"
    return invalid(message, _with_unheld_number(body) if len(body) <= SEARCHED_BYTES else None)


def _with_unheld_number(body: bytes) -> str | None:
    try:
        found = json.loads(body, parse_int=float, parse_float=float)
    except (ValueError, RecursionError):
        return None
    fields = found.items() if isinstance(found, dict) else ()
    return next((name for name, value in fields if not _is_finite(value)), None)


def _is_finite(value: object) -> bool:
    """All the numbers in it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def error_type(status: int) -> str:
    """OpenAI's `type` for a status."""
    known = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")


def envelope(error: ApiError) -> bytes:
    """The JSON body of an error. A message that repeats a name of thousands of characters is cut."""
    message = error.message
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE - 200]} … {message[-200:]}"
    body = ErrorBody(message, error_type(error.status), error.param, error.code)
    return msgspec.json.encode(ErrorEnvelope(body))


def headers(error: ApiError) -> dict[str, str]:
    result = {}
    if error.retry_after is not None:
        result["retry-after"] = str(error.retry_after)
    if error.status == 401:
        result["www-authenticate"] = "Bearer"
    return result
