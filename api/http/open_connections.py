"""Which connections are open, and which of them makes room for another when there are as many as there may be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from ..errors import ApiError

if TYPE_CHECKING:
    from .protocol import HttpProtocol

HEAD_GRACE = 5.0
"""Seconds in which a connection may bring a head before it, too, makes room for another."""
MOST_SURPLUS = 64
"""Connections beyond the limit whose heads are awaited, so that they are answered by what they ask for. Of those that
were answered, so many may stay to read that."""


class OpenConnections(ServerState):
    """What uvicorn's connections share, and a limit to how many there are. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        """Connections that are served at a time."""
        self._surplus: set[HttpProtocol] = set()
        """Those that came when there was no room."""
        self._unheard: dict[HttpProtocol, None] = {}
        """Of these, whose head is awaited, the longest awaited one first."""
        self._idle: dict[HttpProtocol, None] = {}
        """Between two requests, the longest idle one first."""
        self._headless: dict[HttpProtocol, float] = {}
        """Of the others, whose head is awaited, and since when (loop time); the longest awaited one first."""

    def admit(self, connection: HttpProtocol) -> bool:
        """Whether an open connection is served, and not surplus. Where there is no room the longest idle one is
        closed for it, else one that has owed a head for long."""
        others = len(self.connections) - len(self._surplus) - (connection not in self._surplus)
        if others >= self.limit:
            victim = next(iter(self._idle), None) or self._overdue()
            if victim is None:
                self._surplus.add(connection)
                return False
            self.stir(victim)
            self.head_came(victim)
            victim.close()
        self._surplus.discard(connection)
        return True

    def _overdue(self) -> HttpProtocol | None:
        connection, since = next(iter(self._headless.items()), (None, 0.0))
        return connection if asyncio.get_running_loop().time() - since > HEAD_GRACE else None

    def is_surplus(self, connection: HttpProtocol) -> bool:
        return connection in self._surplus

    def refusal(self) -> ApiError:
        """What a surplus connection is told."""
        return ApiError("overloaded", f"all {self.limit} connections of this server are in use")

    def await_head(self, connection: HttpProtocol) -> None:
        """It has just been opened, or a part of a head came. Among too many surplus ones the longest awaited is told at
        once."""
        if connection not in self._surplus:
            self._headless[connection] = asyncio.get_running_loop().time()
            return
        self._unheard[connection] = None
        if len(self._unheard) > MOST_SURPLUS:
            next(iter(self._unheard)).turn_away()

    def may_linger(self, connection: HttpProtocol) -> bool:
        """Whether it may stay for what its client still sends. Surplus ones may while they are not too many."""
        return connection not in self._surplus or len(self._surplus) <= MOST_SURPLUS

    def rest(self, connection: HttpProtocol) -> None:
        """Its last answer is sent, and nothing came since."""
        self._idle[connection] = None

    def stir(self, connection: HttpProtocol) -> None:
        """Something came."""
        self._idle.pop(connection, None)

    def head_came(self, connection: HttpProtocol) -> None:
        """All of it."""
        self._headless.pop(connection, None)
        self._unheard.pop(connection, None)

    def forget(self, connection: HttpProtocol) -> None:
        """It is closed."""
        self.stir(connection)
        self.head_came(connection)
        self._surplus.discard(connection)
