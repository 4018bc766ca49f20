"""What a refusal looks like over HTTP."""

from __future__ import annotations

import httpx


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """The message of an answer that must be this error."""
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    message: str = answer.json()["error"]["message"]
    return message
