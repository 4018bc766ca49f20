"""Servers with tenants: the fixtures of the HTTP side's tests, and a server with an admin key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..api.conftest import (
    RunningServer,
    adapter_folder,
    base,
    model_folder,
    own_server,
    running,
    serve,
    server,
    shared_server,
    sources,
    world,
)

__all__ = [
    "RunningServer",
    "adapter_folder",
    "base",
    "model_folder",
    "own_server",
    "serve",
    "server",
    "shared_server",
    "sources",
    "world",
]

ADMIN_KEY = "the-admins-own-key"


class TenantServer:
    """A running server whose admin makes tenants and keys; `as_(key)` calls it with one."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.admin = self.as_(ADMIN_KEY)

    def as_(self, key: str | None) -> httpx.Client:
        """A client that sends this key, or none. Closed with the process."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=20)

    def tenant(self, name: str, **fields: Any) -> httpx.Client:
        """A new tenant, and a client with a key of it."""
        made = self.admin.post("/tenants", json={"name": name, **fields})
        assert made.status_code == 201, made.text
        return self.as_(self.key(name)["key"])

    def key(self, tenant: str, **fields: Any) -> dict[str, Any]:
        """A new key, as the answer to its creation shows it."""
        made = self.admin.post(f"/tenants/{tenant}/keys", json=fields)
        assert made.status_code == 201, made.text
        return made.json()


@contextmanager
def with_tenants(tmp_path: Path, base: Path, **settings: Any) -> Iterator[TenantServer]:
    with running(tmp_path, base, **{"admin_key": ADMIN_KEY, **settings}) as server:
        yield TenantServer(server)


@pytest.fixture
def serve_tenants() -> Callable[..., AbstractContextManager[TenantServer]]:
    """`serve_tenants(folder for data, base, **settings)`: a context with a server of its own."""
    return with_tenants


@pytest.fixture
def tenants(base: Path, sources: Path, tmp_path: Path) -> Iterator[TenantServer]:
    """A server of the test's own; a, b and c lie below its adapter root."""
    with with_tenants(tmp_path, base, adapter_roots=(sources,)) as server:
        yield server


@pytest.fixture(scope="session")
def shared_tenants(
    base: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TenantServer]:
    """For tests that change nothing; it has the tenant `kept`."""
    with with_tenants(tmp_path_factory.mktemp("tenants"), base, adapter_roots=(sources,)) as server:
        server.tenant("kept")
        yield server
