"""The client's side of one call: its body, read within limits, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar, cast

import msgspec
from litestar import Request
from litestar.types import HTTPReceiveMessage, Scope

from .. import turns
from ..errors import ApiError, ClientGone, invalid, no_json, wrong_value
from .json_shape import shape_in_thread
from .presence import PRESENCE, Presence

T = TypeVar("T")

LARGE_BODY = 100_000
"""Bytes; smaller ones are read in a moment whatever is in them."""
MOST_CONTAINERS, MOST_VALUES = 50_000, 500_000
"""Of a body: lists and objects, and all values together. That many are read in some twenty milliseconds."""

AnyRequest = Request[Any, Any, Any]


async def body_chunks(request: AnyRequest, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes in. Raises `body_too_large` as soon as more than `limit` bytes are announced or
    sent.
    """
    refuse_announced(request, limit)
    received, more = 0, True
    while more:
        body, more = await _next_part(request)
        received += len(body)
        if received > limit:
            raise _too_large(limit)
        if body:
            yield body


def refuse_announced(request: AnyRequest, limit: int) -> None:
    """Raises `body_too_large` where the call's headers already say so, `invalid_request` for a body in an encoding."""
    for name, value in request.scope["headers"]:
        if name == b"content-length" and int(value) > limit:  # a number: else it were no HTTP
            raise _too_large(limit)
        if name == b"content-encoding" and value.lower() != b"identity":
            raise invalid(
                f"bodies in Content-Encoding {value.decode('latin-1')[:80]!r} are not read, only plain ones"
            )


async def _next_part(request: AnyRequest) -> tuple[bytes, bool]:
    """What came of the body, and whether more is to come."""
    message = cast(HTTPReceiveMessage, await request.receive())
    if message["type"] != "http.request":
        raise ClientGone
    return message["body"], message.get("more_body", False)


async def read_json(request: AnyRequest, body_type: type[T], limit: int) -> T:
    """The whole body as a `body_type`; a 400 that names the field where it is not one."""
    body = await _whole_body(request, limit)
    if len(body) > LARGE_BODY:
        await _turn_to_read(body)
    return decode(body, body_type)


async def read_optional_json(request: AnyRequest, body_type: type[T], limit: int) -> T:
    """As `read_json`; no body at all means all defaults."""
    body = await _whole_body(request, limit) or b"{}"
    if len(body) > LARGE_BODY:
        await _turn_to_read(body)
    return decode(body, body_type)


async def _turn_to_read(body: bytes) -> None:
    """Raises `invalid_request` where reading it would keep the event loop from everything else for long."""
    found = await shape_in_thread(body)
    for count, most, what in (
        (found.containers, MOST_CONTAINERS, "lists and objects"),
        (found.values, MOST_VALUES, "values"),
    ):
        if count > most:
            raise invalid(f"the body holds {count} {what}, and at most {most} are read")
    await turns.enter()


async def _whole_body(request: AnyRequest, limit: int) -> bytes:
    refuse_announced(request, limit)
    body, more = await _next_part(request)
    if more or len(body) > limit:
        parts, size = [body], len(body)
        while more and size <= limit:
            body, more = await _next_part(request)
            parts.append(body)
            size += len(body)
        if size > limit:
            raise _too_large(limit)
        if size > LARGE_BODY:
            await turns.enter()  # it is copied once more
        body = b"".join(parts)
    return body


def decode(body: bytes, body_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise wrong_value(error) from error
    except msgspec.DecodeError as error:
        raise no_json(error, body) from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


async def while_connected(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` when the client goes away first.

    The connection calls back. A task that waits for `http.disconnect`, as ASGI has it, would be a tenth of a short
    request's cost.
    """
    task, client = asyncio.current_task(), cast(Presence, scope[PRESENCE])  # type: ignore[literal-required]
    assert task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = task.cancel()

    if client.lost:
        work.close()
        raise ClientGone
    client.when_lost = leave
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # else somebody else cancelled it as well
            raise ClientGone from None
        raise
    finally:
        client.when_lost = None


def until(deadline: float | None) -> AbstractAsyncContextManager[object]:
    """A timeout at `deadline` (loop time), where there is one: without, it would cost a request as much as its
    routing."""
    return _NO_DEADLINE if deadline is None else asyncio.timeout_at(deadline)


_NO_DEADLINE: AbstractAsyncContextManager[object] = nullcontext()


def _too_large(limit: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than the {limit} bytes allowed here")
