"""The ledger: reserve, publish, release, evict."""

from __future__ import annotations

import pytest
from heddle.core.scheduling.block_pool import BlockPool
from heddle.core.scheduling.prefix_index import Content


class IdleAdapters:
    """Idle adapters with given scores and pages, as the pool asks for them."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.idle: dict[str, tuple[float, list[int]]] = {}
        pool.attach(self)

    def add(self, name: str, count: int, cost: float, uses: int = 1) -> None:
        blocks = self.pool.take_for_adapter(count)
        assert blocks is not None
        self.idle[name] = (self.pool.score(cost, uses), blocks)

    @property
    def idle_blocks(self) -> int:
        return sum(len(blocks) for _, blocks in self.idle.values())

    def lowest_score(self) -> float | None:
        return min((score for score, _ in self.idle.values()), default=None)

    def evict_lowest(self) -> None:
        name = min(self.idle, key=lambda name: self.idle[name][0])
        self.pool.give_back(self.idle.pop(name)[1])


def content(name: str, above: str = "", *digests: str) -> Content:
    """One token, which stands under its own name."""
    return Content(name.encode(), above.encode(), (ord(name[-1]),), digests)


def chain(pool: BlockPool, names: str) -> list[int]:
    """A held table whose blocks are published under these one-letter names, each after the one before."""
    table = pool.reserve((), len(names))
    assert table is not None
    for index, name in enumerate(names):
        parent = table[index - 1] if index else None
        above = names[index - 1] if index else ""
        table[index] = pool.publish(table[index], content(name, above), parent)
    return table


def found(pool: BlockPool, names: str) -> str:
    return "".join(name for name in names if pool.lookup(name.encode()) is not None)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(8)
    cached = chain(pool, "abc")
    pool.release(cached)
    before = pool.counts()
    assert pool.reserve(cached, 6) is None
    assert pool.take_for_adapter(9) is None
    assert pool.counts() == before == {"free": 5, "used": 0, "cached": 3, "adapters": 0}
    pool.check_integrity([], [])
    table = pool.reserve(cached, 5)
    assert table is not None
    assert table[:3] == cached
    assert sorted(table) == list(range(8))
    pool.check_integrity([table], [])


def test_tails_are_evicted_before_heads() -> None:
    """A head taken out before its tail would leave blocks that are counted as hits but cannot be."""
    pool = BlockPool(4)
    pool.release(chain(pool, "abcd"))
    left = []
    taken = []
    for _ in range(4):
        block = pool.reserve((), 1)
        assert block is not None
        taken += block
        left.append(found(pool, "abcd"))
        pool.check_integrity([taken], [])
    assert left == ["abc", "ab", "a", ""]


def test_the_tail_of_one_branch_does_not_take_the_shared_head() -> None:
    pool = BlockPool(5)
    first = chain(pool, "ab")
    second = pool.reserve(first[:1], 1)
    assert second is not None
    second[1] = pool.publish(second[1], content("c", "a"), second[0])
    pool.release(first)
    pool.check_integrity([second], [])
    taken = pool.reserve((), 2)  # the free ones; the idle tail b stays
    assert taken is not None
    assert found(pool, "abc") == "abc"
    assert pool.reserve((), 1) == [first[1]]
    assert found(pool, "abc") == "ac"
    assert pool.reserve((), 1) is None  # the head is held through c
    pool.release(second)
    assert pool.available == 2


def test_publishing_what_is_published_already_gives_one_copy() -> None:
    pool = BlockPool(6)
    first = chain(pool, "ab")
    twin = chain(pool, "ab")
    assert twin == first
    assert pool.counts() == {"free": 4, "used": 2, "cached": 0, "adapters": 0}
    pool.release(first)
    pool.check_integrity([twin], [])
    pool.release(twin)
    again = chain(pool, "abc")  # the twin of an idle block takes it up again
    assert again[:2] == first
    pool.check_integrity([again], [])


def test_a_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    table = chain(pool, "a")
    other = pool.reserve(table, 0)
    assert other == table
    pool.release(table)
    assert pool.counts()["used"] == 1
    pool.release(other)
    assert pool.counts()["cached"] == 1


@pytest.mark.parametrize(
    ("adapter_cost", "uses", "evicted_first"), [(1.0, 1, "adapter"), (50.0, 1, "prefix"), (4.0, 5, "prefix")]
)
def test_idle_prefixes_and_idle_adapters_stand_in_one_order(
    adapter_cost: float, uses: int, evicted_first: str
) -> None:
    """By cost to restore a block times uses: 10 for the prefix, `adapter_cost` * `uses` for the adapter."""
    pool = BlockPool(4, token_cost=10.0)
    adapters = IdleAdapters(pool)
    adapters.add("x", 2, adapter_cost, uses)
    pool.release(chain(pool, "ab"))
    assert pool.available == 4
    assert pool.reserve((), 1) is not None
    assert ("x" in adapters.idle) == (evicted_first == "prefix")
    assert found(pool, "ab") == ("a" if evicted_first == "prefix" else "ab")


def test_what_is_used_often_stays_but_not_for_ever() -> None:
    """Frequency counts, and the clock lets new things catch up with what was popular once."""
    pool = BlockPool(3)
    popular = chain(pool, "p")
    for _ in range(3):
        pool.release(popular)
        assert pool.reserve(popular, 0) == popular
    pool.release(popular)
    seen = 0
    for index in range(40):  # one-off blocks stream through the rest
        table = pool.reserve((), 2)
        assert table is not None
        if pool.lookup(b"p") is None:
            break
        seen += 1
        for offset in range(2):
            name = f"{index}.{offset}"
            pool.publish(table[offset], Content(name.encode(), b"", (2 * index + offset,)), None)
        pool.release(table)
    assert 3 <= seen < 40


def test_taking_up_blocks_again_and_again_does_not_grow_the_pool_s_own_memory() -> None:
    pool = BlockPool(4)
    table = chain(pool, "abc")
    for _ in range(1000):
        pool.release(table)
        assert pool.reserve(table, 0) == table
    assert len(pool._heap) <= 4 * pool.total + 1
    pool.release(table)
    pool.check_integrity([], [])


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    table = pool.reserve((), 2)
    assert table is not None
    pool.check_integrity([table], [])
    with pytest.raises(AssertionError):
        pool.check_integrity([table[:1]], [])
    with pytest.raises(AssertionError):
        pool.check_integrity([table], [[3]])
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check_integrity([table], [])
