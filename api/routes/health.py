"""`/health`, `/ready`, `/metrics`, `/admin/memory`."""

from __future__ import annotations

import msgspec
from litestar import Response, get

from ..connection import AnyRequest
from ..errors import ApiError
from ..metrics import CONTENT_TYPE
from ..state import Phase, server_of, services_of
from .answer import answer


class Status(msgspec.Struct):
    status: str


@get("/health")
async def health() -> Response[bytes]:
    """The server process is alive."""
    return answer(Status("ok"))


@get("/ready")
async def ready(request: AnyRequest) -> Response[bytes]:
    """The base is loaded and serving."""
    server = server_of(request)
    if not server.ready:
        if server.phase is Phase.DRAINING:
            raise ApiError("shutting_down", "not ready: the server is shutting down")
        reason = "the engine is restarting" if server.phase is Phase.SERVING else "the base is being loaded"
        raise ApiError("overloaded", f"not ready: {reason}")
    return answer(Status("ready"))


@get("/metrics")
async def metrics(request: AnyRequest) -> Response[bytes]:
    return Response(server_of(request).metrics.expose(), media_type=CONTENT_TYPE)


@get("/admin/memory")
async def memory(request: AnyRequest) -> Response[bytes]:
    """Where every byte of the engine is."""
    data = await services_of(request).engine.memory()
    return Response(msgspec.json.encode(data), media_type="application/json")


HANDLERS = [health, ready, metrics, memory]
