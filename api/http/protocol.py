"""How bytes become calls: uvicorn's reading of HTTP, with refusals in the shape of every other."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import httptools
from litestar.types import HTTPScope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import ApiError, invalid
from .exchange import EXCHANGE, Exchange
from .offers import without_offer
from .open_connections import HEAD_GRACE, OpenConnections
from .presence import PRESENCE, Presence

FAULT = "heddle.fault"
"""In the scope of what is no request, or came over a connection too many: the `ApiError` that says so. The front door
refuses it like a call."""
NO_METHOD = "_OTHER"
"""The method of what came and has none; OpenTelemetry's name for it."""

MOST_WAITING = 1 << 16
"""Bytes that wait for the end of a round; more are sent at once, so that a writer hears when its reader is slow."""
MOST_HEAD = 1 << 16
"""Bytes of a request's head, and of all else that comes between pieces of bodies: trailers, what chunks are told of."""
MOST_PIPELINED = 64
"""Requests of a connection that wait for the one before; what is behind them is not read yet."""
TOO_LONG = f"The head or trailer of a request has more than {MOST_HEAD} bytes."
SLICE = 1 << 13
"""Bytes that are parsed at a time: so many more may become requests at once."""
HEAD_PAUSE = 60.0
"""Seconds that a connection's first head may take from its opening, and others from their first byte; then it ends."""
SEND_PAUSE = 60.0
"""Seconds in which a client that is sent to takes nothing, after which it is given up."""
LINGER_SECONDS, LINGER_BYTES = 30.0, 1 << 26
"""So long, and so much, of a body that nobody wants is read and let go. Who closes with something unread resets the
connection, and a client that is still sending then loses the answer (RFC 9112, 9.6)."""
VERSIONS = frozenset({"1.0", "1.1"})
"""Of HTTP, that are spoken here."""


class _Unfit(Exception):
    """Why a request that can be read is none for this server."""


class HttpProtocol(HttpToolsProtocol):
    """One connection: uvicorn's, with `Exchange` for its requests and responses.

    Web sockets and a root path, which uvicorn has too, are not used here; its limit of connections is another one.
    """

    server_state: OpenConnections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = Presence()
        self.url = b""
        self._outgoing = bytearray()
        """Of this round of the loop."""
        self._unread = b""
        """What came and is not parsed yet."""
        self._framing = 0
        """Bytes since a head began or a piece of a body came, in whole slices."""
        self._lines = 0
        """Bytes of this head's, or trailer's, lines."""
        self._in_head = False
        """A part of a head came, and not all of it."""
        self._coding = b""
        """Of the request's body, where it is more than in chunks."""
        self._running: Exchange | None = None
        self._deaf = False
        """What comes is not read any more: it is no HTTP, or nobody wants it."""
        self._linger_left: int | None = None
        """Bytes; None: the connection is not at its end yet."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.server_state.admit(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        running, self._running = self._running, None
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self._drop_waiting()
        self.server_state.forget(self)
        for timer in (self._head_timer, self._send_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.cycle = cast(Any, None)
        self._outgoing.clear()
        self._presence.end()

    # ---------------------------------------------------------------- what comes

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            self._let_go(len(data))
            return
        self._unread = self._unread + data if self._unread else data
        self._parse()
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # a part of it came

    def _parse(self) -> None:
        """What has come, as far as there is room for the requests in it."""
        while self._unread and self.parser is not None:
            if len(self.pipeline) >= MOST_PIPELINED:
                self.flow.pause_reading()
                return
            data, self._unread = self._unread[:SLICE], self._unread[SLICE:]
            self._framing += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._decline(data[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                why = error.__context__
                known = isinstance(why, _Unfit)
                self.send_400_response(str(why) if known else "Invalid HTTP request received.")
            else:
                if self._framing > MOST_HEAD:
                    self.send_400_response(TOO_LONG)

    def _decline(self, rest: bytes) -> None:
        """Read the request again without its offer to speak another protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("Invalid HTTP request received.")
            return
        kept = (b"%b: %b\r\n" % field for field in without_offer(self.headers))
        version = self.parser.get_http_version().encode()
        head = b"".join((b"%b %b HTTP/%b\r\n" % (method, self.url, version), *kept, b"\r\n"))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unread = head + rest + self._unread

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._coding = b""
        self._framing = self._lines = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._lines += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += len(name) + len(value) + len(b": \r\n")
        name, value = (
            name.lower(),
            value.rstrip(b" \t"),
        )  # blanks are no part of it, and the parser leaves them
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            self._coding = value
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if self.parser.should_upgrade():
            return
        exchange = cast(Exchange, self.cycle)
        if not exchange.response_complete:
            exchange.take(body)
            if len(exchange.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._lines > MOST_HEAD:
            raise _Unfit(TOO_LONG)
        if not self.parser.should_keep_alive():  # a trailer too may say so, and then nothing more is read
            cast(Exchange, self.cycle).keep_alive = False
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_head = False
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self._lines + len(method) + len(b"  HTTP/1.1\r\n\r\n") > MOST_HEAD:
            raise _Unfit(TOO_LONG)
        self._framing = self._lines = 0
        if version not in VERSIONS:
            raise _Unfit("HTTP/1.1 and HTTP/1.0 are spoken here, and no other version.")
        if self._coding:
            raise _Unfit("A body may come in chunks, and in no other transfer coding.")
        if self.parser.should_upgrade():
            return  # it comes again
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        if url.host is not None:
            self._address(url)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": self.scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": self.server,
            "state": {},
            PRESENCE: self._presence,
        }
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self._take(scope, keep_alive, self.expect_100_continue and version != "1.0")
        self.url = b""
        self.headers = []  # a trailer's are not among the head's

    def _address(self, url: Any) -> None:
        """Of a request whose target is a whole URL, its host is the one that counts (RFC 9112, 3.2.2)."""
        host = b"[%b]" % url.host if b":" in url.host else url.host
        if url.port is not None:
            host = b"%b:%d" % (host, url.port)
        if self.parser.get_http_version() == "1.0" and all(name != b"host" for name, _ in self.headers):
            self.headers.append((b"host", host))  # there it may be missing
        self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]

    def _take(self, scope: dict[str, Any], keep_alive: bool, awaits_continue: bool) -> None:
        """Have it answered, when what came before is."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.server_state.head_came(self)
        if FAULT not in scope and self.server_state.is_surplus(self) and not self.server_state.admit(self):
            scope[FAULT] = self.server_state.refusal()
            keep_alive = False
        before = self.cycle
        exchange = scope[EXCHANGE] = Exchange(
            self, cast(HTTPScope, scope), keep_alive=keep_alive, awaits_continue=awaits_continue
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
        if self._linger_left is not None:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._unread and not self.transport.is_closing():
            self._parse()
        if self.timeout_keep_alive_task is None:
            return
        if self._in_head:
            self._unset_keepalive_if_required()
            self._await_head()
        else:
            self.server_state.rest(self)

    def _unset_keepalive_if_required(self) -> None:
        super()._unset_keepalive_if_required()
        self.server_state.stir(self)

    def _drop_waiting(self) -> None:
        for waiting, _ in self.pipeline:
            cast(Exchange, waiting).drop()
        self.pipeline.clear()
        self._unread = b""

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, of which `msg` tells."""
        self._refuse(invalid(msg))

    def turn_away(self) -> None:
        """It is one too many, and its head is not waited for, nor what else it sends."""
        self._refuse(self.server_state.refusal())
        self.cycle.more_body = False

    def _refuse(self, fault: ApiError) -> None:
        """What came before is answered first; nothing more is read."""
        self._deaf, self._unread = True, b""
        last = cast("Exchange | None", self.cycle)
        if last is not None and last.more_body:
            last.break_off(fault)
            return
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.parser.get_method().decode("ascii") if self.url else NO_METHOD,
            "path": "",
            "raw_path": self.url.partition(b"?")[0],
            "query_string": b"",
            "headers": [],
            PRESENCE: self._presence,
            FAULT: fault,
        }
        self._take(scope, keep_alive=False, awaits_continue=False)

    def drain(self) -> None:
        """The server is about to end: a call whose body is not whole by now is told to come again."""
        last = cast("Exchange | None", self.cycle)
        if last is not None and last.more_body and not last.status:
            last.break_off(ApiError("shutting_down", "the server is shutting down"))

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

    def close(self, *, linger: bool = True) -> None:
        """When what was written is sent. `linger`: a client that is still sending a body gets the time to read that, if
        there is room for it meanwhile."""
        if self._linger_left is not None or self.transport.is_closing():
            return
        self._flush()
        sending = self.cycle is not None and self.cycle.more_body
        if linger and sending and self.server_state.may_linger(self):
            self._linger()
            return
        unsent = self.transport.get_write_buffer_size()
        self.transport.close()
        if unsent:
            self._watch_sending(unsent)

    def shutdown(self) -> None:
        self._flush()
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def _linger(self) -> None:
        """Say that nothing more is to come, and let go of what the client sends until it has seen that."""
        self._deaf, self._linger_left = True, LINGER_BYTES
        self._drop_waiting()
        self.flow.resume_reading()
        with suppress(OSError):  # it has left by now
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _let_go(self, size: int) -> None:
        if self._linger_left is not None:
            self._linger_left -= size
            if self._linger_left < 0:
                self.transport.abort()

    # ---------------------------------------------------------------- who is slow

    def _await_head(self) -> None:
        pause = HEAD_GRACE if self.server_state.is_surplus(self) else HEAD_PAUSE
        self._head_timer = self.loop.call_later(pause, self.close)
        self.server_state.await_head(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None and not self.transport.is_closing():
            self._send_timer.cancel()
            self._send_timer = None

    def _watch_sending(self, unsent: int) -> None:
        """`unsent`: bytes that were written and not taken by the client."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = self.loop.call_later(SEND_PAUSE, self._look_at_sending, unsent)

    def _look_at_sending(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= before:
            self.transport.abort()
        elif unsent:
            self._watch_sending(unsent)
