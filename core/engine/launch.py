"""The first moment of an engine process: started, and told its settings. No event loop, nothing heavy to import.

A server starts its engine like this before it imports itself, so that the two load side by side.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass

from ..config import EngineConfig
from ..messages import frame


@dataclass(frozen=True)
class LaunchedEngine:
    """A process that loads, for `child.EngineChild` to talk with. Whoever launched it kills it at the end."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def kill(self) -> None:
        """Make sure that it is gone, and reaped."""
        self.process.kill()
        self.process.wait()


def launch(config: EngineConfig) -> LaunchedEngine:
    """Raises OSError where the system has no room for a process.

    Popen, not asyncio's subprocess: it is the same in every event loop, and the socket tells of the end.
    """
    ours, theirs = socket.socketpair()
    # -P: the working directory must not shadow installed packages.
    command = [sys.executable, "-P", "-m", "heddle.core.engine.process", str(theirs.fileno())]
    with theirs:
        try:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
    with contextlib.suppress(ConnectionError):  # gone already: its status tells whoever reads from it
        ours.sendall(frame(config))
    return LaunchedEngine(process, ours)
