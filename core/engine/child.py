"""An engine process as its parent holds it: frames in and out, certain end. Control code: no torch."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Sequence

from ..messages import Command, Event, decode_events, frame
from .frame_reader import FrameReader
from .launch import LaunchedEngine

END_SECONDS = 5.0
"""How long a process may take to end by itself, after it was told to or its socket closed."""


class EngineChild:
    """One process. `end` must be awaited whatever happened before; then it is reaped, and its socket
    closed."""

    def __init__(
        self, process: subprocess.Popen[bytes], transport: asyncio.WriteTransport, reader: FrameReader
    ) -> None:
        self._process = process
        self._transport = transport
        self._reader = reader
        self._outgoing: list[bytes] = []
        """Frames of this round of the loop."""

    @classmethod
    async def of(cls, launched: LaunchedEngine) -> EngineChild:
        """The process that was launched, which belongs to this object from now on."""
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_unix_connection(FrameReader, sock=launched.connection)
        return cls(launched.process, transport, reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, commands: Sequence[Command]) -> None:
        """Queue one frame. The process reads at all times, so what waits here is what was just written.

        What is sent in one round of the loop goes in one write: each wakes the process, on a busy machine in our
        place. Raises OverflowError for an integer beyond 64 bits.
        """
        data = frame(commands)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._write)
        self._outgoing.append(data)

    def _write(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def listen(self, on_event: Callable[[Event], None]) -> None:
        """`on_event` hears everything it says; of very much a part in each round of the loop."""

        def take(body: memoryview) -> None:
            for event in decode_events(body):
                on_event(event)

        self._reader.listen(take)

    async def gone(self) -> None:
        """Return when it has said its last."""
        await self._reader.ended.wait()

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> int:
        """Close the socket, which ends the process; kill it where it does not. Returns its exit status."""
        self._transport.close()
        await self._reader.ended.wait()
        try:
            return await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)
