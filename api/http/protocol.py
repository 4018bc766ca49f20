"""How bytes become calls: uvicorn's reading of HTTP, with refusals in the shape of every other."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import envelope, invalid

CONNECTION = "heddle.connection"
"""In the scope of every call: the `HttpProtocol` it came by."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    lost = False
    """The client has left."""
    when_lost: Callable[[], object] | None = None
    """Called back then, by the call that is being answered."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        if self.when_lost is not None:
            self.when_lost()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, so no handler can answer it. `msg` says so in uvicorn's words."""
        body = envelope(invalid(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
