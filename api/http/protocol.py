"""How bytes become calls: uvicorn's reading of HTTP, with refusals in the shape of every other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from litestar.types import HTTPScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import envelope, invalid
from .exchange import EXCHANGE, Exchange

PRESENCE = "heddle.presence"
"""In the scope of every call: the client's `Presence`."""

MOST_WAITING = 1 << 16
"""Bytes that wait for the end of a round; more are sent at once, so that a writer hears when its reader is slow."""


class Presence:
    """Whether the client at the other end of a connection is still there."""

    __slots__ = ("lost", "when_lost")

    def __init__(self) -> None:
        self.lost = False
        self.when_lost: Callable[[], object] | None = None
        """Called back by the loss; of the call that is being answered."""

    def end(self) -> None:
        self.lost = True
        if self.when_lost is not None:
            self.when_lost()


class HttpProtocol(HttpToolsProtocol):
    """One connection: uvicorn's, with `Exchange` for its requests and responses.

    Web sockets, a limit of connections and a root path, which uvicorn has too, are not used here.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = Presence()
        self._outgoing = bytearray()
        """Of this round of the loop."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._outgoing.clear()
        self._presence.end()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        url, version = httptools.parse_url(self.url), self.parser.get_http_version()
        path = url.path.decode("ascii")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "scheme": self.scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": self.server,
            "state": {},
            PRESENCE: self._presence,
        }
        before = self.cycle
        exchange = scope[EXCHANGE] = Exchange(
            self,
            cast(HTTPScope, scope),
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            awaits_continue=self.expect_100_continue,
        )
        self.cycle = cast(Any, exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()  # one at a time
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.tasks.add(self.loop.create_task(cycle.run(app)))

    def write(self, data: bytes) -> None:
        """Send it when everything else in this round of the loop is done.

        Every write wakes its reader, on a busy machine in our place; in between two answers of one step of the engine
        that would cost each of them the processor's caches.
        """
        if not self._outgoing:
            self.loop.call_soon(self._flush)
        self._outgoing += data
        if len(self._outgoing) > MOST_WAITING:
            self._flush()

    def _flush(self) -> None:
        if self._outgoing and not self.transport.is_closing():
            self.transport.write(bytes(self._outgoing))
        self._outgoing.clear()

    def close(self) -> None:
        """When what was written is sent."""
        self._flush()
        self.transport.close()

    def shutdown(self) -> None:
        self._flush()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, so no handler can answer it. `msg` says so in uvicorn's words."""
        body = envelope(invalid(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.write(head.encode() + body)
        self.close()
