"""How bytes become calls: uvicorn's reading of HTTP, with refusals in the shape of every other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import envelope, invalid

PRESENCE = "heddle.presence"
"""In the scope of every call: the client's `Presence`."""


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
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = Presence()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PRESENCE] = self._presence  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._presence.end()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, so no handler can answer it. `msg` says so in uvicorn's words."""
        body = envelope(invalid(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
