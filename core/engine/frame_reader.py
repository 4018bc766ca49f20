"""Cuts what comes through a socket into frames and hands each on at once. Control code: no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from ..messages import HEADER

TURN_SECONDS = 0.005
"""Of every round of the loop; what has piled up beyond that comes after the others' work."""


class FrameReader(asyncio.Protocol):
    """Belongs to one event loop. What it hands on needs no task to be woken for it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """The connection is gone, and so is what had not come whole."""
        self._take: Callable[[memoryview], None] | None = None
        self._buffer = bytearray()

    def listen(self, take: Callable[[memoryview], None]) -> None:
        """From now on `take` gets every frame's body, which it must not keep; what has come already, at once."""
        self._take = take
        self._hand_on()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.ReadTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._take is not None:
            self._hand_on()

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()

    def _hand_on(self) -> None:
        assert self._take is not None, "listen comes first"
        begin, over = 0, time.monotonic() + TURN_SECONDS
        with memoryview(self._buffer) as data:
            while (body := begin + HEADER.size) <= len(data):
                end = body + HEADER.unpack_from(data, begin)[0]
                if end > len(data):
                    break
                with data[body:end] as frame:
                    self._take(frame)
                begin = end
                if begin < len(data) and time.monotonic() > over:
                    self._transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._go_on)
                    break
        del self._buffer[:begin]

    def _go_on(self) -> None:
        if not self.ended.is_set():
            self._transport.resume_reading()
            self._hand_on()
