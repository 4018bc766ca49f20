"""`OPTIONS`: which methods a path takes. Litestar's own answer names those of the path's first handler alone."""

from __future__ import annotations

from collections.abc import Iterable

from litestar import HttpMethod, Response, route
from litestar.handlers import HTTPRouteHandler
from litestar.types import ControllerRouterHandler

from ..http.methods import allow


def options(handlers: Iterable[ControllerRouterHandler]) -> list[HTTPRouteHandler]:
    """A handler for every path of `handlers`; to be registered before them, so that it is the one that counts.

    Routers have their own.
    """
    methods: dict[str, set[str]] = {}
    for handler in handlers:
        if isinstance(handler, HTTPRouteHandler):
            for path in handler.paths:
                methods.setdefault(path, {"OPTIONS"}).update(handler.http_methods)
    return [_answer(path, allow(names)) for path, names in methods.items()]


def _answer(path: str, allowed: str) -> HTTPRouteHandler:
    @route(path, http_method=HttpMethod.OPTIONS, status_code=204)
    async def answer() -> Response[None]:
        return Response(None, headers={"allow": allowed})

    return answer
