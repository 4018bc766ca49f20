"""Puts the application together: routes, error handling, the front door."""

from __future__ import annotations

from litestar import Litestar
from litestar.datastructures import State
from litestar.types import ASGIApp, ControllerRouterHandler

from .http.error_answers import handle
from .http.front import Front
from .http.shortcut import Shortcut
from .routes import adapters, chat, completions, health, lora, models, openapi, tenants, tokenize
from .routes.options import options
from .state import ServerState

HANDLERS: list[ControllerRouterHandler] = [
    *health.HANDLERS,
    *models.HANDLERS,
    *completions.HANDLERS,
    *chat.HANDLERS,
    *tokenize.HANDLERS,
    *adapters.HANDLERS,
    *lora.HANDLERS,
    *tenants.HANDLERS,
    *openapi.HANDLERS,
]


def create_app(state: ServerState) -> ASGIApp:
    """The ASGI application of one server; who runs it fills in `state` and moves its phase."""
    return Front(Shortcut(routed(state), [*completions.HANDLERS, *chat.HANDLERS]), state)


def routed(state: ServerState) -> Litestar:
    """What is behind the front door: every route."""
    return Litestar(
        route_handlers=[*options(HANDLERS), *HANDLERS],
        exception_handlers={Exception: handle},
        state=State({"server": state}, deep_copy=False),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,  # every handler reads its body through `connection`, which counts
        debug=False,
    )
