"""Adapters of others: not yours and not there are one and the same, in every call and by every kind of reference."""

from __future__ import annotations

import httpx
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MOVING = ("date", "x-request-id")


def register(client: httpx.Client, name: str, source: str, **fields):
    made = client.post("/adapters", json={"name": name, "source": source, "preload": False, **fields})
    assert made.status_code in (200, 201), made.text
    return made.json()


def calls_that_name(ref: str) -> list[tuple[str, str, dict | None]]:
    """Every call in which an adapter can be named."""
    path = f"/adapters/{ref}"
    return [
        ("GET", path, None),
        ("GET", f"{path}/versions", None),
        ("PATCH", path, {"pinned": True}),
        ("PATCH", path, {"description": "mine now"}),
        ("PATCH", path, {"version": 1}),
        ("POST", f"{path}/load", None),
        ("POST", f"{path}/evict", {"to": "disk"}),
        ("DELETE", path, None),
        ("GET", f"/v1/models/{ref}", None),
        ("POST", "/v1/completions", {"prompt": "hi", "adapter": ref}),
        ("POST", "/v1/completions", {"prompt": "hi", "adapter": ref, "stream": True}),
        ("POST", "/v1/completions", {"prompt": "hi", "model": ref}),
        ("POST", "/v1/completions", {"prompt": "hi", "adapter": [{"name": "own"}, {"name": ref}]}),
        ("POST", "/v1/completions", {"prompt": "hi", "adapter": ref, "on_cold": "reject"}),
        ("POST", "/v1/chat/completions", CHAT | {"adapter": ref}),
        ("POST", "/v1/chat/completions", CHAT | {"model": ref}),
        ("POST", "/tokenize", {"prompt": "hi", "model": ref}),
        ("POST", "/tokenize", CHAT | {"model": ref}),
        ("POST", "/detokenize", {"tokens": [104], "model": ref}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": ref}),
    ]


def answers(client: httpx.Client, refs: list[str]) -> list[tuple[int, bytes, dict[str, str]]]:
    """What each call says, to the byte, but for what differs from call to call anyhow."""
    found = []
    for ref in refs:
        for prefix in ("", "/tenants/b"):
            for method, path, body in calls_that_name(ref):
                answer = client.request(method, prefix + path, json=body)
                headers = {k: v for k, v in answer.headers.items() if k not in MOVING}
                found.append((answer.status_code, answer.content, headers))
    return found


def test_not_yours_and_not_there_are_byte_identical(tenants, sources):
    a, b = tenants.tenant("a"), tenants.tenant("b")
    register(b, "own", "b")
    dry = tenants.admin.post("/adapters?dry_run=true", json={"name": "x", "source": "a"}).json()
    hexes = dry["digest"].removeprefix("sha256:")
    refs = ["secret", "secret@1", f"secret@{hexes[:12]}", f"secret@{hexes}", f"secret@sha256:{hexes}"]
    refs += [f"own@{hexes[:12]}", f"own@{hexes}", "own@2", hexes, f"sha256:{hexes}", f"own@sha256:{hexes}"]
    listings = [b.get("/adapters").content, b.get("/v1/models").content]
    before = answers(b, refs)
    assert {status for status, _, _ in before} <= {400, 404}, "nothing is there yet"
    assert sum(status == 404 for status, _, _ in before) > 0.8 * len(before)

    secret = register(a, "secret", "a", description="of a alone")
    assert secret["digest"] == dry["digest"]
    assert a.post("/adapters/secret/load").status_code == 200
    assert (
        a.post("/v1/completions", json={"prompt": "hi", "adapter": f"secret@{hexes[:12]}"}).status_code == 200
    )

    assert answers(b, refs) == before
    assert [b.get("/adapters").content, b.get("/v1/models").content] == listings
    moving = ("last_used_at", "requests", "tokens", "residency", "blocks")
    now = a.get("/adapters/secret").json()
    assert [now[k] for k in now if k not in moving] == [secret[k] for k in secret if k not in moving]
    assert now["residency"] == "device", "nobody else moved it"


def test_the_same_name_is_free_to_every_tenant(tenants):
    a, b = tenants.tenant("a"), tenants.tenant("b")
    of_a = register(a, "same", "a")
    of_b = b.post("/v1/load_lora_adapter", json={"lora_name": "same", "lora_path": "b"})
    assert of_b.status_code == 200, "whose name it is elsewhere does not show"
    of_b = b.get("/adapters/same").json()
    assert (of_a["tenant"], of_b["tenant"]) == ("a", "b")
    assert (of_a["version"], of_b["version"]) == (1, 1)
    assert of_a["digest"] != of_b["digest"]
    assert of_a["id"] != of_b["id"]
    for client, record in ((a, of_a), (b, of_b)):
        tenants.server.engine.reset()
        assert client.post("/v1/completions", json={"prompt": "hi", "model": "same"}).status_code == 200
        (command,) = tenants.server.engine.commands
        assert [use.digest for use in command.adapters] == [record["digest"]]
    assert b.delete("/adapters/same").status_code == 204
    assert a.get("/adapters/same").json()["digest"] == of_a["digest"]


def test_ones_own_name_hides_publics_with_all_its_versions(tenants):
    a, b = tenants.tenant("a"), tenants.tenant("b")
    first = register(tenants.admin, "shared", "a")
    register(tenants.admin, "shared", "b", replace=True)
    for client in (a, b):
        assert client.get("/adapters/shared").json()["tenant"] == "public"
        assert len(client.get("/adapters/shared/versions").json()["data"]) == 2
        assert client.get("/adapters/shared@1").json()["digest"] == first["digest"]
        used = client.post("/v1/completions", json={"prompt": "hi", "adapter": "shared@1"})
        assert used.json()["adapter"] == "shared@1"
    own = register(a, "shared", "c")
    assert own["version"] == 1
    assert a.get("/adapters/shared").json()["digest"] == own["digest"]
    assert [v["tenant"] for v in a.get("/adapters/shared/versions").json()["data"]] == ["a"]
    assert a.get("/adapters/shared@2").status_code == 404
    hidden = first["digest"].removeprefix("sha256:")[:12]
    for ref in ("shared@2", f"shared@{hidden}"):
        assert a.post("/v1/completions", json={"prompt": "hi", "adapter": ref}).status_code == 404
        assert b.post("/v1/completions", json={"prompt": "hi", "adapter": ref}).status_code == 200
    assert a.delete("/adapters/shared").status_code == 204
    assert a.get("/adapters/shared").json()["tenant"] == "public", "it shows again"


def test_publics_adapters_are_used_and_seen_but_not_changed(tenants):
    a = tenants.tenant("a")
    record = register(tenants.admin, "shared", "a")
    for method, path, body in [
        ("PATCH", "/adapters/shared", {"pinned": True}),
        ("PATCH", "/adapters/shared", {"description": "a was here"}),
        ("POST", "/adapters/shared/load", None),
        ("POST", "/adapters/shared/evict", None),
        ("DELETE", "/adapters/shared", None),
        ("DELETE", "/adapters/shared@1", None),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "shared"}),
    ]:
        for prefix in ("", "/tenants/a"):
            answer = a.request(method, prefix + path, json=body)
            assert answer.status_code == 404, (method, path)
            assert answer.json()["error"]["code"] == "adapter_not_found"
    assert tenants.admin.get("/adapters/shared").json() == record


def test_lists_hold_ones_own_and_publics_and_the_admins_all(tenants):
    a, b = tenants.tenant("a"), tenants.tenant("b")
    register(tenants.admin, "shared", "a")
    register(tenants.admin, "hidden", "a")
    register(a, "hidden", "b")
    register(a, "mine", "b")
    register(b, "theirs", "c")

    def listed(client, prefix=""):
        return [(one["tenant"], one["name"]) for one in client.get(f"{prefix}/adapters").json()["data"]]

    def models(client, prefix=""):
        return [(one["tenant"], one["id"]) for one in client.get(f"{prefix}/v1/models").json()["data"]]

    of_a = [("a", "hidden"), ("a", "mine"), ("public", "shared")]
    of_b = [("b", "theirs"), ("public", "hidden"), ("public", "shared")]
    of_public = [("public", "hidden"), ("public", "shared")]
    assert listed(a) == listed(a, "/tenants/a") == listed(tenants.admin, "/tenants/a") == of_a
    assert listed(b) == of_b
    assert listed(tenants.admin) == of_a[:2] + of_b[:1] + of_public
    assert listed(tenants.admin, "/tenants/public") == of_public
    assert models(a) == models(tenants.admin, "/tenants/a") == [(None, "tiny"), *of_a]
    assert models(b) == [(None, "tiny"), *of_b]
    assert models(tenants.admin) == [(None, "tiny"), *of_public], "what a request of the admin can name"
    for client, root in ((a, False), (b, False), (tenants.admin, True)):
        base = client.get("/v1/models").json()["data"][0]
        assert (base["root"] is not None) == root, "where the base lies is for the admin to know"
        assert client.get("/v1/models/tiny").json() == base


@pytest.mark.parametrize("ref", ["mine", "mine@1"])
def test_a_shared_digest_says_nothing_of_who_else_uses_it(tenants, ref):
    """Two tenants with the same weights: neither sees the other's requests in its own adapter."""
    a, b = tenants.tenant("a"), tenants.tenant("b")
    assert register(a, "mine", "a")["digest"] == register(b, "mine", "a")["digest"]
    a.post("/v1/completions", json={"prompt": "hi", "adapter": ref})
    seen = b.get("/adapters/mine").json()
    assert (seen["requests"], seen["tokens"], seen["last_used_at"]) == (0, 0, None)
    assert a.delete("/adapters/mine").status_code == 204
    assert b.post("/v1/completions", json={"prompt": "hi", "adapter": ref}).status_code == 200
    assert b.delete("/adapters/mine").status_code == 204
    assert not list(tenants.server.config.data_dir.rglob("*.safetensors"))


@pytest.mark.parametrize("to", ["host", "disk"])
def test_weights_that_another_tenant_pins_are_not_evicted(tenants, to):
    """Nor is it said whose pin keeps them: the refusal is the same as for weights that a request uses."""
    a, b, public = tenants.tenant("a"), tenants.tenant("b"), tenants.admin
    digests = {register(client, "mine", "a", preload=True)["digest"] for client in (a, b, public)}
    assert len(digests) == 1
    evict = {"to": to}

    def where() -> set[str]:
        return {client.get("/adapters/mine").json()["residency"] for client in (a, b, public)}

    engine = tenants.server.engine
    engine.hang_after = 1
    with b.stream(
        "POST", "/v1/completions", json={"prompt": "hi", "model": "mine", "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        used = b.post("/adapters/mine/evict", json=evict)
        tenants.server.loop.call_soon_threadsafe(engine.released.set)
        list(lines)
    assert a.patch("/adapters/mine", json={"pinned": True}).status_code == 200
    for client in (b, public):
        refused = client.post("/adapters/mine/evict", json=evict)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_in_use")
        assert refused.content == used.content
        assert where() == {"device"}
    assert a.post("/adapters/mine/evict", json=evict).json()["residency"] == to, (
        "its own pin does not hold it"
    )
    assert a.post("/adapters/mine/load").json()["residency"] == "device"

    assert b.patch("/adapters/mine", json={"pinned": True}).status_code == 200
    for client in (a, b, public):
        assert client.post("/adapters/mine/evict", json=evict).status_code == 409, "both pin it"
    assert where() == {"device"}
    assert a.patch("/adapters/mine", json={"pinned": False}).status_code == 200
    assert b.post("/adapters/mine/evict", json=evict).json()["residency"] == to
    assert a.post("/adapters/mine/load").json()["residency"] == "device"
    assert b.delete("/adapters/mine").status_code == 204
    assert a.post("/adapters/mine/evict", json=evict).json()["residency"] == to, "nobody pins it any more"


def test_a_key_of_public_writes_publics_adapters_and_is_no_admins(tenants):
    public, a = tenants.as_(tenants.key("public")["key"]), tenants.tenant("a")
    register(a, "mine", "b")
    assert register(public, "shared", "a")["tenant"] == "public"
    assert [one["name"] for one in public.get("/adapters").json()["data"]] == ["shared"]
    assert a.post("/v1/completions", json={"prompt": "hi", "model": "shared"}).status_code == 200
    for path in (
        "/metrics",
        "/admin/memory",
        "/tenants",
        "/tenants/public",
        "/tenants/public/keys",
        "/tenants/a/adapters",
    ):
        assert public.get(path).status_code == 403, path
    assert public.get("/tenants/public/usage").status_code == 200
    assert public.delete("/adapters/shared").status_code == 204
