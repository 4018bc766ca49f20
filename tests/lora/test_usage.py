"""Usage and quotas in the registry, under several stores at once: on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from heddle.lora.errors import AdapterInvalid, StoreError
from heddle.lora.quota import Quota
from heddle.lora.schema import TenantRow
from heddle.lora.store import AdapterStore
from heddle.lora.usage import OfAdapter, OfTenant, Usage, accounts

CREATED = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
WHEN = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
"""After the tenant public was made."""
OpenStore = Callable[..., AdapterStore]


def add_tenant(store: AdapterStore, name: str, created: datetime = CREATED) -> None:
    store.database.write(lambda session: session.add(TenantRow(name=name, created_at=created)))


def made(store: AdapterStore) -> datetime:
    """When public was."""
    query = sa.select(TenantRow.created_at).where(TenantRow.name == "public")
    return store.database.read(lambda session: session.scalars(query).one())


def test_two_servers_add_to_the_same_counters(open_store: OpenStore) -> None:
    """Each flushes on its own, in threads, rows that exist already and rows that do not."""
    stores = [open_store(), open_store()]
    for tenant in "abc":
        add_tenant(stores[0], tenant)

    def work(number: int) -> None:
        store = stores[number % 2]
        for round_ in range(8):
            for tenant in "abc":
                used = Usage(1, 2, 3, 1, WHEN + timedelta(seconds=round_))
                store.usage.count(
                    [OfTenant(tenant, CREATED), OfAdapter(tenant, CREATED, "public", f"x{round_ % 3}")], used
                )
            store.usage.flush()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    for store in stores:
        for tenant in "abc":
            found = store.usage.of_tenant(tenant)
            assert found.usage == Usage(48, 96, 144, 48, WHEN + timedelta(seconds=7))
            assert [(one.owner, one.adapter, one.usage.requests) for one in found.by_adapter] == [
                ("public", "x0", 18), ("public", "x1", 18), ("public", "x2", 12),
            ]  # fmt: skip


def test_what_is_counted_but_not_written_is_in_the_answer_and_what_is_written_outlives_the_server(
    open_store: OpenStore,
) -> None:
    store = open_store()
    store.usage.count(accounts("public", made(store), []), Usage(1, 10, 5, 0, WHEN))
    assert store.usage.of_tenant("public").usage == Usage(1, 10, 5, 0, WHEN)
    store.usage.count(accounts("public", made(store), []), Usage(1, 1, 1, 1, WHEN))
    store.close()
    found = open_store().usage.of_tenant("public")
    assert found.usage == Usage(2, 11, 6, 1, WHEN)
    ((base),) = found.by_adapter
    assert (base.owner, base.adapter, base.usage) == ("", "", Usage(2, 11, 6, 1, WHEN))


def test_a_write_that_fails_loses_nothing(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.usage.count([OfTenant("public", made(store))], Usage(1, 1, 1, 0, WHEN))

    def broken(_work: object) -> None:
        raise StoreError("overloaded", "the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "write", broken)
        with pytest.raises(StoreError):
            store.usage.flush()
        store.usage.count([OfTenant("public", made(store))], Usage(1, 1, 1, 0, WHEN))
    assert store.usage.of_tenant("public").usage.requests == 2


def test_the_usage_of_a_tenant_that_is_gone_is_dropped(store: AdapterStore) -> None:
    add_tenant(store, "gone")
    store.usage.count(accounts("gone", CREATED, []), Usage(1, 1, 1, 0, WHEN))
    store.usage.flush()
    store.usage.count(accounts("gone", CREATED, []), Usage(1, 1, 1, 0, WHEN))
    store.usage.count(accounts("public", made(store), []), Usage(1, 1, 1, 0, WHEN))
    store.database.write(
        lambda session: session.execute(sa.delete(TenantRow).where(TenantRow.name == "gone"))
    )
    store.usage.flush()
    with pytest.raises(StoreError, match="gone"):
        store.usage.of_tenant("gone")
    assert store.usage.of_tenant("public").usage.requests == 1


def test_what_a_removed_tenants_requests_used_is_not_the_next_ones_of_its_name(store: AdapterStore) -> None:
    """Also where they end after the new one was made, and both are written at once."""
    again = CREATED + timedelta(microseconds=1)
    add_tenant(store, "gone")
    store.usage.count(accounts("gone", CREATED, []), Usage(1, 1, 1, 0, WHEN))
    store.database.write(
        lambda session: session.execute(sa.delete(TenantRow).where(TenantRow.name == "gone"))
    )
    add_tenant(store, "gone", again)
    store.usage.count(accounts("gone", again, []), Usage(1, 20, 30, 0, WHEN))
    store.usage.count(accounts("gone", CREATED, []), Usage(1, 1, 1, 0, WHEN + timedelta(seconds=2)))
    found = store.usage.of_tenant("gone")
    assert found.usage == Usage(1, 20, 30, 0, WHEN)
    assert [one.usage for one in found.by_adapter] == [found.usage]
    store.usage.count(accounts("gone", CREATED, []), Usage(1, 1, 1, 0, WHEN + timedelta(seconds=3)))
    assert store.usage.of_tenant("gone").usage == found.usage


def test_a_request_on_several_adapters_counts_once_for_its_tenant(
    store: AdapterStore, folders: list[Path]
) -> None:
    records = [store.register(folder, name=name).record for folder, name in zip(folders, "aab"[::2])]
    twice = [*records, records[0]]
    store.usage.count(accounts("public", made(store), twice), Usage(1, 7, 5, 0, WHEN))
    found = store.usage.of_tenant("public")
    assert found.usage == Usage(1, 7, 5, 0, WHEN)
    assert [(one.adapter, one.usage.requests) for one in found.by_adapter] == [("a", 1), ("b", 1)]
    assert store.get("a").requests == 1
    assert (found.adapters, found.adapter_bytes) == (2, sum(record.size_bytes for record in records))


def test_what_was_used_of_an_adapter_stays_when_it_is_removed(
    store: AdapterStore, folders: list[Path]
) -> None:
    record = store.register(folders[0], name="a").record
    store.usage.count(accounts("public", made(store), [record]), Usage(1, 7, 5, 0, WHEN))
    store.remove("a")
    found = store.usage.of_tenant("public")
    assert [(one.adapter, one.usage.requests) for one in found.by_adapter] == [("a", 1)]
    assert (found.adapters, found.adapter_bytes) == (0, 0)


# ------------------------------------------------------------------ quotas


def test_registrations_at_several_servers_at_once_stay_within_the_quota(
    open_store: OpenStore, folders: list[Path]
) -> None:
    """Whichever weights they bring: of names, and of bytes."""
    stores = [open_store(), open_store()]
    size = stores[0].register(folders[0], name="first").record.size_bytes
    for quota, room in ((Quota(adapters=3), 2), (Quota(adapter_bytes=5 * size), 2)):

        def register(number: int, quota: Quota = quota) -> str:
            try:
                name = f"n{number}-{len(stores[0].list())}"
                stores[number % 2].register(folders[number % 3], name=name, quota=quota)
            except StoreError as error:
                return error.code
            return "done"

        with ThreadPoolExecutor(6) as threads:
            outcomes = sorted(threads.map(register, range(6)))
        assert outcomes == ["done"] * room + ["rate_limit_exceeded"] * (6 - room)


def test_a_quota_is_checked_before_a_file_is_read(store: AdapterStore, folders: list[Path]) -> None:
    store.register(folders[0], name="a")
    folders[1].joinpath("adapter_model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(StoreError, match="adapters = 1"):
        store.register(folders[1], name="b", quota=Quota(adapters=1))
    with pytest.raises(AdapterInvalid):
        store.register(folders[1], name="b", quota=Quota(adapters=2))


@pytest.mark.parametrize("how", ["register", "dry run", "stage"])
def test_each_limit_is_named_with_its_value(store: AdapterStore, folders: list[Path], how: str) -> None:
    def register(quota: Quota) -> None:
        if how == "stage":
            store.stage(folders[1], name="b", quota=quota)
        else:
            store.register(folders[1], name="b", quota=quota, dry_run=how == "dry run")

    size = store.register(folders[0], name="a").record.size_bytes
    for quota, limit in (
        (Quota(adapters=1), "adapters = 1"),
        (Quota(adapter_bytes=2 * size - 1), f"adapter_bytes = {2 * size - 1}"),
    ):
        with pytest.raises(StoreError, match=limit) as refused:
            register(quota)
        assert refused.value.code == "rate_limit_exceeded"
    with pytest.raises(AdapterInvalid, match="rank 2 is above the limit of 1"):
        register(Quota(max_rank=1))
    register(Quota(adapters=2, adapter_bytes=2 * size, max_rank=2))
    with pytest.raises(AdapterInvalid, match="above the limit of 64"):
        raise_rank(store, folders[2])


def raise_rank(store: AdapterStore, folder: Path) -> None:
    """A tenant's limit never raises the server's own."""
    from .peft_adapters import AdapterFolder

    adapter = AdapterFolder(folder)
    adapter.store({name: _wider(value, "lora_A" in name) for name, value in adapter.tensors.items()})
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 65'))
    store.register(folder, name="wide", quota=Quota(max_rank=1000))


def _wider(value: object, is_a: bool) -> object:
    import numpy as np

    array = np.asarray(value)
    return np.concatenate([array] * 33, axis=0 if is_a else 1)[: 65 if is_a else None, : None if is_a else 65]
