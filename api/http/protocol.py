"""How bytes become calls: uvicorn's reading of HTTP, with refusals in the shape of every other."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import envelope, invalid


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, so no handler can answer it. `msg` says so in uvicorn's words."""
        body = envelope(invalid(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
