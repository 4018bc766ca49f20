"""Registrations, replacements and removals at the same moment end in one history that anyone can explain."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from heddle.lora.canonical import open_adapter
from heddle.lora.errors import AdapterCorrupt, StoreError
from heddle.lora.records import Registration
from heddle.lora.store import AdapterStore

from .peft_adapters import AdapterFolder


@pytest.fixture
def folders(qv: AdapterFolder, tmp_path: Path) -> list[Path]:
    made = []
    for number in range(4):
        folder = AdapterFolder(Path(shutil.copytree(qv.path, tmp_path / f"adapter{number}")))
        folder.store({name: value + number for name, value in folder.tensors.items()})
        made.append(folder.path)
    return made


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results, or StoreErrors, of calls that all start together."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        try:
            return call()
        except StoreError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_of_sixteen_registrations_of_one_name_one_wins(
    open_store: Callable[[], AdapterStore], folders: list[Path]
) -> None:
    stores = [open_store(), open_store()]
    calls = [
        lambda number=number: stores[number % 2].register(folders[number % 4 // 2], name="a")
        for number in range(16)
    ]
    outcomes = at_once(calls)
    winners = [o for o in outcomes if isinstance(o, Registration) and o.created]
    assert len(winners) == 1
    for outcome in outcomes:
        if isinstance(outcome, Registration):
            assert outcome.record.digest == winners[0].record.digest
        else:
            assert outcome.code == "adapter_exists"
    (version,) = stores[0].versions("a")
    assert version.digest == winners[0].record.digest
    with open_adapter(stores[1].path(version.digest)) as stored:
        assert stored.digest == version.digest


def test_replacements_at_once_get_each_a_number_of_its_own(
    open_store: Callable[[], AdapterStore], folders: list[Path]
) -> None:
    stores = [open_store(), open_store()]
    stores[0].register(folders[0], name="a")
    outcomes = at_once(
        [lambda n=n: stores[n % 2].register(folders[n % 4], name="a", replace=True) for n in range(12)]
    )
    created = [o.record.version for o in outcomes if o.created]
    versions = stores[0].versions("a")
    assert sorted([1, *created]) == [v.version for v in versions] == list(range(1, len(versions) + 1))
    assert [v.current for v in versions] == [False] * (len(versions) - 1) + [True]
    for before, after in pairwise(versions):
        assert before.digest != after.digest


def test_a_random_walk_of_many_threads_leaves_one_consistent_history(
    open_store: Callable[[], AdapterStore], folders: list[Path]
) -> None:
    stores = [open_store(), open_store()]
    allowed = {"adapter_exists", "adapter_not_found"}

    def walk(seed: int) -> list[str]:
        chance = random.Random(seed)
        codes = []
        for _ in range(15):
            store, name = stores[chance.randrange(2)], chance.choice("ab")
            action = chance.randrange(5)
            try:
                if action <= 1:
                    done = store.register(chance.choice(folders), name=name, replace=action == 1)
                    open_adapter(store.path(done.record.digest), verify=False).close()
                elif action == 2:
                    removal = store.remove(chance.choice([name, f"{name}@{chance.randrange(1, 6)}"]))
                    store.collect(removal.unreferenced)
                elif action == 3:
                    store.patch(name, version=chance.randrange(1, 6), pinned=chance.random() < 0.5)
                else:
                    record = store.get(name)
                    assert record.current
                    assert record.version_id is not None
                    store.usage.touch(record.version_id)
                    store.usage.flush()
            except StoreError as error:
                codes.append(error.code)
            except AdapterCorrupt:
                pass  # another thread removed it in between
        return codes

    with ThreadPoolExecutor(6) as threads:
        for codes in threads.map(walk, range(6)):
            assert set(codes) <= allowed
    records = stores[0].all_versions()
    assert records == stores[1].all_versions()
    for name in {record.name for record in records}:
        versions = [record for record in records if record.name == name]
        numbers = [record.version for record in versions]
        assert numbers == sorted(set(numbers))
        assert [record.current for record in versions].count(True) == 1
    for digest in {record.digest for record in records}:
        with open_adapter(stores[0].path(digest)) as stored:
            assert stored.digest == digest
    # What nobody names is gone after a restart, and nothing else.
    again = open_store()
    assert set(again._blobs.digests()) == {record.digest for record in records}


def test_usage_counted_and_written_by_many_threads_is_counted_once(
    open_store: Callable[[], AdapterStore], folders: list[Path]
) -> None:
    stores = [open_store(), open_store()]
    version_id = stores[0].register(folders[0], name="a").record.version_id
    assert version_id is not None

    def count(number: int) -> None:
        for _ in range(10):
            stores[number % 2].usage.touch(version_id, prompt_tokens=2, generated_tokens=3)
            stores[number % 2].usage.flush()

    at_once([lambda number=number: count(number) for number in range(6)])
    for store in stores:
        record = store.get("a")
        assert (record.requests, record.prompt_tokens, record.generated_tokens) == (60, 120, 180)


def test_registration_and_collection_of_the_same_weights_never_lose_the_file(
    open_store: Callable[[], AdapterStore], folders: list[Path]
) -> None:
    stores = [open_store(), open_store()]
    digest = stores[0].register(folders[0], name="first").record.digest
    stores[0].remove("first")
    for number in range(12):
        outcomes = at_once(
            [
                lambda number=number: stores[0].register(folders[0], name=f"n{number}"),
                lambda: stores[1].collect([digest]),
                lambda: stores[0].collect([digest]),
            ]
        )
        assert outcomes[0].created
        with open_adapter(stores[1].path(digest)) as stored:
            assert stored.digest == digest
        stores[0].remove(f"n{number}")
