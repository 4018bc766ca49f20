"""What an engine does while nobody asks anything: the pool's memory is taken before a prompt needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heddle.core.engine import pool_setup
from heddle.core.engine.host_memory import populate, resident_part
from heddle.core.engine.pool_setup import PoolPages
from heddle.kernels.large_pages import LARGE_PAGE, lazy_zeros
from heddle.kernels.pool import Pool, PoolLayout

from ..api.server_process import served

PAGES = 6
LAYOUT = PoolLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, kv_dtype=torch.float32)


_probe = lazy_zeros((LARGE_PAGE,))
takes_pages = pytest.mark.skipif(
    not populate(_probe.data_ptr(), LARGE_PAGE), reason="this system takes no pages ahead (Linux 5.14 does)"
)


@pytest.fixture
def pool() -> Pool:
    """Of six large pages and half a one."""
    return Pool(LAYOUT, (2 * PAGES + 1) * LARGE_PAGE // 2 // LAYOUT.block_bytes)


def resident(pool: Pool) -> int:
    return resident_part(pool.memory.data_ptr(), pool.memory.nbytes)


def take_all(pages: PoolPages) -> int:
    count = 0
    while pages.take_one():
        count += 1
    return count


@takes_pages
def test_pages_are_taken_one_by_one_and_keep_what_they_hold(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_setup, "available_memory", lambda: 1 << 40)
    pool.memory[0].fill_(7)
    pages, sizes = PoolPages(pool), []
    while pages.take_one():
        sizes.append(resident(pool))
    assert sizes == [LARGE_PAGE * (n + 1) for n in range(PAGES)]
    assert (pool.memory[0] == 7).all()
    assert not pool.memory[1:].any()


@takes_pages
def test_no_more_than_half_of_what_is_available_is_taken(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, available = PoolPages(pool), PAGES * 2 * LARGE_PAGE
    for short in (1, 0):
        monkeypatch.setattr(pool_setup, "available_memory", lambda short=short: available - short)
        assert take_all(pages) == (0 if short else PAGES)


def test_where_the_system_has_no_such_call_nothing_happens(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_setup, "populate", lambda address, size: False)
    before = resident(pool)
    assert take_all(PoolPages(pool)) == 0
    assert resident(pool) == before


@takes_pages
def test_an_idle_server_takes_its_pool(base: Path, tmp_path: Path) -> None:
    size = 64 << 20
    with served(data_dir=tmp_path / "data", engine={"model": base, "pool_memory": size}) as server:

        def written() -> int:
            parts = server.client.get("/admin/memory").json()["process"]
            return next(part["bytes"] for part in parts if part["part"].startswith("pool"))

        server.wait_until(lambda: written() > size - 2 * LARGE_PAGE)
        assert written() <= size
        assert server.complete().status_code == 200
