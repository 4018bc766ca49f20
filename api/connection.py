"""The client's side of one call: its body, read within limits, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar, cast

import msgspec
from litestar import Request
from litestar.types import HTTPReceiveMessage, Receive

from .errors import ApiError, ClientGone, invalid, wrong_value

T = TypeVar("T")

AnyRequest = Request[Any, Any, Any]


async def body_chunks(request: AnyRequest, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes in. Raises `body_too_large` as soon as more than `limit` bytes are announced or
    sent.
    """
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    received, more = 0, True
    while more:
        message = cast(HTTPReceiveMessage, await request.receive())
        if message["type"] != "http.request":
            raise ClientGone
        received += len(message["body"])
        if received > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
        if message["body"]:
            yield message["body"]


async def read_json(request: AnyRequest, body_type: type[T], limit: int) -> T:
    """The whole body as a `body_type`; a 400 that names the field where it is not one."""
    body = b"".join([chunk async for chunk in body_chunks(request, limit)])
    return decode(body, body_type)


async def read_optional_json(request: AnyRequest, body_type: type[T], limit: int) -> T:
    """As `read_json`; no body at all means all defaults."""
    body = b"".join([chunk async for chunk in body_chunks(request, limit)])
    return decode(body or b"{}", body_type)


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

    The body must have been read: what comes after it is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than the {limit} bytes allowed here")
