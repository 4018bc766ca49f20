"""Whether the client of a call is still there."""

from __future__ import annotations

from collections.abc import Callable

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
