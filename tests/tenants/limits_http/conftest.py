"""What tests of limits over HTTP share: a server whose limits' clock stands still, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from heddle.api.tenants.limits import MINUTE, Limiter

from ...api.conftest import make_adapter
from ..conftest import TenantServer, with_tenants


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters 0 to 11 of rank 2 and `wide` of rank 8."""
    root = tmp_path_factory.mktemp("roots")
    for seed in range(12):
        make_adapter(root / str(seed), seed)
    make_adapter(root / "wide", 99, rank=8)
    return root


@pytest.fixture(scope="module")
def shared(base: Path, roots: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantServer]:
    with with_tenants(tmp_path_factory.mktemp("limits"), base, adapter_roots=(roots,)) as server:
        yield server


@pytest.fixture
def world(shared: TenantServer) -> Iterator[TenantServer]:
    """Its stub engine is as new, and its limits' clock stands still."""
    engine, limits = shared.server.engine, limiter(shared)
    engine.reset()
    clock, limits._clock = limits._clock, lambda: 7 * MINUTE
    yield shared
    engine.released.set()
    shared.server.wait_until(lambda: not engine.running and not shared.server.state.in_flight)
    limits._clock = clock


def limiter(server: TenantServer) -> Limiter:
    services = server.server.state.services
    assert services is not None
    return services.generation._accounts._limiter


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A tenant of the test's own."""
    return request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")[:100]


def tenant(world: TenantServer, name: str, **limits: Any) -> httpx.Client:
    return world.tenant(name, limits=limits)


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "hi", **fields})


def refused(answer: httpx.Response, limit: str, value: int) -> None:
    """As a client can act on it: which limit, how much it is, when to come again."""
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert f"{limit} = {value}" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
