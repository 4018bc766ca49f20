"""What can go wrong with an engine as its user sees it. Control code: no torch."""

from __future__ import annotations

from .messages import EngineError


class EngineFailure(RuntimeError):
    """The engine refused a request or a call, or failed while at it; `error` has the stable code."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.error = error


class RequestRefused(EngineFailure, ValueError):
    """The request itself is wrong, or can never fit: the same again is refused again."""


WRONG_REQUEST = frozenset({"invalid_request", "context_length_exceeded", "capacity_exceeded"})
"""Codes of `RequestRefused`."""


def failure_of(error: EngineError) -> EngineFailure:
    """The exception that an error is to a Python caller."""
    return (RequestRefused if error.code in WRONG_REQUEST else EngineFailure)(error)


class EngineStartError(RuntimeError):
    """The engine cannot start with these settings on this machine; the message is for the user."""
