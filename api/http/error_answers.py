"""The one place where exceptions become answers."""

from __future__ import annotations

from typing import Any

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from ...core.errors import EngineFailure
from ...core.sampling_params import ParamError
from ...core.text.chat_template import ChatTemplateError
from ...lora.errors import AdapterCorrupt, AdapterInvalid, StoreError
from ..errors import STATUS, ApiError, ClientGone, envelope, headers, invalid
from . import calls
from .methods import allow

logger = structlog.get_logger(__name__)

UNTIL_REMOVED = 60
"""Seconds until a registration beyond what a tenant may hold is worth another try: it takes a removal, not time."""


def as_api_error(error: BaseException, where: str = "this path") -> ApiError:
    """Any exception as the answer it stands for; what nobody foresaw is `internal_error`, with its trace
    logged. The code is noted for the call this task works on.
    """
    refused = _translated(error, where)
    if (call := calls.current()) is not None and not isinstance(error, ClientGone):
        call.code = refused.code
    return refused


def _translated(error: BaseException, where: str) -> ApiError:
    match error:
        case ApiError():
            return error
        case EngineFailure():
            code = error.error.code if error.error.code in STATUS else "internal_error"
            return ApiError(code, error.error.message, error.error.param)
        case StoreError():
            wait = UNTIL_REMOVED if error.code == "rate_limit_exceeded" else None
            return ApiError(error.code, str(error), error.param, retry_after=wait)
        case AdapterCorrupt():
            return ApiError("adapter_failed", str(error))
        case AdapterInvalid():
            return ApiError("adapter_invalid", str(error))
        case ParamError():
            return invalid(str(error), error.param)
        case ChatTemplateError():
            return invalid(str(error), error.param)
        case TimeoutError():
            return ApiError(
                "overloaded", "the request took longer than this server allows (--request-timeout)"
            )
        case HTTPException():
            return _from_http(error, where)
    logger.error("unexpected error", exc_info=error)
    return ApiError("internal_error", "the server failed on this request; its log says why")


def _from_http(error: HTTPException, where: str) -> ApiError:
    """Litestar's own refusals: no such route, wrong method, a bad query."""
    if error.status_code == 413:
        return ApiError("body_too_large", error.detail)
    if error.status_code >= 500:
        logger.error("unexpected error", exc_info=error)
        return ApiError("internal_error", "the server failed on this request; its log says why")
    reasons = {404: f"there is nothing at {where}", 405: f"{where} is not allowed"}
    message = reasons.get(error.status_code, error.detail)
    return ApiError("invalid_request", message, status=error.status_code)


def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exception handler for everything."""
    refused = as_api_error(error, f"{request.method} {request.url.path}")
    extra = {}
    if isinstance(error, HTTPException) and error.headers:
        for name, value in error.headers.items():
            if name.lower() == "allow":
                extra["allow"] = allow(value.split(", "))
    return Response(
        envelope(refused),
        status_code=refused.status,
        headers=headers(refused) | extra,
        media_type="application/json",
    )
