"""One request on a connection, and its response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from litestar.types import ASGIApp, HTTPScope, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import ApiError, envelope

if TYPE_CHECKING:
    from .protocol import HttpProtocol

EXCHANGE = "heddle.exchange"
"""In the scope of every call: its `Exchange`."""

BODY_PAUSE = 60.0
"""Seconds in which nothing of a body comes, after which it is given up."""
BODY_RATE = 1000
"""Bytes a second of a body; who is slower for longer than `BODY_PAUSE` is given up too."""

JSON = (b"content-type", b"application/json")

Headers = Iterable[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)


def exchange_of(scope: Scope | HTTPScope) -> Exchange:
    return cast(Exchange, scope[EXCHANGE])  # type: ignore[literal-required]


class Exchange:
    """What uvicorn's connection calls a cycle, without what its own has for other applications than this one.

    The head of the response goes out with the first piece of its body. Attributes without an underscore up to
    `response_complete` are those that the connection knows.
    """

    __slots__ = (
        "_announced",
        "_awaits_continue",
        "_chunked",
        "_connection",
        "_fault",
        "_head",
        "_received",
        "_waited",
        "body",
        "disconnected",
        "headers",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "scope",
        "status",
    )

    def __init__(
        self, connection: HttpProtocol, scope: HTTPScope, *, keep_alive: bool, awaits_continue: bool
    ) -> None:
        self.scope = scope
        self.body: bytes | bytearray = b""
        """What has come of the request's, and was not received yet."""
        self.more_body = True
        self.message_event = asyncio.Event()
        """There is something to `receive`."""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.response_complete = False
        self.headers: list[tuple[bytes, bytes]] = []
        """The response has these beside its own, whatever it will be."""
        self.status = 0
        """The response's; 0: there is none yet."""
        self._connection = connection
        self._awaits_continue = awaits_continue
        self._fault: ApiError | None = None
        """Why the request's body will never be whole."""
        self._received, self._waited = 0, 0.0
        """Bytes of the request's body, and seconds that were spent on waiting for them."""
        self._head = b""
        self._chunked = False
        self._announced: int | None = None
        """Bytes of the body that are to come; None: nobody said."""

    def drop(self) -> None:
        """It will never be run."""
        self.disconnected = True
        del self._connection, self.scope  # they refer to this

    async def run(self, app: ASGIApp) -> None:
        """Have it answered. What the application cannot answer is logged, and ends the connection."""
        connection = self._connection
        try:
            await app(cast(Scope, self.scope), self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                raise RuntimeError("the application has not finished its answer")
        except asyncio.CancelledError:  # the server does not wait for it any longer
            self._give_up(ApiError("shutting_down", "the server is shutting down"))
        except BaseException as error:
            logger.error("unexpected error", exc_info=error)
            self._give_up(ApiError("internal_error", "the server failed on this request; its log says why"))
        finally:
            connection.tasks.discard(cast(Any, asyncio.current_task()))
            del self._connection, self.scope  # they refer to this

    # ---------------------------------------------------------------- the request's body

    def take(self, piece: bytes) -> None:
        """A piece of it came."""
        self._received += len(piece)
        if not self.body:
            self.body = piece
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(
                    self.body
                )  # bytes are copied whole for every piece, and it may have one byte
            self.body += piece
        self.message_event.set()

    def break_off(self, fault: ApiError) -> None:
        """No more of the body is to come: who receives it hears why."""
        self._fault = fault
        self.message_event.set()

    # ---------------------------------------------------------------- ASGI

    async def receive(self) -> Any:
        """Raises what the body was broken off with."""
        connection = self._connection
        if self._awaits_continue and not self.status and not connection.transport.is_closing():
            connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._awaits_continue = False
        if not self.disconnected and not self.response_complete:
            connection.flow.resume_reading()
            await self._something()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        if self._fault is not None:
            raise self._fault
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}

    async def _something(self) -> None:
        """Wait until there is something to receive; of a body that pauses for very long there never is, nor of one that
        comes very slowly. The time in which nobody wanted it does not count."""
        if self.message_event.is_set():
            return
        if not self.more_body:
            await self.message_event.wait()
            return
        clock = self._connection.loop.time
        began, allowed = clock(), BODY_PAUSE + self._received / BODY_RATE - self._waited
        try:
            async with asyncio.timeout(min(BODY_PAUSE, allowed)):
                await self.message_event.wait()
            self._waited += clock() - began
        except TimeoutError:
            self.disconnected = True
            self._connection.close(linger=False)

    async def send(self, message: Message) -> None:
        await self.writable()
        if message["type"] == "http.response.start":
            self.begin(message["status"], message["headers"])
        elif message["type"] == "http.response.body":
            self.write(message["body"], last=not message["more_body"])

    # ---------------------------------------------------------------- the response

    async def writable(self) -> None:
        """Return when the client has taken most of what was written."""
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()

    def begin(self, status: int, headers: Headers) -> None:
        """Names of headers are in lower case. Without a length the body goes in chunks.

        Where the request's body is not whole, nobody is going to read the rest: the connection ends with the response.
        """
        assert not self.status, "it has begun already"
        self.status = status
        if self.more_body:
            self.keep_alive = False
        lines = [STATUS_LINE[status]]
        for name, value in chain(self._connection.server_state.default_headers, headers, self.headers):
            if name == b"content-length":
                self._announced = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and value.lower() != b"close"
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.scope["method"] == "HEAD" or status in (204, 304):
            self._announced = 0
        elif (
            self._announced is None and self.scope["http_version"] != "1.0"
        ):  # there the connection's end is the body's
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        assert self._head.count(b"\n") == len(lines), "a header holds a line break"

    def write(self, body: bytes, *, last: bool = False) -> None:
        """A piece of the response's body."""
        if self.disconnected:
            return
        assert self.status, "it has not begun"
        assert not self.response_complete, "it is over already"
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(body), body) if body else self._head
            if last:
                data += b"0\r\n\r\n"
        elif self.scope["method"] == "HEAD":
            data = self._head
        else:
            data = self._head + body
            if self._announced is not None:
                self._announced -= len(body)
                left = self._announced
                assert left == 0 or (left > 0 and not last), "it is not as long as was said"
        if data:
            self._connection.write(data)
        self._head = b""
        if last:
            self._end()

    def answer_json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """The whole response at once."""
        self.begin(status, [JSON, (b"content-length", b"%d" % len(body)), *headers])
        self.write(body, last=True)

    def _give_up(self, error: ApiError) -> None:
        if not self.status:
            self.keep_alive = False
            self.answer_json(error.status, envelope(error))
        self._connection.close()

    def _end(self) -> None:
        connection = self._connection
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            connection.close()
        connection.on_response_complete()
