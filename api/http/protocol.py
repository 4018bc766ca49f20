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
MOST_HEAD = 1 << 16
"""Bytes of a request's head."""
MOST_PIPELINED = 64
"""Requests of a connection that wait for the one before; what is behind them is not read yet."""
SLICE = 1 << 13
"""Bytes that are parsed at a time: so many more may become requests at once."""
HOP_BY_HOP = frozenset({b"connection", b"upgrade", b"http2-settings"})
"""What an offer to speak another protocol consists of; HTTP lets it be ignored."""


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
        self._unread = b""
        """What came and is not parsed yet."""
        self._head_bytes: int | None = None
        """Of the head that is being read; None: none is."""
        self._running: Exchange | None = None
        self._last_words: bytes | None = None
        """What is to be said when all that is under way is answered; then the connection ends."""

    def connection_lost(self, exc: Exception | None) -> None:
        running, self._running = self._running, None
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        for waiting, _ in self.pipeline:
            cast(Exchange, waiting).drop()
        self.pipeline.clear()
        self._unread = b""
        super().connection_lost(exc)
        self.cycle = cast(Any, None)
        self._outgoing.clear()
        self._presence.end()

    # ---------------------------------------------------------------- what comes

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._last_words is None:
            self._unread = self._unread + data if self._unread else data
            self._parse()

    def _parse(self) -> None:
        """What has come, as far as there is room for the requests in it."""
        while self._unread and self.parser is not None and self._last_words is None:
            if len(self.pipeline) >= MOST_PIPELINED:
                self.flow.pause_reading()
                return
            data, self._unread = self._unread[:SLICE], self._unread[SLICE:]
            if self._head_bytes is not None:
                self._head_bytes += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._decline(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            else:
                if self._head_bytes is not None and self._head_bytes > MOST_HEAD:
                    self.send_400_response(f"The head of a request has more than {MOST_HEAD} bytes.")

    def _decline(self, rest: bytes) -> None:
        """Read the request again without its offer to speak another protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("Invalid HTTP request received.")
            return
        kept = (b"%b: %b\r\n" % field for field in self.headers if field[0] not in HOP_BY_HOP)
        head = b"".join((b"%b %b HTTP/1.1\r\n" % (method, self.url), *kept, b"\r\n"))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._head_bytes = None
        self._unread = head + rest + self._unread

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self.parser.should_upgrade():
            return  # it comes again
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
            awaits_continue=self.expect_100_continue and version != "1.0",
        )
        self.cycle = cast(Any, exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()  # one at a time
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self.tasks.add(self.loop.create_task(cycle.run(app)))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_words is not None and self._running is not None and self._running.response_complete:
            self.write(self._last_words)
            self.close()
        elif self._unread:
            self._parse()

    # ---------------------------------------------------------------- what goes

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
        """What came is no HTTP, so no handler can answer it. `msg` says so in uvicorn's words. What came before is
        answered first; nothing more is read."""
        body = envelope(invalid(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._last_words, self._unread = head.encode() + body, b""
        running, last = self._running, cast("Exchange | None", self.cycle)
        if last is not None and last is not running and last.more_body:  # it can come to no end
            self.pipeline.popleft()
            last.drop()
        if running is None or running.response_complete or running.more_body:
            if running is None or running.response_complete or not running.status:
                self.write(self._last_words)
            self.close()
