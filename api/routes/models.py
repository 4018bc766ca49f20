"""`GET /v1/models`."""

from __future__ import annotations

from litestar import Response, get

from ..errors import ApiError
from ..http.connection import AnyRequest
from ..http.openapi import documented
from ..protocol.adapters import Adapter
from ..protocol.models import Model, ModelList
from ..state import server_of, services_of
from ..turns import in_turns
from .answer import answer


@get("/v1/models", opt=documented({200: ModelList}))
async def list_models(request: AnyRequest) -> Response[bytes]:
    """List the base first, then every adapter the caller may use."""
    return answer(ModelList(await _models(request)))


@get("/v1/models/{name:path}", opt=documented({200: Model}, errors=("model_not_found",)))
async def get_model(request: AnyRequest, name: str) -> Response[bytes]:
    """Show the base, or an adapter the caller may use."""
    wanted = name.removeprefix("/")
    for model in await _models(request):
        if model.id == wanted:
            return answer(model)
    raise ApiError("model_not_found", f"there is no model or adapter {wanted!r}", "model")


async def _models(request: AnyRequest) -> list[Model]:
    server, services = server_of(request), services_of(request)
    base, length = server.config.base_name, services.generation.max_model_len
    root = server.config.engine.model if request.user.is_admin else None

    def model(a: Adapter) -> Model:
        return Model(a.name, int(a.created_at.timestamp()), a.tenant, None, base, length, a.tenant)

    adapters = [a for a in await services.adapters.usable(request.user) if a.status != "incompatible"]
    return [
        Model(base, services.created, "heddle", root, None, length),
        *await in_turns(adapters, model),
    ]


HANDLERS = [list_models, get_model]
