"""`heddle tenants …` and `heddle keys …` against a running server: what is printed, and the exit status."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from heddle.api.cli import main
from heddle.api.cli.render import key_state
from structlog.testing import capture_logs

from .conftest import ADMIN_KEY

CLEAN = {"HEDDLE_URL": None, "HEDDLE_ADMIN_KEY": None}


@pytest.fixture
def heddle(tenants):
    """Runs `heddle …` as the admin of the test's server."""
    with capture_logs():  # the server lives in this process, whose output is the command's
        yield lambda *args, **options: run(tenants, *args, **options)


def run(server, *args, key=ADMIN_KEY):
    options = ["--url", server.server.url, *(("--key", key) if key else ())]
    return CliRunner().invoke(main, [*args, *options], env=CLEAN, catch_exceptions=False)


def rows(text):
    return [line.split() for line in text.splitlines() if line.strip() and "───" not in line]


def test_tenants_from_making_to_removing(heddle, tenants):
    made = heddle(
        "tenants",
        "create",
        "acme",
        "--weight",
        "2.5",
        "--limit",
        "adapter_bytes=2GiB",
        "--limit",
        "pool_share=0.5",
    )
    assert made.exit_code == 0
    assert made.stdout == "created acme: weight 2.5, limits adapter_bytes=2147483648, pool_share=0.5\n"
    header, acme, public = rows(heddle("tenants", "list").stdout)
    assert header == ["name", "weight", "limits", "created"]
    assert acme[:4] == ["acme", "2.5", "adapter_bytes=2147483648,", "pool_share=0.5"]
    assert public[:3] == ["public", "1", "none"]
    changed = heddle("tenants", "update", "acme", "--limit", "max_rank=16", "--limit", "pool_share=none")
    assert changed.stdout == "changed acme: weight 2.5, limits adapter_bytes=2147483648, max_rank=16\n"
    shown = heddle("tenants", "show", "acme").stdout
    assert [line.split() for line in shown.splitlines()][:3] == [
        ["name", "acme"],
        ["weight", "2.5"],
        ["limits", "adapter_bytes=2147483648,", "max_rank=16"],
    ]
    removed = heddle("tenants", "remove", "acme")
    assert (removed.exit_code, removed.stdout) == (0, "removed acme\n")
    assert tenants.admin.get("/tenants/acme").status_code == 404


def test_json_is_the_servers_own_answer(heddle, tenants):
    made = json.loads(heddle("tenants", "create", "acme", "--json").stdout)
    assert made == tenants.admin.get("/tenants/acme").json()
    assert json.loads(heddle("tenants", "list", "--json").stdout) == tenants.admin.get("/tenants").json()
    assert json.loads(heddle("tenants", "show", "acme", "--json").stdout) == made
    key = json.loads(heddle("keys", "create", "--tenant", "acme", "--json").stdout)
    assert tenants.as_(key["key"]).get("/v1/models").status_code == 200
    listed = json.loads(heddle("keys", "list", "--tenant", "acme", "--json").stdout)
    assert listed == tenants.admin.get("/tenants/acme/keys").json()
    revoked = heddle("keys", "revoke", key["id"], "--tenant", "acme", "--json")
    assert json.loads(revoked.stdout) == {"revoked": key["id"]}
    assert json.loads(heddle("tenants", "remove", "acme", "--json").stdout) == {"removed": "acme"}


def test_a_key_from_making_to_revoking(heddle, tenants):
    tenants.tenant("acme")
    made = heddle("keys", "create", "--tenant", "acme", "--description", "for CI", "--expires", "30d")
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert made.stdout == f"{key}\n", "a script can take it from there"
    assert tenants.as_(key).get("/v1/models").status_code == 200
    entry = tenants.admin.get("/tenants/acme/keys").json()["data"][1]
    assert entry["id"] in made.stderr
    assert entry["expires_at"] in made.stderr
    left = datetime.fromisoformat(entry["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29, hours=23) < left <= timedelta(days=30)
    listed = heddle("keys", "list", "--tenant", "acme")
    header, _, row = rows(listed.stdout)
    assert header[:2] == ["id", "tenant"]
    assert row[:5] == [entry["id"], "acme", entry["prefix"], "for", "CI"]
    assert row[-1] == "valid"
    assert key not in listed.output
    assert heddle("keys", "revoke", entry["id"], "--tenant", "acme").stdout == f"revoked {entry['id']}\n"
    assert tenants.as_(key).get("/v1/models").status_code == 401
    assert rows(heddle("keys", "list", "--tenant", "acme").stdout)[2][-1] == "revoked"
    at = heddle("keys", "create", "--tenant", "acme", "--expires", "2999-01-31T12:00:00+01:00", "--json")
    assert json.loads(at.stdout)["expires_at"] == "2999-01-31T11:00:00Z"


def test_adapters_inside_a_tenant_and_with_its_key(heddle, tenants, sources):
    tenants.tenant("acme")
    key = heddle("keys", "create", "--tenant", "acme").stdout.strip()
    added = heddle("adapters", "add", "mine", str(sources / "a"), "--tenant", "acme")
    assert added.exit_code == 0, added.output
    assert rows(heddle("adapters", "list", key=key).stdout)[1][:2] == ["mine", "acme"]
    assert rows(heddle("adapters", "list", "--tenant", "acme", key=key).stdout)[1][:2] == ["mine", "acme"]
    assert heddle("adapters", "show", "mine").exit_code == 1, "public has none"
    other = heddle("adapters", "list", "--tenant", "public", key=key)
    assert (other.exit_code, "permission_denied" in other.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("tenants", "show", "none"), "tenant_not_found"),
        (("tenants", "update", "none", "--weight", "2"), "tenant_not_found"),
        (("tenants", "remove", "public"), "invalid_request"),
        (("tenants", "create", "public"), "tenant_exists"),
        (("tenants", "create", "a", "--weight", "1000000"), "invalid_request"),
        (("tenants", "create", "a", "--limit", "pool_share=2"), "invalid_request"),
        (("keys", "create", "--tenant", "none"), "tenant_not_found"),
        (("keys", "create", "--tenant", "public", "--expires", "2001-01-01T00:00:00Z"), "invalid_request"),
        (("keys", "revoke", "key-0", "--tenant", "public"), "404"),
    ],
)
def test_what_the_server_refuses_ends_with_status_1_and_its_reason(shared_tenants, args, code):
    with capture_logs():
        result = run(shared_tenants, *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert code in result.stderr or "no key" in result.stderr


def test_without_the_right_key_nothing_is_done(heddle, tenants):
    tenants.tenant("acme")
    key = tenants.key("acme")["key"]
    assert heddle("tenants", "list", key=None).exit_code == 1
    for args in (("tenants", "list"), ("tenants", "remove", "acme"), ("keys", "list", "--tenant", "acme")):
        result = heddle(*args, key=key)
        assert (result.exit_code, "permission_denied" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("tenants", "create"), "NAME"),
        (("tenants", "create", "a", "--weight", "-1"), "--weight"),
        (("tenants", "create", "a", "--weight", "nan"), "finite"),
        (("tenants", "create", "a", "--limit", "max_moons=1"), "max_rank"),
        (("tenants", "create", "a", "--limit", "max_rank"), "NAME=VALUE"),
        (("tenants", "create", "a", "--limit", "max_rank=many"), "many"),
        (("tenants", "create", "a", "--limit", "max_rank=1.5"), "1.5"),
        (("keys", "create"), "--tenant"),
        (("keys", "list"), "--tenant"),
        (("keys", "revoke", "key-0"), "--tenant"),
        (("keys", "create", "--tenant", "a", "--expires", "soon"), "30d"),
        (("keys", "create", "--tenant", "a", "--expires", "2999-01-01T00:00:00"), "UTC"),
        (("keys", "create", "--tenant", "a", "--expires", "999999999d"), "30d"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_asks_no_server(args, said):
    result = CliRunner().invoke(main, [*args, "--url", "http://127.0.0.1:1"], env=CLEAN)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_key_is_valid_until_it_expires_or_is_revoked():
    now = datetime(2026, 5, 4, tzinfo=UTC)
    key = {"revoked_at": None, "expires_at": None}
    assert key_state(key, now) == "valid"
    assert key_state(key | {"expires_at": "2026-05-04T00:00:01Z"}, now) == "valid"
    assert key_state(key | {"expires_at": "2026-05-04T00:00:00Z"}, now) == "expired"
    assert key_state({"revoked_at": "2026-05-01T00:00:00Z", "expires_at": None}, now) == "revoked"
