"""Tenants and keys in the registry, SQLite and PostgreSQL: what is kept, what goes together, what races."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from heddle.api.protocol.tenants import LimitsPatch, patched
from heddle.api.tenants.records import Limits
from heddle.api.tenants.store import TenantStore
from heddle.core.model.config import ModelConfig
from heddle.lora import database as registry_database
from heddle.lora.errors import StoreError
from heddle.lora.records import Registration
from heddle.lora.store import AdapterStore

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty registry's database."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new_database()
    return f"sqlite:///{tmp_path}/registry.sqlite"


@pytest.fixture
def open_adapters(url: str, base: Path, tmp_path: Path) -> Iterator[Callable[[], AdapterStore]]:
    """Opens the same registry again and again, as several server processes would."""
    model = ModelConfig.load(base).base_model("tiny", base)
    opened: list[AdapterStore] = []

    def open_it() -> AdapterStore:
        opened.append(AdapterStore.open(tmp_path / "data", model, database=url))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def adapters(open_adapters: Callable[[], AdapterStore]) -> AdapterStore:
    return open_adapters()


@pytest.fixture
def store(adapters: AdapterStore) -> TenantStore:
    return TenantStore(adapters.database)


def blobs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "data").rglob("*.safetensors"))


def code(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(StoreError) as caught:
        call(*args, **kwargs)
    return caught.value.code


def test_tenants_and_keys_are_kept(
    open_adapters: Callable[[], AdapterStore], adapters: AdapterStore, store: TenantStore
) -> None:
    limits = Limits(max_rank=8, adapter_bytes=2**40, pool_share=0.125)
    store.create("acme", 2.5, limits)
    end = datetime.now(UTC) + timedelta(days=2)
    (key, text), _ = store.create_key("acme", "ünï ✓", end)
    assert key.sha256 == hashlib.sha256(text.encode()).hexdigest()
    other = TenantStore(open_adapters().database)
    found = other.snapshot()
    acme, public = sorted(found.tenants, key=lambda tenant: tenant.name)
    assert (acme.weight, acme.limits) == (2.5, limits)
    assert (public.name, public.weight, public.limits) == ("public", 1.0, Limits())
    assert found.keys == [key]
    assert found.keys[0].expires_at == end
    assert other.keys("acme") == [key]


def test_every_change_raises_both_revisions_and_nothing_else_does(
    adapters: AdapterStore, store: TenantStore, sources: Path
) -> None:
    """By the one all servers let go of removed adapters, by the other they read tenants and keys again."""

    def revisions() -> tuple[int, int]:
        return store.revision(), adapters.revision()

    assert revisions() == (0, 0)
    store.create("acme", 1.0, Limits())
    store.change("acme", 2.0, lambda limits: limits)
    (key, _), _ = store.create_key("acme", None, None)
    assert revisions() == (3, 3)
    store.mark_used({key.id: NOW})
    store.keys("acme")
    assert code(store.create, "acme", 1.0, Limits()) == "tenant_exists"
    assert store.revoke("acme", "key-0") is None
    assert store.revoke("public", key.id) is None
    assert revisions() == (3, 3)
    assert store.revoke("acme", key.id)
    assert store.revoke("acme", key.id)
    assert revisions() == (4, 4)
    adapters.register(sources / "a", name="a")
    assert revisions() == (4, 5)
    store.remove("acme")
    assert revisions() == (5, 6)


def test_the_last_use_never_goes_back(store: TenantStore) -> None:
    (key, _), _ = store.create_key("public", None, None)
    for minutes in (5, 3, 4):
        store.mark_used({key.id: NOW + timedelta(minutes=minutes), "key-gone": NOW})
    (kept,) = store.keys("public")
    assert kept.last_used_at == NOW + timedelta(minutes=5)


def test_of_one_name_made_at_many_servers_at_once_one_wins(
    open_adapters: Callable[[], AdapterStore],
) -> None:
    stores = [TenantStore(open_adapters().database) for _ in range(4)]
    gate = threading.Barrier(8)

    def create(number: int) -> str:
        gate.wait()
        try:
            store = stores[number % 4]
            return f"made {store.create('raced', float(number + 1), Limits()).value.weight}"
        except StoreError as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(8)))
    assert outcomes.count("tenant_exists") == 7
    (winner,) = [outcome for outcome in outcomes if outcome.startswith("made")]
    (raced,) = [tenant for tenant in stores[0].snapshot().tenants if tenant.name == "raced"]
    assert winner == f"made {raced.weight}"


def test_limits_changed_at_two_servers_at_once_are_both_kept(
    open_adapters: Callable[[], AdapterStore],
) -> None:
    """A patch of one limit must not undo another server's patch of the next."""
    stores = [TenantStore(open_adapters().database) for _ in range(2)]
    stores[0].create("acme", 1.0, Limits())
    names = ["max_rank", "max_tokens", "adapters", "queued_requests", "concurrent_requests", "adapter_bytes"]

    def change(number: int) -> None:
        patch = LimitsPatch(**{names[number]: number + 1})
        stores[number % 2].change("acme", None, lambda limits: patched(limits, patch))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(change, range(len(names))))
    (acme,) = [tenant for tenant in stores[0].snapshot().tenants if tenant.name == "acme"]
    assert acme.limits == Limits(**{name: number + 1 for number, name in enumerate(names)})


def test_a_tenant_goes_with_all_that_is_its_own_and_nothing_of_others(
    adapters: AdapterStore, store: TenantStore, sources: Path, tmp_path: Path
) -> None:
    for name in ("acme", "other"):
        store.create(name, 1.0, Limits())
        store.create_key(name, None, None)
    mine = adapters.register(sources / "a", name="mine", tenant="acme", pinned=True).record
    both = adapters.register(sources / "b", name="mine", tenant="acme", replace=True).record
    adapters.register(sources / "b", name="theirs", tenant="other")
    adapters.usage.touch(mine.version_id or 0, prompt_tokens=3)
    adapters.usage.flush()
    digests = store.remove("acme").value
    assert digests == sorted([mine.digest, both.digest])
    assert adapters.list("acme") == []
    assert code(adapters.register, sources / "a", name="x", tenant="acme") == "tenant_not_found"
    assert code(store.keys, "acme") == "tenant_not_found"
    assert len(store.keys("other")) == 1
    assert [record.tenant for record in adapters.all_versions()] == ["other"]
    assert len(blobs(tmp_path)) == 2, "files stay as long as an engine may need them"
    assert adapters.collect(digests) == [mine.digest]
    assert len(blobs(tmp_path)) == 1
    with adapters.database._engine.connect() as connection:
        for table in ("keys", "adapters", "versions", "usage"):
            count = connection.scalar(sa.text(f"SELECT count(*) FROM {table}"))
            assert count == {"usage": 0}.get(table, 1), table


def test_after_a_kill_between_removal_and_cleaning_the_next_start_cleans(
    open_adapters: Callable[[], AdapterStore], adapters: AdapterStore, store: TenantStore, sources: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    store.create("acme", 1.0, Limits())
    adapters.register(sources / "a", name="mine", tenant="acme")
    store.remove("acme")
    assert len(blobs(tmp_path)) == 1
    open_adapters()
    assert not blobs(tmp_path)


def test_registrations_that_race_with_the_tenants_removal_leave_nothing_behind(
    open_adapters: Callable[[], AdapterStore], sources: Path, tmp_path: Path
) -> None:
    """Each is either in before it and goes with the tenant, or is refused."""
    stores = [open_adapters() for _ in range(3)]
    tenants = TenantStore(stores[0].database)
    for turn in range(4):
        tenants.create("acme", 1.0, Limits())
        gate = threading.Barrier(4)

        def register(number: int, gate: threading.Barrier = gate) -> str:
            gate.wait()
            try:
                name, source = f"n{number}", sources / "abc"[number]
                done: Registration = stores[number].register(source, name=name, tenant="acme")
                return done.record.digest
            except StoreError as error:
                return error.code

        with ThreadPoolExecutor(4) as pool:
            outcomes = [pool.submit(register, number) for number in range(3)]
            gate.wait()
            digests = tenants.remove("acme").value
            done = {outcome.result() for outcome in outcomes}
        assert done - {"tenant_not_found"} <= set(digests), turn
        stores[0].collect(digests)
        assert stores[0].all_versions() == []
        assert not blobs(tmp_path), turn


def test_a_tenant_made_again_has_nothing_of_the_one_before(
    adapters: AdapterStore, store: TenantStore, sources: Path
) -> None:
    store.create("acme", 3.0, Limits(max_rank=4))
    store.create_key("acme", None, None)
    adapters.register(sources / "a", name="mine", tenant="acme")
    store.remove("acme")
    again = store.create("acme", 1.0, Limits()).value
    assert (again.weight, again.limits) == (1.0, Limits())
    assert store.keys("acme") == []
    assert adapters.list("acme") == []
    assert store.snapshot().keys == []


def test_tenants_of_an_earlier_registry_have_weight_1_and_no_limits(
    url: str, tmp_path: Path, base: Path
) -> None:
    scripts = Config()
    scripts.set_main_option("script_location", str(Path(registry_database.__file__).parent / "migrations"))
    engine = sa.create_engine(url)

    def migrate(move: Callable[[Config, str], None], revision: str) -> None:
        with engine.begin() as connection:
            scripts.attributes["connection"] = connection
            move(scripts, revision)

    migrate(command.upgrade, "0002")
    with engine.begin() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        connection.execute(tables.tables["installation"].insert().values(id="0" * 32))
        for number, name in enumerate(("public", "acme")):
            values = {"id": number + 1, "name": name, "created_at": NOW}
            connection.execute(tables.tables["tenants"].insert().values(values))
    model = ModelConfig.load(base).base_model("tiny", base)
    adapters = AdapterStore.open(tmp_path / "data", model, database=url)
    store = TenantStore(adapters.database)
    found = store.snapshot()
    assert {(t.name, t.weight, t.limits, t.created_at) for t in found.tenants} == {
        (name, 1.0, Limits(), NOW) for name in ("public", "acme")
    }
    store.create_key("acme", None, None)
    adapters.close()
    migrate(command.downgrade, "0002")
    migrate(command.upgrade, "head")
    adapters = AdapterStore.open(tmp_path / "data", model, database=url)
    assert {tenant.name for tenant in TenantStore(adapters.database).snapshot().tenants} == {"public", "acme"}
    adapters.close()
    engine.dispose()


def test_a_limit_that_a_newer_server_stored_is_left_alone(adapters: AdapterStore, store: TenantStore) -> None:
    store.create("acme", 1.0, Limits(max_rank=4))
    with adapters.database._engine.begin() as connection:
        query = sa.text("UPDATE tenants SET limits = :limits WHERE name = 'acme'")
        connection.execute(query, {"limits": '{"max_rank": 4, "max_moons": 1}'})
    (acme,) = [tenant for tenant in store.snapshot().tenants if tenant.name == "acme"]
    assert acme.limits == Limits(max_rank=4)
    store.change("acme", None, lambda limits: Limits(max_tokens=5))
    with adapters.database._engine.connect() as connection:
        (stored,) = connection.scalars(sa.text("SELECT limits FROM tenants WHERE name = 'acme'"))
    assert (json.loads(stored) if isinstance(stored, str) else stored) == {"max_tokens": 5, "max_moons": 1}
