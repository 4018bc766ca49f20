"""What a restart, a kill and a second server leave of tenants, keys, limits and pins: everything."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..api.forked_server import ForkedServer, Forks
from .conftest import ADMIN_KEY, with_tenants

SECOND = 1.0
"""Within it every server of a registry knows what another one changed."""


# ------------------------------------------------------------------ one server, started again


def test_a_restart_brings_tenants_keys_limits_and_pins_back(serve_tenants, base, sources, tmp_path):
    with serve_tenants(tmp_path, base, adapter_roots=(sources,)) as before:
        a = before.tenant("a", weight=2.5, limits={"pool_share": 0.25, "max_rank": 64})
        before.admin.patch("/tenants/public", json={"weight": 0.5})
        good, revoked = before.key("a", description="good"), before.key("a")
        end = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        before.key("a", expires_at=end)
        before.admin.delete(f"/tenants/a/keys/{revoked['id']}")
        made = a.post("/adapters", json={"name": "mine", "source": "a", "pinned": True}).json()
        before.tenant("gone")
        gone_key = before.key("gone")["key"]
        before.admin.delete("/tenants/gone")
        before.as_(good["key"]).get("/v1/models")
        listed = before.admin.get("/tenants").content
        keys = before.admin.get("/tenants/a/keys").content
    with serve_tenants(tmp_path, base, adapter_roots=(sources,)) as after:
        assert after.admin.get("/tenants").content == listed
        assert after.admin.get("/tenants/a/keys").content == keys, "when they were last used, too"
        a = after.as_(good["key"])
        shown = a.get("/adapters/mine").json()
        assert (shown["digest"], shown["pinned"]) == (made["digest"], True)
        after.server.wait_until(lambda: after.server.engine.adapters[made["digest"]].pinned)
        assert a.post("/v1/completions", json={"prompt": "hi", "model": "mine"}).status_code == 200
        for text in (revoked["key"], gone_key):
            assert after.as_(text).get("/v1/models").status_code == 401
        shares = after.server.engine.shares
        assert (shares["a"].weight, shares["a"].pool_share) == (2.5, 0.25)
        assert shares["public"].weight == 0.5
        assert set(shares) == {"a", "public"}


# ------------------------------------------------------------------ kill -9


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def start(forks: Forks, base: Path, sources: Path, tmp_path: Path) -> Iterator[Callable[[], ForkedServer]]:
    """Starts the same server again and again."""
    started: list[ForkedServer] = []

    def start_it() -> ForkedServer:
        server = ForkedServer(
            forks,
            engine={"model": str(base)},
            served_model_name="tiny",
            adapter_roots=[sources],
            data_dir=tmp_path / "data",
            admin_key=ADMIN_KEY,
        )
        started.append(server)
        server.until_ready()
        server.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        return server

    yield start_it
    for server in started:
        server.kill()


def opens(server: ForkedServer, key: str) -> bool:
    answer = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=20)
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


def test_what_was_answered_survives_a_kill(start, tmp_path):
    server = start()
    server.client.post("/tenants", json={"name": "a"})
    server.client.post("/tenants", json={"name": "b"})
    server.client.post("/tenants/b/adapters", json={"name": "mine", "source": "a"})
    kept, revoked, of_b = (server.client.post(f"/tenants/{t}/keys").json() for t in ("a", "a", "b"))
    assert server.client.delete(f"/tenants/a/keys/{revoked['id']}").status_code == 204
    server.kill()
    server = start()
    assert opens(server, kept["key"])
    assert not opens(server, revoked["key"])
    assert opens(server, of_b["key"])
    assert server.client.delete("/tenants/b").status_code == 204
    server.kill()
    server = start()
    assert [one["name"] for one in server.client.get("/tenants").json()["data"]] == ["a", "public"]
    assert not opens(server, of_b["key"])
    assert server.client.get("/adapters").json() == {"data": []}
    assert not list((tmp_path / "data").rglob("*.safetensors"))


def test_a_kill_at_any_moment_loses_nothing_acknowledged_and_halves_nothing(start, tmp_path):
    """Tenants with a key and an adapter come and go while the server is killed."""
    generator = random.Random(20260504)
    there: dict[str, str] = {}
    gone: dict[str, str] = {}
    for turn in range(3):
        server = start()
        stop = threading.Event()

        def work(server: ForkedServer = server, turn: int = turn, stop: threading.Event = stop) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                name = f"t{turn}-{number}"
                try:
                    server.client.post("/tenants", json={"name": name}).raise_for_status()
                    key = server.client.post(f"/tenants/{name}/keys").raise_for_status().json()["key"]
                    body = {"name": "mine", "source": "a"}
                    server.client.post(f"/tenants/{name}/adapters", json=body).raise_for_status()
                    there[name] = key
                    if number % 2:
                        del there[name]  # from here on it may be either
                        server.client.delete(f"/tenants/{name}").raise_for_status()
                        gone[name] = key
                except (httpx.TransportError, RuntimeError):
                    return

        thread = threading.Thread(target=work)
        thread.start()
        deadline = time.monotonic() + 60
        while not any(name.startswith(f"t{turn}-") for name in [*there]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.5))
        server.kill()
        stop.set()
        thread.join(30)
        server = start()
        names = {one["name"] for one in server.client.get("/tenants").json()["data"]}
        for name, key in there.items():
            assert opens(server, key), name
            shown = server.client.get(f"/tenants/{name}/adapters/mine")
            assert shown.status_code == 200
        for name, key in gone.items():
            assert name not in names
            assert not opens(server, key), name
        for record in server.client.get("/adapters").json()["data"]:
            assert record["tenant"] in names
        files = list((tmp_path / "data").rglob("*.safetensors"))
        assert len(files) == 1, "all have the same weights"
        server.kill()


# ------------------------------------------------------------------ two servers


@pytest.fixture(params=["sqlite", "postgresql"])
def pair(request, serve_tenants, base, sources, tmp_path) -> Iterator[tuple[Any, Any]]:
    """Two servers with a data folder each, on one registry and one blob store."""
    database = f"sqlite:///{tmp_path}/registry.sqlite"
    if request.param == "postgresql":
        database = request.getfixturevalue("postgres").new_database()
    settings = {
        "adapter_roots": (sources,),
        "database": database,
        "blob_store": f"file://{tmp_path}/shared",
    }
    with (
        serve_tenants(tmp_path / "one", base, **settings, data_dir=tmp_path / "1") as one,
        serve_tenants(tmp_path / "two", base, **settings, data_dir=tmp_path / "2") as two,
    ):
        yield one, two


def soon(condition: Callable[[], bool]) -> None:
    """It comes true within the second that servers have for it."""
    deadline = time.monotonic() + SECOND
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {SECOND} s"
        time.sleep(0.01)


def test_keys_made_and_revoked_at_one_server_are_so_at_the_other_within_a_second(pair):
    one, two = pair
    one.tenant("a")
    for here, there in ((one, two), (two, one)):
        key = here.key("a")
        assert here.as_(key["key"]).get("/v1/models").status_code == 200
        elsewhere = there.as_(key["key"])
        soon(lambda client=elsewhere: client.get("/v1/models").status_code == 200)
        assert here.admin.delete(f"/tenants/a/keys/{key['id']}").status_code == 204
        assert here.as_(key["key"]).get("/v1/models").status_code == 401
        soon(lambda client=elsewhere: client.get("/v1/models").status_code == 401)


def test_a_tenant_made_at_one_server_is_the_admins_at_the_other_at_once(pair):
    one, two = pair
    for number in range(3):
        name = f"t{number}"
        assert one.admin.post("/tenants", json={"name": name}).status_code == 201
        assert two.admin.get(f"/tenants/{name}").status_code == 200
        name = f"u{number}"
        assert one.admin.post("/tenants", json={"name": name}).status_code == 201
        body = {"name": "mine", "source": "a"}
        assert two.admin.post(f"/tenants/{name}/adapters", json=body).status_code == 201
        assert one.admin.get(f"/tenants/{name}/adapters/mine").status_code == 200


def test_limits_and_weights_reach_the_other_server_and_its_engine(pair):
    one, two = pair
    one.tenant("a")
    soon(lambda: "a" in two.server.engine.shares)
    one.admin.patch("/tenants/a", json={"weight": 7, "limits": {"pool_share": 0.5, "max_tokens": 9}})
    soon(lambda: two.server.engine.shares["a"].weight == 7)
    assert two.server.engine.shares["a"].pool_share == 0.5
    assert two.server.state.services.tenants.tenant("a").limits.max_tokens == 9
    assert two.admin.get("/tenants").content == one.admin.get("/tenants").content


def test_a_tenant_removed_at_one_server_is_gone_at_the_other_with_its_adapters(pair, tmp_path):
    one, two = pair
    a = one.tenant("a")
    digest = a.post("/adapters", json={"name": "mine", "source": "a"}).json()["digest"]
    elsewhere = two.as_(a.headers["authorization"].removeprefix("Bearer "))
    soon(lambda: elsewhere.get("/v1/models").status_code == 200)
    assert elsewhere.post("/v1/completions", json={"prompt": "hi", "model": "mine"}).status_code == 200
    assert digest in two.server.engine.adapters
    assert one.admin.delete("/tenants/a").status_code == 204
    soon(lambda: elsewhere.get("/v1/models").status_code == 401)
    two.server.wait_until(lambda: digest not in two.server.engine.adapters)
    two.server.wait_until(lambda: not list((tmp_path / "shared").rglob("*.safetensors")))
    assert "a" not in two.server.engine.shares


def test_a_tenant_removed_and_made_again_between_two_looks_is_another_one_to_the_other_server(pair):
    """Its engine must forget the first one, or the second would find what the first had cached."""
    one, two = pair
    one.tenant("a", weight=3)
    soon(lambda: "a" in two.server.engine.shares)
    first = two.server.engine.shares["a"].name
    forgotten: list[str] = []
    forget = two.server.engine.forget_tenant
    two.server.engine.forget_tenant = lambda name: (forgotten.append(name), forget(name))
    one.admin.delete("/tenants/a")
    one.tenant("a", weight=3)
    soon(lambda: forgotten == [first])
    soon(lambda: "a" in two.server.engine.shares)
    assert first not in two.server.engine.tenants


def test_of_one_tenant_made_at_both_servers_at_once_one_is_refused(pair):
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda i: pair[i % 2].admin.post("/tenants", json={"name": "raced"}).status_code, range(8)
            )
        )
    assert sorted(made) == [201] + [409] * 7


def test_a_registry_that_is_gone_for_a_while_keeps_nobody_out(tenants, monkeypatch):
    """Who is let in is in memory; changes are refused until it is back, and then followed again."""
    from heddle.lora.errors import StoreError

    a = tenants.tenant("a")
    store = tenants.server.state.services.tenants._store

    def gone(*_args: object) -> None:
        raise StoreError("overloaded", "the registry's database cannot be used now: gone")

    with monkeypatch.context() as broken:
        for name in ("snapshot", "revision", "create", "revoke"):
            broken.setattr(store, name, gone)
        broken.setattr(store, "any_revision_at_once", lambda: None)
        time.sleep(0.6)  # two looks at it fail
        assert a.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert tenants.admin.post("/tenants", json={"name": "b"}).status_code == 503
        assert tenants.admin.delete("/tenants/a/keys/key-0").status_code == 503
    tenants.tenant("b")
    store.create("c", 1.0, tenants.server.state.services.tenants.tenant("b").limits)
    soon(lambda: "c" in tenants.server.engine.shares)


# ------------------------------------------------------------------ PostgreSQL, which keeps no NUL in a text


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        *(("GET", f"/tenants/%00{rest}", None, 404) for rest in ("", "/keys", "/usage", "/adapters", "/v1/models")),
        ("PATCH", "/tenants/%00", {}, 404),
        ("DELETE", "/tenants/%00", None, 404),
        ("POST", "/tenants/%00/keys", {}, 404),
        ("DELETE", "/tenants/public/keys/%00", None, 404),
        ("POST", "/tenants", {"name": "a\x00"}, 400),
        ("POST", "/tenants/public/keys", {"description": "\x00"}, 400),
        ("GET", "/adapters/%00", None, 404),
        ("GET", "/adapters/%00/versions", None, 404),
        ("PATCH", "/adapters/%00", {"pinned": True}, 404),
        ("PATCH", "/adapters/here", {"description": "\x00"}, 400),
        ("POST", "/adapters/%00/load", None, 404),
        ("DELETE", "/adapters/%00", None, 404),
        ("DELETE", "/adapters/here@%00", None, 404),
        ("GET", "/v1/models/%00", None, 404),
        ("POST", "/v1/completions", {"prompt": "hi", "adapter": "\x00"}, 404),
        ("POST", "/v1/completions", {"prompt": "hi", "model": "here@\x00"}, 404),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "\x00"}, 404),
        ("POST", "/adapters", {"name": "\x00", "source": "a"}, 400),
        ("POST", "/adapters", {"name": "x", "source": "a\x00"}, 400),
        ("POST", "/adapters", {"name": "x", "source": "a", "description": "\x00"}, 400),
    ],
)  # fmt: skip
def test_a_nul_in_a_name_or_text_is_refused_before_the_database_chokes_on_it(
    on_postgres, method, path, body, status
):
    answer = on_postgres.admin.request(method, path, json=body)
    assert answer.status_code == status, answer.text


@pytest.fixture(scope="module")
def on_postgres(postgres, base, sources, tmp_path_factory) -> Iterator[Any]:
    """It has public's adapter `here`."""
    settings = {"adapter_roots": (sources,), "database": postgres.new_database()}
    with with_tenants(tmp_path_factory.mktemp("nul"), base, **settings) as server:
        server.admin.post("/adapters", json={"name": "here", "source": "a"})
        yield server
