"""Limits on adapters over HTTP: their number, bytes and ranks, held before anything is fetched or read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..conftest import TenantServer, with_tenants
from .conftest import refused, tenant


def register(client: httpx.Client, name: str, source: str, **fields: Any) -> httpx.Response:
    return client.post("/adapters", json={"name": name, "source": source, **fields})


def test_names_are_limited_versions_are_not(world: TenantServer, name: str):
    client = tenant(world, name, adapters=2)
    assert register(client, "one", "0").status_code == register(client, "two", "1").status_code == 201
    for fields in ({}, {"pinned": True}):
        refused(register(client, "three", "2", **fields), "adapters", 2)
    refused(client.post("/adapters?dry_run=true", json={"name": "three", "source": "2"}), "adapters", 2)
    assert register(client, "two", "1").status_code == 200, "the same again"
    assert register(client, "two", "2", replace=True).status_code == 201
    assert client.delete("/adapters/one").status_code == 204
    assert register(client, "three", "2").status_code == 201
    old = client.post("/v1/load_lora_adapter", json={"lora_name": "four", "lora_path": "3"})
    refused(old, "adapters", 2)
    public = client.get("/adapters").json()["data"]
    assert [one["name"] for one in public if one["tenant"] == name] == ["three", "two"]


def test_what_only_a_removal_makes_room_for_is_not_worth_a_try_every_second(world: TenantServer, name: str):
    client = tenant(world, name, adapters=1)
    assert register(client, "one", "0").status_code == 201
    for limits in ({"adapters": 1}, {"adapters": None, "adapter_bytes": 1}):
        world.admin.patch(f"/tenants/{name}", json={"limits": limits}).raise_for_status()
        answer = register(client, "two", "1")
        refused(answer, *next((limit, value) for limit, value in limits.items() if value))
        assert answer.headers["retry-after"] == "60"


def test_bytes_are_limited_over_all_versions(world: TenantServer, name: str):
    size = register(world.admin, "public-one", "0").json()["size_bytes"]
    assert size == 2 * 2 * (32 + 32 + 32 + 16) * 4, "two layers, rank 2, q and v in float32"
    client = tenant(world, name, adapter_bytes=2 * size)
    assert register(client, "x", "0").status_code == 201
    assert register(client, "x", "1", replace=True).status_code == 201
    refused(register(client, "x", "2", replace=True), "adapter_bytes", 2 * size)
    refused(register(client, "y", "2"), "adapter_bytes", 2 * size)
    assert register(client, "x", "1").status_code == 200
    assert client.delete("/adapters/x@1").status_code == 204
    refused(register(client, "y", "wide"), "adapter_bytes", 2 * size)
    assert register(client, "y", "2").status_code == 201


def test_beyond_the_limit_nothing_is_fetched(world: TenantServer, name: str, monkeypatch: pytest.MonkeyPatch):
    client = tenant(world, name, adapters=1)
    assert register(client, "one", "0").status_code == 201

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("a download for a registration that is refused")

    monkeypatch.setattr("heddle.lora.sources.fetch", fetch)
    refused(register(client, "x", "hf:someone/something"), "adapters", 1)
    world.admin.patch(f"/tenants/{name}", json={"limits": {"adapters": 0}}).raise_for_status()
    refused(register(client, "x", "hf:someone/something"), "adapters", 0)


def test_an_upload_that_could_never_fit_is_not_read_to_its_end(world: TenantServer, name: str, roots: Path):
    client = tenant(world, name, adapter_bytes=1)
    config = (roots / "0" / "adapter_config.json").read_bytes()
    for size, status in ((3 << 20, 429), (1 << 20, 400)):
        files = [
            ("files", ("adapter_config.json", config)),
            ("files", ("adapter_model.safetensors", b"\xff" * size)),
        ]
        answer = client.post("/adapters", data={"name": "big"}, files=files)
        assert answer.status_code == status, "400: it was read, and is no adapter"
        if status == 429:
            refused(answer, "adapter_bytes", 1)

    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="adapter_model.safetensors"\r\n\r\n'
        for _ in range(64):
            yield b"\xff" * (1 << 20)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    refused(client.post("/adapters", content=endless(), headers=headers), "adapter_bytes", 1)


def test_rank_is_limited(world: TenantServer, name: str):
    client = tenant(world, name, max_rank=7)
    for path in ("/adapters", "/adapters?dry_run=true"):
        answer = client.post(path, json={"name": "wide", "source": "wide"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "adapter_invalid"
        assert "rank 8 is above the limit of 7" in answer.json()["error"]["message"]
    world.admin.patch(f"/tenants/{name}", json={"limits": {"max_rank": 8}})
    assert register(client, "wide", "wide").status_code == 201


def test_of_registrations_at_once_no_more_than_fit_pass(world: TenantServer, name: str):
    client = tenant(world, name, adapters=3)
    barrier = threading.Barrier(10)

    def at_once(index: int) -> int:
        barrier.wait()
        return register(client, f"a{index}", str(index)).status_code

    with ThreadPoolExecutor(10) as pool:
        statuses = list(pool.map(at_once, range(10)))
    assert sorted(statuses) == [201] * 3 + [429] * 7
    owned = [one for one in client.get("/adapters").json()["data"] if one["tenant"] == name]
    assert len(owned) == 3


def test_the_operators_own_adapters_are_not_held_to_public_s_limits(base: Path, roots: Path, tmp_path: Path):
    with with_tenants(tmp_path, base, adapter_roots=(roots,)) as server:
        assert server.admin.patch("/tenants/public", json={"limits": {"adapters": 0}}).status_code == 200
        refused(register(server.admin, "one", "0"), "adapters", 0)
    settings = {"adapter_roots": (roots,), "adapters": (("start", str(roots / "0")),)}
    with with_tenants(tmp_path, base, **settings) as server:
        assert [one["name"] for one in server.admin.get("/adapters").json()["data"]] == ["start"]
        refused(register(server.admin, "one", "1"), "adapters", 0)
