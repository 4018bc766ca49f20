"""What one running server is made of, and where in its life it stands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from ..core.client import EngineClient
from . import logs
from .adapters.service import AdapterService
from .config import ServerConfig
from .errors import ApiError
from .generation.prompts import Prompts
from .generation.service import Generation
from .http.calls import Call
from .http.connection import AnyRequest
from .metrics import Metrics
from .tenants.accounts import Accounts
from .tenants.auth import Authenticator
from .tenants.service import TenantService
from .tenants.usage import UsageService
from .tracing import Tracing


class Phase(Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    """Requests under way finish, new ones are refused."""


@dataclass(frozen=True)
class Services:
    """What handlers call, from the moment the base is loaded."""

    adapters: AdapterService
    generation: Generation
    prompts: Prompts
    engine: EngineClient
    tenants: TenantService
    accounts: Accounts
    usage: UsageService
    created: int
    """Unix time of the start: the base's `created`."""


@dataclass
class ServerState:
    """Owned by the server's event loop."""

    config: ServerConfig
    metrics: Metrics = field(default_factory=Metrics)
    phase: Phase = Phase.LOADING
    services: Services | None = None
    tracing: Tracing | None = None
    """None: nobody asked for traces."""
    in_flight: int = 0
    """Calls that are being answered."""

    def __post_init__(self) -> None:
        self.authenticator = Authenticator(self.config.admin_key, anyone=self.config.allow_anonymous)
        self._finished: list[tuple[str, Call]] = []
        """With the level that each is logged at."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """The base is loaded and serving, and no drain has begun."""
        return (
            self.phase is Phase.SERVING
            and self.services is not None
            and self.services.engine.ready is not None
        )

    def deadline(self) -> float | None:
        """When a request that arrives now must have been answered, in the loop's time."""
        timeout = self.config.request_timeout
        return None if timeout is None else asyncio.get_running_loop().time() + timeout

    def begin_call(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def end_call(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def finished(self, call: Call, *, quiet: bool) -> None:
        """Count and log a call whose answer is sent, `quiet` ones at level debug, and trace it where it generated:
        together with all others that finish in this round of the loop, while the code for it is in the caches."""
        call.end()
        if not self._finished:
            asyncio.get_running_loop().call_soon(self._write_down)
        self._finished.append(("debug" if quiet else "info", call))

    def _write_down(self) -> None:
        finished, self._finished = self._finished, []
        for _, call in finished:
            self.metrics.count_call(call.method, call.status, call.seconds, call.code)
            if self.tracing is not None and call.generated is not None:
                self.tracing.record(call)
        logs.log_calls(finished)

    async def drained(self) -> None:
        """Return when no call is being answered."""
        await self._idle.wait()


def server_of(request: AnyRequest) -> ServerState:
    return cast(ServerState, request.app.state["server"])


def services_of(request: AnyRequest) -> Services:
    """The services. The front door lets no call that needs them pass before they are there."""
    services = server_of(request).services
    if services is None:
        raise ApiError("overloaded", "the base model is still being loaded")
    return services
