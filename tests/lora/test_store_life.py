"""The store beyond one name: tenants, other bases, usage, restarts, lost files, settings."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from heddle.lora.canonical import open_adapter
from heddle.lora.errors import AdapterCorrupt
from heddle.lora.store import AdapterStore

from ..postgres_server import PostgresServer
from .peft_adapters import base_of
from .store_checks import add_tenant, blob_files, gone, refused

# ------------------------------------------------------------------ tenants


def test_a_name_means_the_tenants_own_adapter_then_publics(store: AdapterStore, folders: list[Path]) -> None:
    add_tenant(store, "acme")
    add_tenant(store, "other")
    public = store.register(folders[0], name="a").record
    store.register(folders[0], name="shared")
    own = store.register(folders[1], name="a", tenant="acme").record
    secret = store.register(folders[2], name="secret", tenant="acme").record
    assert store.resolve("a", "acme").digest == own.digest
    assert store.resolve("a", "other").digest == public.digest
    assert store.resolve("shared", "acme").tenant == "public"
    assert store.resolve("secret", "acme").digest == secret.digest
    hidden = refused("model_not_found", lambda: store.resolve("secret", "other"))
    missing = refused("model_not_found", lambda: store.resolve("nothing", "other"))
    assert hidden.message.replace("secret", "nothing") == missing.message
    assert (hidden.code, hidden.param) == (missing.code, missing.param)
    # The own name hides public's with all versions.
    store.register(folders[2], name="a", replace=True)
    refused("model_not_found", lambda: store.resolve("a@2", "acme"))
    refused("adapter_not_found", lambda: store.get("shared", "acme"))
    assert [(r.tenant, r.name) for r in store.list(None)] == [
        ("acme", "a"), ("acme", "secret"), ("public", "a"), ("public", "shared"),
    ]  # fmt: skip
    assert [r.name for r in store.list("acme")] == ["a", "secret"]
    assert [r.name for r in store.list("other")] == []


def test_an_unknown_tenant_can_register_nothing(
    store: AdapterStore, folders: list[Path], tmp_path: Path
) -> None:
    refused("tenant_not_found", lambda: store.register(folders[0], name="a", tenant="nobody"))
    assert blob_files(tmp_path) == 0


# ------------------------------------------------------------------ bases, usage, restarts


def test_adapters_of_another_base_are_listed_and_kept_and_never_served(
    open_store: Callable[..., AdapterStore], folders: list[Path]
) -> None:
    first = open_store(base_of(2, name="llama-a", fingerprint="sha256:a"))
    first.register(folders[0], name="a")
    first.close()
    store = open_store(base_of(2, name="llama-b", fingerprint="sha256:b"))
    (record,) = store.list()
    assert (record.status, record.base_model) == ("incompatible", "llama-a")
    assert "another base" in refused("adapter_invalid", lambda: store.resolve("a")).message
    assert "another base" in refused("adapter_exists", lambda: store.register(folders[0], name="a")).message
    assert store.register(folders[0], name="a", replace=True).record.reference == "a@2"
    assert store.resolve("a").version == 2
    assert [r.status for r in store.versions("a")] == ["incompatible", "ready"]
    store.close()
    first = open_store(base_of(2, name="llama-a", fingerprint="sha256:a"))
    assert first.resolve("a@1").status == "ready"
    first.close()


def test_usage_is_visible_at_once_survives_restarts_and_follows_the_version(
    store: AdapterStore, open_store: Callable[..., AdapterStore], folders: list[Path]
) -> None:
    one = store.register(folders[0], name="a").record
    assert (one.requests, one.last_used_at) == (0, None)
    assert one.version_id is not None
    store.usage.touch(one.version_id, prompt_tokens=10, generated_tokens=3)
    store.usage.touch(one.version_id, prompt_tokens=1, generated_tokens=1)

    def seen(opened: AdapterStore) -> tuple[int, int, int]:
        record = opened.get("a@1")
        return record.requests, record.prompt_tokens, record.generated_tokens

    assert seen(store) == (2, 11, 4)
    store.usage.flush()
    store.usage.flush()
    assert seen(store) == (2, 11, 4)
    store.usage.touch(one.version_id, prompt_tokens=5)
    assert seen(store) == (3, 16, 4)
    two = store.register(folders[1], name="a", replace=True).record
    assert two.requests == 0
    store.close()
    again = open_store()
    assert seen(again) == (3, 16, 4)
    last = again.get("a@1").last_used_at
    assert last is not None
    assert last.tzinfo is not None
    assert abs((datetime.now(UTC) - last).total_seconds()) < 60
    again.close()


def test_usage_of_a_removed_version_is_dropped_and_never_given_to_another(
    store: AdapterStore, folders: list[Path]
) -> None:
    gone = store.register(folders[0], name="a").record
    assert gone.version_id is not None
    store.usage.touch(gone.version_id)
    store.remove("a")
    new = store.register(folders[1], name="b").record
    assert new.version_id != gone.version_id
    store.usage.touch(gone.version_id)
    store.usage.flush()
    assert store.get("b").requests == 0


def test_everything_is_there_after_a_restart(
    store: AdapterStore, open_store: Callable[..., AdapterStore], folders: list[Path]
) -> None:
    for folder in folders:
        store.register(folder, name="a", replace=True, source="adapters/x")
    store.patch("a", version=2, pinned=True)
    before = store.versions("a")
    store.close()
    again = open_store()
    assert again.versions("a") == before
    assert again.all_versions() == before
    for record in before:
        assert record.source == "adapters/x"
        open_adapter(again.path(record.digest)).close()
    again.close()


def test_a_lost_or_rotten_file_is_an_error_and_registering_again_heals_it(
    store: AdapterStore, folders: list[Path]
) -> None:
    digest = store.register(folders[0], name="a").record.digest
    path = store.path(digest)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(AdapterCorrupt):
        open_adapter(store.path(digest))
    store.register(folders[0], name="a")
    assert path.read_bytes() == whole
    path.unlink()
    with pytest.raises(AdapterCorrupt, match="missing"):
        store.path(digest)
    store.register(folders[0], name="a")
    assert path.read_bytes() == whole


def test_a_data_folder_may_have_any_name(folders: list[Path], tmp_path: Path) -> None:
    data = tmp_path / "d a?t#a%20 \u00e9"
    AdapterStore.open(data, base_of(2)).register(folders[0], name="a")
    again = AdapterStore.open(data, base_of(2))
    assert again.get("a").version == 1
    assert (data / "registry.sqlite").exists()


@pytest.mark.parametrize("where", ["in the data folder", "elsewhere"])
def test_nobody_else_reads_the_registry(where: str, tmp_path: Path) -> None:
    """Hashes of keys lie in it, and in the files that SQLite puts beside it while it is open."""
    data, given = tmp_path / "new" / "data", tmp_path / "given"
    folder = data if where == "in the data folder" else tmp_path / "new" / "database"
    database = None if folder == data else f"sqlite:///{folder}/registry.sqlite"
    given.mkdir(mode=0o755)
    given.chmod(0o755)
    before = os.umask(0o022)
    try:
        stores = [
            AdapterStore.open(data, base_of(2), database=database),
            AdapterStore.open(given, base_of(2)),
        ]
    finally:
        os.umask(before)
    add_tenant(stores[0], "acme")
    files = list(folder.glob("registry.sqlite*"))
    assert {file.name for file in files} >= {"registry.sqlite", "registry.sqlite-wal"}
    assert {stat.filemode(file.stat().st_mode) for file in files} == {"-rw-------"}
    assert {stat.filemode(made.stat().st_mode) for made in (data, folder)} == {"drwx------"}
    assert stat.filemode(given.stat().st_mode) == "drwxr-xr-x", "it was there before"
    assert stat.filemode((given / "registry.sqlite").stat().st_mode) == "-rw-------"
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"database": "nonsense"}, "database"),
        ({"database": "nosuchdb://x/y"}, "database"),
        ({"database": "sqlite:////proc/nothing/x.sqlite"}, "database"),
        ({"database": "postgresql://nobody@/none?host=/nowhere"}, "database"),
        ({"blob_store": "nosuchstore://x/y"}, "blob_store"),
        ({"blob_store": "file:///proc/nothing/x"}, "blob_store"),
    ],
)
def test_a_database_or_blob_store_that_cannot_be_used_is_named(
    options: dict[str, str], param: str, tmp_path: Path
) -> None:
    error = refused("invalid_request", lambda: AdapterStore.open(tmp_path / "data", base_of(2), **options))
    assert error.param == param


def test_postgresql_without_its_driver_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    error = refused(
        "invalid_request",
        lambda: AdapterStore.open(tmp_path, base_of(2), database="postgresql://user@127.0.0.1/heddle"),
    )
    assert "heddle-serve[postgresql]" in error.message


def test_a_database_that_goes_away_is_an_outage_and_not_a_fault(
    postgres: PostgresServer, folders: list[Path], tmp_path: Path
) -> None:
    """It is said as such, nothing is lost, and all goes on once it is back."""
    database = postgres.new_database()
    store = AdapterStore.open(tmp_path / "data", base_of(2), database=database)
    store.register(folders[0], name="a")
    with gone(database):
        refused("overloaded", lambda: store.get("a"))
        refused("overloaded", lambda: store.remove("a"))
    assert store.get("a").version == 1
    store.close()


def test_a_blob_store_that_goes_away_is_an_outage_and_not_a_fault(
    store: AdapterStore, folders: list[Path], tmp_path: Path
) -> None:
    (blobs,) = (tmp_path / "data" / "blobs").iterdir()
    store.register(folders[0], name="a")
    away = blobs.rename(tmp_path / "away")
    for change in (store.register, store.stage):
        error = refused("overloaded", lambda change=change: change(folders[1], name="b"))
        assert "cannot be stored now: No such file" in str(error)
        assert str(tmp_path) not in str(error)
    assert [record.name for record in store.list()] == ["a"]
    away.rename(blobs)
    assert store.register(folders[1], name="b").created


def test_a_file_in_use_stays_until_it_is_let_go_and_the_next_start_takes_what_was_left(
    open_store: Callable[..., AdapterStore], folders: list[Path], tmp_path: Path
) -> None:
    """As two servers do: one removes, the other still answers from it."""
    here, there = open_store(), open_store()
    digest = here.register(folders[0], name="a").record.digest
    kept = there.keep(digest)
    assert kept is not None
    assert here.collect(here.remove("a").unreferenced) == []
    assert open_store().unreferenced([digest]) == [digest]
    assert blob_files(tmp_path) == 1
    kept.close()
    open_store()
    assert blob_files(tmp_path) == 0


def test_every_change_and_nothing_else_is_counted_for_the_other_servers(
    store: AdapterStore, open_store: Callable[..., AdapterStore], folders: list[Path]
) -> None:
    other = open_store()
    seen = other.revision()

    def changed() -> bool:
        nonlocal seen
        before, seen = seen, other.revision()
        return seen > before

    version_id = store.register(folders[0], name="a").record.version_id
    assert changed()
    store.register(folders[1], name="a", replace=True)
    assert changed()
    store.patch("a", version=1, pinned=True)
    assert changed()
    assert [record.reference for record in other.pinned()] == ["a@1"]
    assert version_id is not None
    store.usage.touch(version_id)
    store.usage.flush()
    refused("adapter_exists", lambda: store.register(folders[2], name="a"))
    store.register(folders[2], name="b", dry_run=True)
    assert not changed()
    store.remove("a@2")
    assert changed()
