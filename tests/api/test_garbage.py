"""Python looks for old garbage seldom, and not while much is alive; what is garbage goes in the end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from heddle.api import garbage


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def settled(monkeypatch) -> Iterator[None]:
    before = gc.get_threshold()
    monkeypatch.setattr(garbage, "EVERY_SECONDS", 0.01)
    garbage.settle()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def old_garbage() -> weakref.ref[Node]:
    """A cycle that nobody has and that the collections of young objects have let pass."""
    node = Node()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(node)


async def gone(node: weakref.ref[Node], rounds: int) -> bool:
    for _ in range(rounds):
        await asyncio.sleep(0.01)
        if node() is None:
            return True
    return False


async def test_many_new_objects_start_no_full_collection(settled):
    node = old_garbage()
    before = gc.get_stats()[2]["collections"]
    kept = [[n] for n in range(300_000)]
    assert gc.get_stats()[2]["collections"] == before
    assert node() is not None
    assert len(kept) == 300_000


async def test_old_garbage_is_collected_now_and_then(settled):
    node = old_garbage()
    collecting = asyncio.create_task(garbage.collect())
    assert await gone(node, 500)
    collecting.cancel()


async def test_a_collection_is_put_off_while_much_is_alive_but_not_for_ever(settled, monkeypatch):
    monkeypatch.setattr(garbage, "MANY", -1)
    monkeypatch.setattr(garbage, "PATIENCE", 20)
    node = old_garbage()
    collecting = asyncio.create_task(garbage.collect())
    assert not await gone(node, 5)
    assert await gone(node, 500)
    collecting.cancel()
