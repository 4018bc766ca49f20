"""The engine process: reads commands from a socket, steps, writes one frame of events a step.

Started by `core.client` as `python -m heddle.core.engine.process FD`, FD being one end of a socket pair. The
first frame is the settings; what follows is commands. It ends with status 0 on `Shutdown` or when the other
end is gone, and with status 2, after a `Failed` event, where it cannot start.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from .. import logs
from ..config import EngineConfig
from ..errors import EngineStartError
from ..messages import HEADER, Command, Failed, Progress, Shutdown, decode_commands, decode_config, frame

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

Inbox = SimpleQueue[Command | None]
"""What wakes the engine: commands, and None when something it waits for (an adapter's bytes) has come."""


def main(argv: list[str]) -> int:
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the parent decides when this one
    # ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[1]))
    first = _read_frame(connection)
    if first is None:
        return 0
    config = decode_config(first)
    logs.configure(config.log_level, process="engine")
    threads = config.num_threads or len(os.sched_getaffinity(0))
    set_threads(threads)
    config = msgspec.structs.replace(config, num_threads=threads)
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, inbox), name="commands", daemon=True).start()
    engine = _start(config, connection, inbox)
    if engine is None:
        return 2
    try:
        connection.sendall(frame([engine.ready]))
        _serve(engine, connection, inbox)
    except ConnectionError:
        logger.info("the server process is gone")
    finally:
        engine.close()
    return 0


def set_threads(count: int) -> None:
    """Fix the threads of OpenMP and MKL while the model loads; must run before torch is imported. The engine
    then gives the cores to the kernels' own threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)


def _start(config: EngineConfig, connection: socket.socket, inbox: Inbox) -> Engine | None:
    """The engine, or None after a `Failed` event was sent."""

    def progress(what: str, done: int, total: int) -> None:
        connection.sendall(frame([Progress(what, done, total)]))

    try:
        from .engine import Engine
        from .host_memory import keep_freed

        engine = Engine(config, progress, wake=lambda: inbox.put(None))
        keep_freed()
        return engine
    except EngineStartError as error:
        failed = Failed("invalid_request", str(error))
    except Exception as error:
        logger.exception("the engine could not start")
        failed = Failed("internal_error", f"the engine could not start: {type(error).__name__}: {error}")
    connection.sendall(frame([failed]))
    return None


def _serve(engine: Engine, connection: socket.socket, inbox: Inbox) -> None:
    """Commands in, one step, events out, until `Shutdown`. Sleeps while there is nothing to do."""
    while True:
        events = []
        for command in _drain(inbox, wait=engine.idle and not engine.use_idle_time()):
            if isinstance(command, Shutdown):
                return
            events.extend(engine.handle(command))
        events.extend(engine.step())
        if events:
            connection.sendall(frame(events))


def _drain(inbox: Inbox, wait: bool) -> list[Command]:
    """All commands that lie ready; with `wait`, blocks until the inbox holds anything."""
    commands = []
    try:
        item = inbox.get(block=wait)
        while True:
            if item is not None:
                commands.append(item)
            item = inbox.get_nowait()
    except Empty:
        return commands


def _read_commands(connection: socket.socket, inbox: Inbox) -> None:
    """Thread: socket to inbox. The other end's death ends the process at once, whatever it is at."""
    try:
        while (body := _read_frame(connection)) is not None:
            for command in decode_commands(body):
                inbox.put(command)
    except msgspec.MsgspecError:
        logger.exception("the server process sent what is no command")
        os._exit(1)  # rather than wait for ever: the server starts another engine
    os._exit(0)  # all there is here are copies: weights, cache, adapters


def _read_frame(connection: socket.socket) -> bytearray | None:
    """The next frame's body; None when the other end is gone."""
    header = _read_exactly(connection, HEADER.size)
    return None if header is None else _read_exactly(connection, HEADER.unpack(header)[0])


def _read_exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            received = connection.recv_into(view[done:])
        except ConnectionError:
            return None
        if not received:
            return None
        done += received
    return data


if __name__ == "__main__":
    status = main(sys.argv)
    logging.shutdown()
    os._exit(status)  # without the seconds that torch and numba take to tear themselves down
