"""An engine process as its parent holds it: spawn, frames in and out, certain end. Control code: no torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence

from ..config import EngineConfig
from ..messages import HEADER, Command, Event, decode_events, frame

END_SECONDS = 5.0
"""How long a process may take to end by itself, after it was told to or its socket closed."""


TURN_SECONDS = 0.005


class EngineChild:
    """One process. `end` must be awaited whatever happened before; then it is reaped, and its socket
    closed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineChild:
        """Start the process and hand it its settings. Raises OSError where the system has no room for it."""
        process, ours = _start_process()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(frame(config))
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, commands: Sequence[Command]) -> None:
        """Queue one frame. The process reads at all times, so what waits here is what was just written."""
        self._writer.write(frame(commands))

    async def events(self) -> AsyncIterator[Event]:
        """Everything it says, until it is gone. What has piled up is gone through in turns with other work."""
        began = time.monotonic()
        while True:
            try:
                header = await self._reader.readexactly(HEADER.size)
                body = await self._reader.readexactly(HEADER.unpack(header)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            for event in decode_events(body):
                yield event
            if time.monotonic() - began > TURN_SECONDS:
                await asyncio.sleep(0)  # reading what has come already does not wait
                began = time.monotonic()

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> int:
        """Close the socket, which ends the process; kill it where it does not. Returns its exit status."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            return await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Popen, not asyncio's subprocess: it is the same in every event loop, and the socket tells of the
    end."""
    ours, theirs = socket.socketpair()
    # -P: the working directory must not shadow installed packages.
    command = [sys.executable, "-P", "-m", "heddle.core.engine.process", str(theirs.fileno())]
    with theirs:
        try:
            return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL), ours
        except OSError:
            ours.close()
            raise
