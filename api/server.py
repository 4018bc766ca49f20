"""One server from start to end: listen, load, serve until SIGTERM, finish what is under way, leave with
status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

import structlog
import uvicorn
import uvloop

from ..core.client import EngineClient
from ..core.engine.launch import LaunchedEngine
from ..core.messages import Progress, Ready
from . import garbage, logs, loop_lag
from .app import create_app
from .config import ServerConfig
from .http.open_connections import OpenConnections
from .http.protocol import HttpProtocol
from .loading import START_ERRORS, load
from .state import Phase, ServerState
from .tracing import from_environment
from .workers import Workers

__all__ = ["ServerConfig", "run"]

logger = structlog.get_logger(__name__)

SWITCH_SECONDS = 0.0005
"""After which a thread that computes lets the event loop have the interpreter; Python's own is ten times that (and then
tokenising a megabyte on two busy cores held the loop up for 140 ms, where it is 60 like this)."""

OnProgress = Callable[[str, int, int], None]
OnLoaded = Callable[[Ready], None]
OnReady = Callable[[ServerConfig, str], None]


def run(
    config: ServerConfig,
    on_progress: OnProgress | None = None,
    on_loaded: OnLoaded | None = None,
    on_ready: OnReady | None = None,
    launched: LaunchedEngine | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    0: ended as told; 1: it could not be started (the address is taken, the base or an adapter cannot be loaded); 2: the
    settings contradict each other. The reason is on stderr. `on_progress` (what, done, total) hears of the base being
    loaded; `on_loaded` gets what the engine says of it; `on_ready` the settings and the server's URL after `ready` was
    printed. `launched`: the engine, where it was started with these settings before.
    """
    if reason := config.problem():
        return _fail(reason, 2)
    logs.configure(config.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        listener = _listen(config.host, config.port)
    except OSError as error:
        return _fail(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}", 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listener, on_progress, on_loaded, on_ready, launched))


async def _serve(
    config: ServerConfig,
    listener: socket.socket,
    on_progress: OnProgress | None,
    on_loaded: OnLoaded | None,
    on_ready: OnReady | None,
    launched: LaunchedEngine | None,
) -> int:
    state, workers = ServerState(config), Workers()
    http = HttpServer(state)
    stop, hurry = _on_signals()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stopped = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(loop_lag.watch(state.metrics.observe_loop_lag))
    collecting = asyncio.create_task(garbage.collect())
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(workers.close)
            if (tracing := from_environment()) is not None:
                state.tracing = tracing
                stack.push_async_callback(workers.files, tracing.close)
            engine = EngineClient(config.engine_settings, _reporter(on_progress))
            if launched is not None:
                engine.adopt(launched)
            loading = asyncio.create_task(load(config, engine, state.metrics, workers, stack))
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                return 0
            try:
                state.services = loading.result()
            except START_ERRORS as error:
                return _fail(str(error), 1)
            garbage.settle()
            state.phase = Phase.SERVING
            if on_loaded is not None and engine.ready is not None:
                on_loaded(engine.ready)
            url = _url(config, listener)
            print("ready", flush=True)
            if on_ready is not None:
                on_ready(config, url)
            logger.info("ready", url=url, base=config.base_name)
            await stopped
            state.phase = Phase.DRAINING
            logger.info("draining", in_flight=state.in_flight)
            http.drain()
            await _first(state.drained(), hurry.wait())
            return 0
    finally:
        stopped.cancel()
        watching.cancel()
        collecting.cancel()
        http.should_exit = True
        await serving


def _reporter(on_progress: OnProgress | None) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None
    return lambda event: on_progress(event.what, event.done, event.total)


class HttpServer(uvicorn.Server):
    """uvicorn without its own idea of signals: this server drains first."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(state),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=5,
            )
        )
        self.server_state = OpenConnections(state.config.most_connections)

    def drain(self) -> None:
        """Nobody waits for the rest of a body any more."""
        for connection in list(self.server_state.connections):
            cast(HttpProtocol, connection).drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first SIGTERM or SIGINT, and by a second one."""
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return first, second


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them does; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _fail(reason: str, status: int) -> int:
    print(f"heddle: {reason}", file=sys.stderr)
    return status
