"""A tenant's pins: what they may hold of the pool beside the others', and that refusals change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ..api.conftest import make_adapter
from ..api.refusals import refused
from .conftest import TenantServer, with_tenants

ADAPTER, HALF = 3, 32
"""Blocks: what the stub engine says that an adapter takes, and half of its pool."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters 0 to 11."""
    root = tmp_path_factory.mktemp("roots")
    for seed in range(12):
        make_adapter(root / str(seed), seed)
    return root


@pytest.fixture
def world(base: Path, roots: Path, tmp_path: Path) -> Iterator[TenantServer]:
    with with_tenants(tmp_path, base, adapter_roots=(roots,)) as server:
        server.server.engine.pin_limit = 100
        yield server


def register(client: httpx.Client, source: int, **fields: object) -> httpx.Response:
    body = {"name": f"n{source}", "source": str(source), "preload": False, **fields}
    return client.post("/adapters", json=body)


def pin(client: httpx.Client, source: int, pinned: bool = True) -> httpx.Response:
    return client.patch(f"/adapters/n{source}", json={"pinned": pinned})


def pinned(world: TenantServer) -> tuple[int, int]:
    """By the registry, and by the engine."""
    listed = world.admin.get("/adapters").json()["data"]
    states = world.server.engine.adapters.values()
    return sum(one["pinned"] for one in listed), sum(state.pinned for state in states)


def test_a_tenants_pins_hold_at_most_its_part_by_weight(world: TenantServer):
    """Of four parts one is public's, one a's, two are b's: 8 blocks hold two adapters, 16 hold five."""
    a, b = world.tenant("a"), world.tenant("b", weight=2)
    for source in range(4):
        assert register(a, source).status_code == 201
    assert [pin(a, source).status_code for source in range(4)] == [200, 200, 409, 409]
    message = refused(pin(a, 3), 409, "pin_limit")
    assert "n3@1" in message
    assert f"{3 * ADAPTER} blocks" in message
    assert f"is {HALF // 4}" in message
    assert pinned(world) == (2, 2)
    statuses = [register(b, source, pinned=True).status_code for source in range(4, 11)]
    assert statuses == [201] * 5 + [409] * 2, "whoever came before has taken nothing of it"
    assert b.get("/adapters/n9").status_code == 404, "what was refused does not come to be"
    assert pinned(world) == (7, 7)
    assert pin(a, 0, False).status_code == pin(a, 3).status_code == 200
    refused(pin(a, 0), 409, "pin_limit")


def test_a_pin_that_takes_no_more_than_before_is_never_refused(world: TenantServer):
    a = world.tenant("a")
    for source in range(6):
        register(a, source)
    assert [pin(a, source).status_code for source in range(6)] == [200] * 5 + [409]
    for name in "bcdefgh":
        world.tenant(name)
    assert pinned(world) == (5, 5), "what is pinned stays, however small the share becomes"
    assert pin(a, 0).status_code == 200, "it is"
    assert register(a, 7, name="n0", replace=True).json()["pinned"] is True, "it moves"
    assert a.patch("/adapters/n0", json={"version": 1}).json()["pinned"] is True
    assert a.delete("/adapters/n0@1").status_code == 204
    assert pinned(world) == (5, 5)
    refused(pin(a, 5), 409, "pin_limit")


def test_one_adapter_may_always_be_pinned_but_not_two(world: TenantServer):
    small = world.tenant("small", weight=0.001)
    register(small, 0)
    register(small, 1)
    assert pin(small, 0).status_code == 200
    refused(pin(small, 1), 409, "pin_limit")
    assert pin(small, 0, False).status_code == pin(small, 1).status_code == 200


def test_a_refusal_leaves_what_another_tenant_pins(world: TenantServer):
    small, other = world.tenant("small", weight=0.001), world.tenant("other")
    for client in (small, other):
        register(client, 0)
        register(client, 1)
    assert pin(other, 1).status_code == pin(small, 0).status_code == 200
    refused(pin(small, 1), 409, "pin_limit")
    digest = other.get("/adapters/n1").json()["digest"]
    assert world.server.engine.adapters[digest].pinned


def test_of_pins_at_once_no_more_than_the_share_are_given(world: TenantServer):
    a = world.tenant("a")
    for source in range(10):
        register(a, source)
    with ThreadPoolExecutor(10) as pool:
        statuses = [one.status_code for one in pool.map(lambda source: pin(a, source), range(10))]
    assert sorted(statuses) == [200] * 5 + [409] * 5
    assert pinned(world) == (5, 5)


def test_a_server_without_tenants_may_pin_all_that_pins_may_hold(world: TenantServer):
    assert [register(world.admin, source, pinned=True).status_code for source in range(11)] == [201] * 11
