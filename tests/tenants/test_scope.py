"""Who may make which call: every call of the interface with every kind of key, and the exact status of each."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from heddle.api.app import HANDLERS
from litestar import Litestar
from litestar.routes import HTTPRoute

from .conftest import TenantServer, with_tenants

REFUSED = {"nobody": 401, "wrong": 401, "expired": 401, "revoked": 401}
"""Callers whose key opens nothing."""
IN_ORDER = [*REFUSED, "a", "b", "admin"]


class Call(NamedTuple):
    """One call and what its callers with a good key are answered."""

    method: str
    path: str
    """`{caller}`: who is calling."""
    a: int
    b: int
    admin: int
    body: Any = None

    def statuses(self) -> dict[str, int]:
        good = {"a": self.a, "b": self.b, "admin": self.admin}
        return dict.fromkeys(REFUSED, 200) | good if self.path in FREE else REFUSED | good


FREE = {"/health", "/ready"}
PROMPT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def root(method: str, path: str, status: int, body: Any = None) -> Call:
    """What everyone may do: inside the key's own tenant, the admin as public."""
    return Call(method, path, status, status, status, body)


def inside(tenant: str, method: str, path: str, status: int, body: Any = None) -> Call:
    """What tenant a and the admin may do there, if it is a's; the admin alone learns that there is none."""
    a, admin = (status, status) if tenant == "a" else (403, 404)
    return Call(method, f"/tenants/{tenant}{path}", a, 403, admin, body)


def admins(method: str, path: str, status: int, body: Any = None) -> Call:
    return Call(method, path, 403, 403, status, body)


def adapters_and_v1() -> list[tuple[str, str, int, Any]]:
    """The calls that stand at the root and inside each tenant; every caller has the adapters `mine` and
    `doomed`, `doomed2`, `unloaded` with its name."""
    return [
        ("POST", "/adapters", 201, {"name": "new-{caller}", "source": "a"}),
        ("POST", "/adapters?dry_run=true", 200, {"name": "dry", "source": "a"}),
        ("GET", "/adapters", 200, None),
        ("GET", "/adapters/mine", 200, None),
        ("GET", "/adapters/mine@1", 200, None),
        ("GET", "/adapters/mine/versions", 200, None),
        ("PATCH", "/adapters/mine", 200, {"description": "of {caller}"}),
        ("POST", "/adapters/mine/load", 200, None),
        ("POST", "/adapters/mine/evict", 200, {"to": "disk"}),
        ("DELETE", "/adapters/doomed-{caller}", 204, None),
        ("DELETE", "/adapters/doomed2-{caller}@1", 204, None),
        ("GET", "/v1/models", 200, None),
        ("GET", "/v1/models/mine", 200, None),
        ("POST", "/v1/completions", 200, PROMPT | {"adapter": "mine"}),
        ("POST", "/v1/chat/completions", 200, CHAT | {"model": "mine"}),
        ("POST", "/tokenize", 200, PROMPT | {"model": "mine"}),
        ("POST", "/detokenize", 200, {"tokens": [104], "model": "mine"}),
        ("GET", "/tokenizer_info", 200, None),
        ("POST", "/v1/load_lora_adapter", 200, {"lora_name": "vllm-{caller}", "lora_path": "a"}),
        ("POST", "/v1/unload_lora_adapter", 200, {"lora_name": "unloaded-{caller}"}),
    ]


def calls() -> list[Call]:
    shared = adapters_and_v1()
    limits = {"weight": 2, "limits": {"max_rank": 64}}
    return [
        *(root("GET", path, 200) for path in sorted(FREE)),
        *(
            root(method, path, 200)
            for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/version"))
        ),
        *(root(*call) for call in shared),
        root("GET", "/openapi.json", 200),
        root("GET", "/nowhere", 404),
        root("PUT", "/v1/models", 405),
        *(inside("a", *call) for call in shared),
        *(inside("none", method, path, 0, body) for method, path, _, body in shared),
        inside("a", "GET", "/usage", 200),
        inside("none", "GET", "/usage", 0),
        inside("a", "GET", "/adapters/a/b/c", 404),
        admins("GET", "/metrics", 200),
        admins("GET", "/metrics/", 200),
        admins("GET", "/admin/memory", 200),
        admins("GET", "/admin/none", 404),
        admins("GET", "/tenants", 200),
        admins("POST", "/tenants", 201, {"name": "made"}),
        *(admins("GET", f"/tenants/{name}", status) for name, status in (("a", 200), ("none", 404))),
        *(
            admins("PATCH", f"/tenants/{name}", status, limits)
            for name, status in (("a", 200), ("none", 404))
        ),
        *(admins("POST", f"/tenants/{name}/keys", status) for name, status in (("a", 201), ("none", 404))),
        *(admins("GET", f"/tenants/{name}/keys", status) for name, status in (("a", 200), ("none", 404))),
        *(admins("DELETE", f"/tenants/{name}/keys/key-0", 404) for name in ("a", "none")),
        *(admins("GET", f"/tenants/{name}/nothing", 404) for name in ("a", "none")),
        admins("DELETE", "/tenants/doomed", 204),
        admins("DELETE", "/tenants/none", 404),
    ]


class World(NamedTuple):
    server: TenantServer
    clients: dict[str, httpx.Client]


@pytest.fixture(scope="module")
def world_of_two(base: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Tenants a and b, a key of each kind, and adapters of the same names for a, b and public."""
    with with_tenants(tmp_path_factory.mktemp("scope"), base, adapter_roots=(sources,)) as server:
        clients = {"a": server.tenant("a"), "b": server.tenant("b"), "admin": server.admin}
        server.tenant("doomed")
        clients["nobody"] = server.as_(None)
        clients["wrong"] = server.as_("heddle-00000000-" + "A" * 43)
        soon = datetime.now(UTC) + timedelta(seconds=0.5)
        expired = server.key("a", expires_at=soon.isoformat())
        clients["expired"] = server.as_(expired["key"])
        assert clients["expired"].get("/v1/models").status_code == 200
        revoked = server.key("a")
        clients["revoked"] = server.as_(revoked["key"])
        assert clients["revoked"].get("/v1/models").status_code == 200
        assert server.admin.delete(f"/tenants/a/keys/{revoked['id']}").status_code == 204
        for caller, source in (("a", "a"), ("b", "b"), ("admin", "c")):
            add(clients[caller], "/adapters", "mine", source)
            for name in ("doomed", "doomed2", "unloaded"):
                add(clients[caller], "/adapters", f"{name}-{caller}", source)
        for caller in ("a", "admin"):  # each removes one of its own inside tenant a as well
            for name in ("doomed", "doomed2", "unloaded"):
                add(clients["admin"], "/tenants/a/adapters", f"{name}-{caller}-inside", "a")
        server.server.wait_until(lambda: datetime.now(UTC) > soon)
        yield World(server, clients)


def add(client: httpx.Client, path: str, name: str, source: str) -> None:
    made = client.post(path, json={"name": name, "source": source, "preload": False})
    assert made.status_code == 201, made.text


def filled(value: Any, caller: str) -> Any:
    """The value with `{caller}` in its texts filled in."""
    if isinstance(value, dict):
        return {name: filled(part, caller) for name, part in value.items()}
    return value.replace("{caller}", caller) if isinstance(value, str) else value


@pytest.mark.parametrize("call", calls(), ids=lambda call: f"{call.method} {call.path}")
def test_every_call_with_every_kind_of_key(world_of_two: World, call: Call) -> None:
    codes = {401: "invalid_api_key", 403: "permission_denied"}
    for caller in IN_ORDER:
        name = f"{caller}-inside" if call.path.startswith("/tenants/a/") else caller
        answer = world_of_two.clients[caller].request(
            call.method, filled(call.path, name), json=filled(call.body, name)
        )
        status = call.statuses()[caller]
        assert answer.status_code == status, (caller, answer.text)
        if status in codes:
            assert answer.json()["error"]["code"] == codes[status]
        if status == 404 and call.path.startswith("/tenants/none"):
            assert answer.json()["error"]["code"] in ("tenant_not_found", "invalid_request")


def test_no_call_of_the_server_is_missing_here() -> None:
    app = Litestar(route_handlers=HANDLERS, openapi_config=None)

    def fits(call: Call, route: HTTPRoute) -> bool:
        asked = [part for part in call.path.partition("?")[0].split("/") if part]
        parts = [part for part in route.path.split("/") if part]
        same = (part == given or part.startswith("{") for part, given in zip(parts, asked, strict=False))
        return len(asked) == len(parts) and all(same)

    for route in app.routes:
        assert isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS"}:
            assert any(c.method == method and fits(c, route) for c in calls()), f"{method} {route.path}"


def test_anothers_path_answers_the_same_whether_it_exists_or_not(world_of_two: World) -> None:
    a = world_of_two.clients["a"]
    paths = [
        "",
        "/keys",
        "/usage",
        "/adapters",
        "/adapters/mine",
        "/v1/models",
        "/tokenize",
        "/nothing",
        "/v1/x",
    ]
    for method in ("GET", "POST", "DELETE", "PATCH", "PUT", "OPTIONS"):
        for path in paths:
            theirs, nobodys = (a.request(method, f"/tenants/{name}{path}") for name in ("b", "none"))
            assert theirs.status_code == nobodys.status_code == 403
            assert theirs.content == nobodys.content
            assert fixed(theirs) == fixed(nobodys)


@pytest.mark.parametrize(
    ("path", "tenants", "admins"),
    [
        ("//metrics", 403, 200),
        ("/metrics//", 403, 200),
        ("/%6detrics", 403, 200),
        ("//admin//memory/", 403, 200),
        ("/admin%2fmemory", 403, 200),
        ("///tenants//", 403, 200),
        ("/tenants/b/", 403, 200),
        ("//tenants//b//adapters", 403, 200),
        ("/tenants/b%2Fadapters", 403, 200),
        ("/tenants/%62/adapters", 403, 200),
        ("/tenants/./b/adapters", 403, 404),
        ("/tenants/a/../b/adapters", 403, 404),
        ("/tenants/a/adapters/../../b/adapters", 404, 404),
        ("/tenants/a/adapters/%2e%2e/%2e%2e/b/keys", 404, 404),
        ("/v1/../metrics", 404, 404),
        ("/adapters/..%2f..%2fmetrics", 404, 404),
        ("/Metrics", 404, 404),
        ("/metrics?x=/v1", 403, 200),
        ("/tenants//keys", 403, 404),
        ("/tenants/A/adapters", 403, 404),
        ("/tenants/a%00/adapters", 403, 404),
        ("/tenants/a/adapters%00", 403, 404),
        ("http://127.0.0.1/metrics", 403, 200),
    ],
)
def test_no_spelling_of_a_path_gets_round_the_rules(
    world_of_two: World, path: str, tenants: int, admins: int
) -> None:
    """Sent as they are, which clients do not do."""
    for caller, status in (("nobody", 401), ("expired", 401), ("a", tenants), ("admin", admins)):
        connection = http.client.HTTPConnection("127.0.0.1", world_of_two.clients["a"].base_url.port)
        headers = dict(world_of_two.clients[caller].headers)
        connection.putrequest("GET", path, skip_accept_encoding=True)
        if "authorization" in headers:
            connection.putheader("authorization", headers["authorization"])
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == status, (caller, answer.read())
        connection.close()


def fixed(answer: httpx.Response) -> dict[str, str]:
    """The headers that do not differ from call to call anyhow."""
    return {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}


def test_a_key_acts_inside_its_own_tenant_alone(world_of_two: World) -> None:
    clients = world_of_two.clients
    digest = {
        caller: clients[caller].get("/adapters/mine").json()["digest"] for caller in ("a", "b", "admin")
    }
    assert len(set(digest.values())) == 3
    for caller, tenant in (("a", "a"), ("b", "b"), ("admin", "public")):
        assert clients[caller].get("/adapters/mine").json()["tenant"] == tenant
    inside = clients["admin"].get("/tenants/b/adapters/mine").json()
    assert (inside["tenant"], inside["digest"]) == ("b", digest["b"])


def test_the_engine_is_told_whose_request_it_is(world_of_two: World) -> None:
    server, clients = world_of_two.server.server, world_of_two.clients
    for caller, path, tenant in (
        ("a", "/v1/completions", "a"),
        ("b", "/v1/completions", "b"),
        ("admin", "/v1/completions", "public"),
        ("a", "/tenants/a/v1/completions", "a"),
        ("admin", "/tenants/b/v1/completions", "b"),
    ):
        server.engine.reset()
        assert clients[caller].post(path, json=PROMPT).status_code == 200
        assert [command.tenant.partition("#")[0] for command in server.engine.commands] == [tenant]
