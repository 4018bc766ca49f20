"""Keys: what they are made of, whom they let in and until when, and where they are never to be read."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from heddle.api.errors import ApiError
from heddle.api.state import Phase
from heddle.api.tenants import directory as directory_module
from heddle.api.tenants.auth import Authenticator
from heddle.api.tenants.directory import Directory
from heddle.api.tenants.keys import is_key, new_key, prefix_of, without_keys
from heddle.api.tenants.records import Key, Tenant
from structlog.testing import capture_logs

from ..api.forked_server import ForkedServer, Forks

NOW = datetime.now(UTC)


def key_of(text, tenant="a", **fields):
    given = {"description": None, "expires_at": None, "revoked_at": None, "last_used_at": None, **fields}
    return Key(
        id=f"key-{tenant}",
        tenant=tenant,
        prefix=text[:15],
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        created_at=NOW,
        **given,
    )


def directory_of(*keys):
    found = Directory()
    found.replace([Tenant(name=name, created_at=NOW) for name in ("a", "b")], keys)
    return found


def refusal(authenticator, *args):
    with pytest.raises(ApiError) as caught:
        authenticator.authenticate(*args)
    return caught.value.code


def test_a_key_holds_256_random_bits():
    made = {new_key() for _ in range(500)}
    assert len(made) == 500
    for text in made:
        assert is_key(text)
        assert len(base64.urlsafe_b64decode(text[-43:] + "=")) == 32
    assert len({text[-43:] for text in made}) == 500
    ones = [sum(bin(byte).count("1") for byte in base64.urlsafe_b64decode(t[-43:] + "=")) for t in made]
    assert abs(sum(ones) / len(ones) - 128) < 3, "a mean of 500 counts, each of standard deviation 8"


@pytest.mark.parametrize(
    "change", ["first", "last", "longer", "shorter", "upper", "space", "prefix", "empty"]
)
def test_nothing_but_the_whole_key_opens(change):
    text = new_key()
    directory = directory_of(key_of(text))
    assert directory.opened_by(text).name == "a"
    other = {
        "first": text[:16] + ("A" if text[16] != "A" else "B") + text[17:],
        "last": text[:-1] + ("A" if text[-1] != "A" else "E"),
        "longer": text + "A",
        "shorter": text[:-1],
        "upper": text.upper(),
        "space": text + " ",
        "prefix": text[:15],
        "empty": "",
    }[change]
    assert directory.opened_by(other) is None


def test_secrets_are_compared_in_constant_time_and_found_by_what_is_none(monkeypatch):
    """Two keys that begin alike: only the whole hash tells them apart, and every hash is compared in full."""
    first = new_key()
    second = first[:15] + new_key()[15:]
    directory = directory_of(key_of(first, "a"), key_of(second, "b"))
    compared = []

    def compare(mine, given):
        compared.append((mine, given))
        return hmac.compare_digest(mine, given)

    monkeypatch.setattr(directory_module, "hmac", SimpleNamespace(compare_digest=compare))
    assert directory.opened_by(second).name == "b"
    assert directory.opened_by(first).name == "a"
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (first, second)]
    assert compared == [(hashes[0], hashes[1]), (hashes[1], hashes[1]), (hashes[0], hashes[0])]
    assert directory.opened_by(first[:16] + "A" * 42) is None


def test_a_key_opens_up_to_the_moment_it_expires():
    key = key_of(new_key(), expires_at=NOW)
    assert key.opens(NOW - timedelta(microseconds=1))
    assert not key.opens(NOW)
    assert not key_of(new_key(), revoked_at=NOW).opens(NOW - timedelta(days=1))


def test_a_key_of_a_tenant_that_is_gone_opens_nothing():
    text = new_key()
    assert directory_of(key_of(text, "gone")).opened_by(text) is None


def test_while_the_server_loads_a_tenants_key_is_asked_to_wait_and_others_are_refused():
    for admin_key in ("s3cret", None):
        authenticator = Authenticator(admin_key)
        assert refusal(authenticator, f"Bearer {new_key()}", None, None) == "overloaded"
    assert refusal(Authenticator("s3cret"), "Bearer guess", None, None) == "invalid_api_key"
    assert refusal(Authenticator("s3cret"), None, None, None) == "invalid_api_key"
    assert Authenticator("s3cret").authenticate("Bearer s3cret", None, None).is_admin


def test_a_draining_server_refuses_every_good_key(tenants):
    a = tenants.tenant("a")
    try:
        tenants.server.state.phase = Phase.DRAINING
        for client in (a, tenants.admin):
            assert client.get("/v1/models").json()["error"]["code"] == "shutting_down"
        assert tenants.as_("guess").get("/v1/models").status_code == 401
    finally:
        tenants.server.state.phase = Phase.SERVING


def test_revoking_a_key_counts_from_the_next_call_on(tenants):
    tenants.tenant("a")
    for _ in range(5):
        key = tenants.key("a")
        client = tenants.as_(key["key"])
        assert client.get("/v1/models").status_code == 200
        assert tenants.admin.delete(f"/tenants/a/keys/{key['id']}").status_code == 204
        answer = client.get("/v1/models")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_removing_a_tenant_closes_its_keys_and_lets_its_requests_finish(tenants):
    a = tenants.tenant("a")
    a.post("/adapters", json={"name": "mine", "source": "a"})
    digest = a.get("/adapters/mine").json()["digest"]
    engine = tenants.server.engine
    engine.hang_after = 2
    body = {"prompt": "hi", "adapter": "mine", "stream": True}
    with a.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert tenants.admin.delete("/tenants/a").status_code == 204
        assert a.get("/v1/models").status_code == 401
        assert digest in engine.adapters, "it is still used"
        assert len(list(tenants.server.config.data_dir.rglob("*.safetensors"))) == 1
        tenants.server.loop.call_soon_threadsafe(engine.released.set)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    tenants.server.wait_until(lambda: digest not in engine.adapters)
    tenants.server.wait_until(lambda: not list(tenants.server.config.data_dir.rglob("*.safetensors")))
    assert "a" not in engine.shares


def test_a_tenant_removed_with_pinned_adapters_leaves_no_pin(tenants):
    a = tenants.tenant("a")
    made = a.post("/adapters", json={"name": "mine", "source": "a", "pinned": True})
    assert made.status_code == 201
    assert tenants.server.engine.adapters[made.json()["digest"]].pinned
    assert tenants.admin.delete("/tenants/a").status_code == 204
    assert not tenants.server.engine.adapters
    assert not list(tenants.server.config.data_dir.rglob("*.safetensors"))


# ------------------------------------------------------------------ a server without an admin key


def test_on_a_keyless_server_a_tenants_key_still_acts_as_that_tenant(own_server):
    """Calls without a key, and with the made-up ones that clients send, stay the admin's, as without tenants."""
    client = own_server.client
    assert client.post("/tenants", json={"name": "a"}).status_code == 201
    key = client.post("/tenants/a/keys").json()
    tenant = {"authorization": f"Bearer {key['key']}"}
    assert client.post("/adapters", json={"name": "mine", "source": "a"}, headers=tenant).status_code == 201
    assert client.get("/adapters/mine", headers=tenant).json()["tenant"] == "a"
    assert client.get("/adapters/mine").status_code == 404
    assert [one["tenant"] for one in client.get("/adapters").json()["data"]] == ["a"]
    for path in ("/metrics", "/admin/memory", "/tenants", "/tenants/b/adapters"):
        assert client.get(path, headers=tenant).status_code == 403
    for made_up in (None, "EMPTY", "sk-123", "heddle"):
        headers = {} if made_up is None else {"authorization": f"Bearer {made_up}"}
        assert client.get("/tenants/a", headers=headers).status_code == 200
        assert client.get("/metrics", headers=headers).status_code == 200
    foreign = {"origin": "https://elsewhere.example"}
    assert client.get("/v1/models", headers=foreign).status_code == 403
    assert client.get("/v1/models", headers=foreign | tenant).status_code == 200, "who has a key may use it"
    client.delete(f"/tenants/a/keys/{key['id']}")
    assert client.get("/v1/models", headers=tenant).status_code == 401, "a key that ends never opens more"


# ------------------------------------------------------------------ where keys are not to be read


def test_a_key_is_in_no_answer_but_its_first_and_in_no_log(tenants):
    tenants.tenant("a")
    texts = []
    with capture_logs() as logs:
        key = tenants.key("a", description="d")
        text = key["key"]
        a = tenants.as_(text)
        for client in (a, tenants.admin):
            for method, path, body in [
                ("GET", "/v1/models", None),
                ("GET", "/adapters", None),
                ("GET", f"/adapters/{text[:9]}", None),
                ("GET", "/tenants", None),
                ("GET", "/tenants/a/keys", None),
                ("GET", "/metrics", None),
                ("GET", "/nowhere", None),
                ("POST", "/v1/completions", {"prompt": "hi"}),
                ("POST", "/v1/completions", {"prompt": 7}),
                ("DELETE", f"/tenants/a/keys/{text}", None),
                ("DELETE", f"/tenants/a/keys/{key['id']}", None),
            ]:
                texts.append(client.request(method, path, json=body).text)
        for header in (f"Bearer {text}", f"bearer {text}", f"Basic {text}", text, f"Bearer {text}x"):
            answer = tenants.server.client.get("/v1/models", headers={"authorization": header})
            assert answer.status_code == 401
            texts.append(answer.text)
    assert logs, "calls are logged"
    secret = text[15:]
    assert secret not in repr(logs)
    assert not any(secret in answer for answer in texts)
    assert text[:15] in repr(logs), "where it stood in a path, its beginning says which"


def test_a_key_is_neither_in_the_registry_nor_in_any_file(tenants):
    tenants.tenant("a")
    key = tenants.key("a")
    tenants.as_(key["key"]).get("/v1/models")
    files = [path for path in tenants.server.config.data_dir.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert key["id"].encode() in content
    assert hashlib.sha256(key["key"].encode()).hexdigest().encode() in content
    assert key["key"][16:].encode() not in content


def test_no_key_is_written_to_the_log_of_a_whole_server(base, sources, tmp_path, capfd):
    """As `heddle serve` runs it, with everything logged."""
    forks = Forks()
    try:
        server = ForkedServer(
            forks,
            engine={"model": str(base)},
            served_model_name="tiny",
            adapter_roots=[sources],
            data_dir=tmp_path / "data",
            admin_key="the-admins-own-key",
            log_level="debug",
        )
        server.until_ready()
        server.client.headers["authorization"] = "Bearer the-admins-own-key"
        server.client.post("/tenants", json={"name": "a"})
        key = server.client.post("/tenants/a/keys").json()
        server.client.delete(f"/tenants/a/keys/{key['key']}")
        for header in (f"Bearer {key['key']}", f"Bearer {key['key']}x"):
            server.client.get("/v1/models", headers={"authorization": header})
        time.sleep(0.1)
        server.kill()
    finally:
        forks.close()
    err = capfd.readouterr().err
    assert "/tenants/a/keys" in err
    assert key["key"][16:] not in err
    assert "the-admins-own-key" not in err


def test_what_is_cut_from_a_log_is_the_secret_alone():
    text = new_key()
    assert without_keys(f"/tenants/a/keys/{text}?x={text}") == (
        f"/tenants/a/keys/{prefix_of(text)}?x={prefix_of(text)}"
    )
    assert without_keys("/adapters/heddle-demo") == "/adapters/heddle-demo"


def test_old_keys_do_not_open_a_tenant_that_is_made_again(tenants):
    a = tenants.tenant("a")
    for _ in range(2):
        assert a.get("/v1/models").status_code == 200
        assert tenants.admin.delete("/tenants/a").status_code == 204
        new = tenants.tenant("a")
        assert a.get("/v1/models").status_code == 401
        a = new


def test_what_this_server_changes_it_does_not_read_again(tenants, monkeypatch):
    """With thousands of tenants a change of one must not cost a reading of all."""
    service = tenants.server.state.services.tenants
    monkeypatch.setattr(service._store, "snapshot", lambda: pytest.fail("everything is read again"))
    a = tenants.tenant("a", weight=2)
    key = tenants.key("a")
    assert tenants.as_(key["key"]).get("/v1/models").status_code == 200
    assert tenants.admin.patch("/tenants/a", json={"limits": {"max_tokens": 3}}).status_code == 200
    assert service.tenant("a").limits.max_tokens == 3
    assert tenants.admin.delete(f"/tenants/a/keys/{key['id']}").status_code == 204
    assert tenants.as_(key["key"]).get("/v1/models").status_code == 401
    assert tenants.admin.get("/tenants").status_code == tenants.admin.get("/tenants/a").status_code == 200
    assert a.get("/v1/models").status_code == 200
    assert tenants.admin.delete("/tenants/a").status_code == 204
    assert a.get("/v1/models").status_code == 401
