"""The client's side of one call: its body, read within limits, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar, cast

import msgspec
from litestar import Request
from litestar.types import HTTPReceiveMessage, Receive

from ..errors import ApiError, ClientGone, invalid, wrong_value

T = TypeVar("T")

LARGE_BODY = 100_000
"""Bytes; smaller ones are read in a moment whatever is in them."""

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
    """Raises `body_too_large` where the call's headers already say so."""
    for name, value in request.scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)


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
        _refuse_many(body, body_type)
    return decode(body, body_type)


async def read_optional_json(request: AnyRequest, body_type: type[T], limit: int) -> T:
    """As `read_json`; no body at all means all defaults."""
    return decode(await _whole_body(request, limit) or b"{}", body_type)


def _refuse_many(body: bytes, body_type: type[object]) -> None:
    """Reading JSON keeps the event loop from everything else, and a list of a hundred thousand objects for long.

    Such a list is told by a key that each of them has: within texts its quotes are escaped.
    """
    for field, key, most in getattr(body_type, "MOST_OBJECTS", ()):
        if body.count(key) > most:
            raise invalid(f"{field}: at most {most}", field)


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
        body = b"".join(parts)
    return body


def decode(body: bytes, body_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise wrong_value(error) from error
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` when the client goes away first.

    The body must have been read: what comes after it is the disconnect. The work runs in this task and only the
    watch in one of its own: of a short request's cost two tasks and a wait for both are a tenth.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def leave(watch: asyncio.Future[None]) -> None:
        nonlocal gone
        if not watch.cancelled():
            gone = task.cancel()

    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # else somebody else cancelled it as well
            raise ClientGone from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()


def until(deadline: float | None) -> AbstractAsyncContextManager[object]:
    """A timeout at `deadline` (loop time), where there is one: without, it would cost a request as much as its
    routing."""
    return _NO_DEADLINE if deadline is None else asyncio.timeout_at(deadline)


_NO_DEADLINE: AbstractAsyncContextManager[object] = nullcontext()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than the {limit} bytes allowed here")
