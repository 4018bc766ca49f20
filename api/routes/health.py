"""What operators ask: `/health`, `/ready`, `/metrics`, `/admin/memory`, and what vLLM's ask, `/ping`, `/version`."""

from __future__ import annotations

import msgspec
from litestar import HttpMethod, Response, get, route

from ... import __version__
from ...core.memory import MemoryReport
from ..errors import ApiError
from ..http.connection import AnyRequest
from ..http.openapi import Text, documented
from ..metrics import CONTENT_TYPE
from ..state import Phase, server_of, services_of
from .answer import answer


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


@get("/health", opt=documented({200: Status}))
async def health() -> Response[bytes]:
    """Say that the server process is alive."""
    return answer(Status("ok"))


@route("/ping", http_method=[HttpMethod.GET, HttpMethod.POST], status_code=200, opt=documented({200: Status}))
async def ping() -> Response[bytes]:
    """Say that the server process is alive, where a platform asks for it under this name."""
    return answer(Status("ok"))


@get("/version", opt=documented({200: Version}))
async def version() -> Response[bytes]:
    """Name the server's version."""
    return answer(Version(__version__))


@get("/ready", opt=documented({200: Status}, errors=("overloaded", "shutting_down")))
async def ready(request: AnyRequest) -> Response[bytes]:
    """Say that the base is loaded and serving."""
    server = server_of(request)
    if not server.ready:
        if server.phase is Phase.DRAINING:
            raise ApiError("shutting_down", "not ready: the server is shutting down")
        reason = "the engine is restarting" if server.phase is Phase.SERVING else "the base is being loaded"
        raise ApiError("overloaded", f"not ready: {reason}")
    return answer(Status("ready"))


@get("/metrics", opt=documented({200: Text(CONTENT_TYPE)}))
async def metrics(request: AnyRequest) -> Response[bytes]:
    """Everything Prometheus collects."""
    return Response(server_of(request).metrics.expose(), media_type=CONTENT_TYPE)


@get("/admin/memory", opt=documented({200: MemoryReport}))
async def memory(request: AnyRequest) -> Response[bytes]:
    """Say where every byte of the engine is."""
    data = await services_of(request).engine.memory()
    return Response(msgspec.json.encode(data), media_type="application/json")


HANDLERS = [health, ping, version, ready, metrics, memory]
