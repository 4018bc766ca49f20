"""What can go wrong with an adapter, as exceptions whose messages are for the user."""

from __future__ import annotations

from typing import Literal

StoreCode = Literal[
    "invalid_request",
    "adapter_invalid",
    "adapter_exists",
    "adapter_not_found",
    "model_not_found",
    "tenant_not_found",
    "tenant_exists",
    "rate_limit_exceeded",
    "overloaded",
]


class AdapterInvalid(ValueError):
    """An adapter's files do not fit the base or are not understood exactly; the message names tensor or
    key."""


class AdapterCorrupt(RuntimeError):
    """A stored adapter no longer has the bytes it was stored with."""


class StoreError(Exception):
    """A call that the store refuses. `code` is one of the HTTP interface's codes, `param` the field at
    fault."""

    def __init__(self, code: StoreCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
