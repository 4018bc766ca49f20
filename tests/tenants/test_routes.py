"""`/tenants`: what is made, shown, changed, removed and refused, over HTTP."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

NO_LIMITS = {
    "requests_per_minute": None, "tokens_per_minute": None, "concurrent_requests": None,
    "queued_requests": None, "adapters": None, "adapter_bytes": None, "max_rank": None, "max_tokens": None,
    "pool_share": None,
}  # fmt: skip


def refusal(answer):
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]


def test_a_tenant_is_made_shown_changed_and_removed(tenants):
    admin = tenants.admin
    made = admin.post("/tenants", json={"name": "acme", "weight": 2, "limits": {"max_rank": 16}})
    assert made.status_code == 201
    tenant = made.json()
    created = datetime.fromisoformat(tenant.pop("created_at"))
    assert abs(datetime.now(UTC) - created) < timedelta(seconds=30)
    assert tenant == {"name": "acme", "weight": 2.0, "limits": NO_LIMITS | {"max_rank": 16}}
    assert admin.get("/tenants/acme").json() == made.json()
    listed = admin.get("/tenants").json()
    assert [entry["name"] for entry in listed["data"]] == ["acme", "public"]
    assert listed["data"][0] == made.json()
    limits = {"max_rank": None, "pool_share": 0.5, "requests_per_minute": 60}
    changed = admin.patch("/tenants/acme", json={"limits": limits})
    assert changed.status_code == 200
    assert changed.json() == made.json() | {
        "limits": NO_LIMITS | {"pool_share": 0.5, "requests_per_minute": 60}
    }
    assert admin.patch("/tenants/acme", json={"weight": 0.5}).json() == changed.json() | {"weight": 0.5}
    assert admin.patch("/tenants/acme", json={}).json()["weight"] == 0.5
    gone = admin.delete("/tenants/acme")
    assert (gone.status_code, gone.content) == (204, b"")
    for answer in (
        admin.get("/tenants/acme"),
        admin.patch("/tenants/acme", json={}),
        admin.delete("/tenants/acme"),
        admin.get("/tenants/acme/keys"),
        admin.post("/tenants/acme/keys"),
        admin.delete("/tenants/acme/keys/key-1"),
        admin.get("/tenants/acme/adapters"),
        admin.get("/tenants/acme/v1/models"),
        admin.post("/tenants/acme/v1/completions", json={"prompt": "hi"}),
    ):
        assert refusal(answer) == (404, "tenant_not_found", None)
    assert [entry["name"] for entry in admin.get("/tenants").json()["data"]] == ["public"]


def test_a_tenant_that_exists_is_not_made_again(tenants):
    tenants.tenant("acme", weight=3)
    for name in ("acme", "public"):
        again = tenants.admin.post("/tenants", json={"name": name})
        assert refusal(again) == (409, "tenant_exists", "name")
    assert tenants.admin.get("/tenants/acme").json()["weight"] == 3
    assert tenants.admin.post("/tenants", json={"name": "Acme"}).status_code == 201, "names are byte for byte"


def test_public_always_exists(tenants):
    shown = tenants.admin.get("/tenants/public").json()
    assert (shown["weight"], shown["limits"]) == (1.0, NO_LIMITS)
    assert refusal(tenants.admin.delete("/tenants/public")) == (400, "invalid_request", None)
    patched = tenants.admin.patch("/tenants/public", json={"limits": {"max_tokens": 9}})
    assert patched.json()["limits"] == NO_LIMITS | {"max_tokens": 9}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "name", "name"),
        ({"name": ""}, "name", "128"),
        ({"name": "a" * 129}, "name", "128"),
        ({"name": "a/b"}, "name", "128"),
        ({"name": ".a"}, "name", "128"),
        ({"name": "a\n"}, "name", "128"),
        ({"name": 7}, "name", "str"),
        ({"name": "a", "wait": 1}, "wait", "wait"),
        ({"name": "a", "weight": 0}, "weight", ">="),
        ({"name": "a", "weight": -1}, "weight", ">="),
        ({"name": "a", "weight": 1e9}, "weight", "<="),
        ({"name": "a", "weight": "1"}, "weight", "str"),
        ({"name": "a", "weight": True}, "weight", "bool"),
        ({"name": "a", "limits": {"max_ranks": 1}}, "limits", "max_ranks"),
        ({"name": "a", "limits": {"max_rank": -1}}, "limits", "max_rank"),
        ({"name": "a", "limits": {"max_rank": 1.5}}, "limits", "max_rank"),
        ({"name": "a", "limits": {"requests_per_minute": 0}}, "limits", "requests_per_minute"),
        ({"name": "a", "limits": {"adapter_bytes": 2**70}}, "limits", "adapter_bytes"),
        ({"name": "a", "limits": {"pool_share": 0}}, "limits", "pool_share"),
        ({"name": "a", "limits": {"pool_share": 1.01}}, "limits", "pool_share"),
        ({"name": "a", "limits": []}, "limits", "array"),
        ([], None, "array"),
    ],
)
def test_what_is_no_tenant_is_refused_by_name(shared_tenants, body, param, said):
    admin = shared_tenants.admin
    answer = admin.post("/tenants", json=body)
    assert refusal(answer) == (400, "invalid_request", param)
    assert said in answer.json()["error"]["message"]
    if isinstance(body, dict) and body.get("name") == "a":
        patch = {name: value for name, value in body.items() if name != "name"}
        assert refusal(admin.patch("/tenants/kept", json=patch)) == (400, "invalid_request", param)
    assert admin.get("/tenants/a").status_code == 404
    assert admin.get("/tenants/kept").json()["limits"] == NO_LIMITS


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity", "-Infinity"])
def test_a_weight_is_finite(shared_tenants, number):
    for method, path in (("POST", "/tenants"), ("PATCH", "/tenants/kept")):
        body = f'{{"name":"a","weight":{number}}}' if method == "POST" else f'{{"weight":{number}}}'
        answer = shared_tenants.admin.request(method, path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_request"


def test_keys_are_shown_once(tenants):
    tenants.tenant("acme")
    end = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    made = tenants.admin.post(
        "/tenants/acme/keys", json={"description": "for CI", "expires_at": end.isoformat()}
    )
    assert made.status_code == 201
    key = made.json()
    text = key.pop("key")
    assert re.fullmatch(r"heddle-[0-9a-f]{8}-[A-Za-z0-9_-]{43}", text)
    assert text.startswith(key["prefix"])
    assert len(key["prefix"]) == 15
    assert (key["tenant"], key["description"]) == ("acme", "for CI")
    assert datetime.fromisoformat(key["expires_at"]) == end
    assert key["revoked_at"] is None
    assert key["last_used_at"] is None
    listed = tenants.admin.get("/tenants/acme/keys")
    assert listed.json()["data"][1] == key
    assert text not in listed.text
    assert text[15:] not in listed.text
    assert tenants.admin.post("/tenants/acme/keys").status_code == 201, "the body may be left out"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "0001-01-01T00:00:00+14:00"}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-14:00"}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59Z"}, "expires_at"),
        ({"expires_at": "2999-01-01T00:00:00"}, "expires_at"),
        ({"expires_at": "2999-01-01"}, "expires_at"),
        ({"expires_at": "soon"}, "expires_at"),
        ({"expires_at": 32503680000}, "expires_at"),
        ({"description": "a\x00b"}, "description"),
        ({"description": "a" * 4097}, "description"),
        ({"description": 1}, "description"),
        ({"name": "x"}, "name"),
    ],
)
def test_what_is_no_key_is_refused_by_name(shared_tenants, body, param):
    before = shared_tenants.admin.get("/tenants/kept/keys").json()
    answer = shared_tenants.admin.post("/tenants/kept/keys", json=body)
    assert refusal(answer) == (400, "invalid_request", param)
    assert shared_tenants.admin.get("/tenants/kept/keys").json() == before


def test_a_key_that_is_none_cannot_be_revoked(tenants):
    tenants.tenant("one")
    tenants.tenant("two")
    foreign = tenants.key("two")
    for key_id in ("key-0", foreign["id"], foreign["prefix"], "%00", foreign["key"]):
        answer = tenants.admin.delete(f"/tenants/one/keys/{key_id}")
        assert refusal(answer) == (404, "tenant_not_found", None)
    assert tenants.as_(foreign["key"]).get("/v1/models").status_code == 200
    for _ in range(2):
        assert tenants.admin.delete(f"/tenants/two/keys/{foreign['id']}").status_code == 204
    listed = tenants.admin.get("/tenants/two/keys").json()["data"]
    assert [entry["revoked_at"] is None for entry in listed] == [True, False]


def test_the_last_use_of_a_key_is_noted(tenants):
    tenants.tenant("acme")
    key = tenants.key("acme")
    client = tenants.as_(key["key"])

    def last_used():
        (entry,) = [e for e in tenants.admin.get("/tenants/acme/keys").json()["data"] if e["id"] == key["id"]]
        return entry["last_used_at"]

    assert last_used() is None
    client.get("/v1/models")
    first = last_used()
    assert abs(datetime.now(UTC) - datetime.fromisoformat(first)) < timedelta(seconds=30)
    client.get("/v1/models")
    assert last_used() > first


def test_the_engine_is_told_of_every_tenants_share(tenants):
    engine = tenants.server.engine
    tenants.tenant("acme", weight=2.5, limits={"pool_share": 0.25, "queued_requests": 7})
    share = engine.shares["acme"]
    assert (share.weight, share.pool_share, share.queued_requests) == (2.5, 0.25, 7)
    tenants.admin.patch("/tenants/acme", json={"weight": 4, "limits": {"pool_share": None}})
    share = engine.shares["acme"]
    assert (share.weight, share.pool_share, share.queued_requests) == (4, None, 7)
    tenants.admin.patch("/tenants/public", json={"weight": 3})
    assert engine.shares["public"].weight == 3
    tenants.admin.delete("/tenants/acme")
    assert set(engine.shares) == {"public"}
