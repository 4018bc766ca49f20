"""The threads that share a kernel's work: nothing is left out, done twice or waited for in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from heddle.kernels import cpu
from heddle.kernels.cpu.compiled import compiled
from heddle.kernels.cpu.team import TEAM, Team, ends_share, share


@compiled
def _mark(part, parts, counts, sums, rounds):  # type: ignore[no-untyped-def]
    """Count visits of each part; each part works on memory of its own."""
    counts[part] += 1
    for i in range(rounds):
        sums[part] += part * i % 7


@compiled
def _mark_all(words, parts, counts, sums, rounds):  # type: ignore[no-untyped-def]
    share(words, parts, _mark, (counts, sums, rounds))


@compiled
def _own_memory(words, parts, out):  # type: ignore[no-untyped-def]
    """The shared arguments include an array that only this call holds."""
    source = np.arange(parts) * 3
    share(words, parts, _copy, (out, source))


@compiled
def _copy(part, parts, out, source):  # type: ignore[no-untyped-def]
    out[part] = source[part]


@pytest.fixture
def team() -> Iterator[Team]:
    """Three threads, also on a machine with fewer cores: then helpers come late, which must not matter."""
    team = Team()
    team.resize(3)
    yield team
    team.resize(1)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_every_part_is_done_once(team: Team, parts: int) -> None:
    for rounds in (0, 1, 1000):
        counts, sums = np.zeros(parts, np.int64), np.zeros(parts, np.int64)
        for _ in range(50):
            _mark_all(team.words, parts, counts, sums, rounds)
        assert (counts == 50).all()
        assert sums.tolist() == [50 * sum(p * i % 7 for i in range(rounds)) for p in range(parts)]


def test_many_short_runs_one_after_another(team: Team) -> None:
    """A helper that is late for one run must not take part in the next one with what it read before."""
    few, many = np.zeros(3, np.int64), np.zeros(40, np.int64)
    sums = np.zeros(40, np.int64)
    for _ in range(5000):
        _mark_all(team.words, 3, few, sums, 0)
        _mark_all(team.words, 40, many, sums, 0)
    assert (few == 5000).all()
    assert (many == 5000).all()


def test_arguments_live_until_all_parts_are_done(team: Team) -> None:
    for parts in (2, 50, 1000):
        out = np.zeros(parts, np.int64)
        for _ in range(20):
            out[:] = -1
            _own_memory(team.words, parts, out)
            assert (out == np.arange(parts) * 3).all()


@compiled
def _greedy(part, parts, sizes, out):  # type: ignore[no-untyped-def]
    out[part] = np.zeros(sizes[part], np.float64).sum() + 1


@compiled
def _greedy_all(words, parts, sizes, out):  # type: ignore[no-untyped-def]
    share(words, parts, _greedy, (sizes, out))


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_part_without_memory_is_an_error(helpers: int) -> None:
    """Not a result with a hole in it; and the next call works."""
    team = Team()
    team.resize(1 + helpers)
    sizes, out = np.array([1, 1, 2**60, 1]), np.zeros(4)
    with pytest.raises(MemoryError, match="scratch"):
        _greedy_all(team.words, 4, sizes, out)
    sizes[2] = 1
    _greedy_all(team.words, 4, sizes, out)
    assert (out == 1).all()
    team.resize(1)


def test_two_callers_at_once(team: Team) -> None:
    """The second does its parts alone."""
    totals = [np.zeros(20, np.int64) for _ in range(2)]

    def work(counts: np.ndarray) -> None:
        sums = np.zeros(20, np.int64)
        for _ in range(2000):
            _mark_all(team.words, 20, counts, sums, 50)

    callers = [threading.Thread(target=work, args=(counts,)) for counts in totals]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counts == 2000).all() for counts in totals)


def _helpers_seconds(team: Team) -> float:
    """CPU time of its threads; others of this process may be busy."""
    own = {helper.native_id for helper in team._helpers}
    return sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id in own)


def test_helpers_sleep_when_idle_and_come_back(team: Team) -> None:
    counts, sums = np.zeros(8, np.int64), np.zeros(8, np.int64)
    _mark_all(team.words, 8, counts, sums, 0)
    deadline = time.monotonic() + 20
    while not team._someone_waits and time.monotonic() < deadline:
        time.sleep(0.05)
    assert team._someone_waits, "a helper still spins"
    time.sleep(0.3)
    busy = _helpers_seconds(team)
    time.sleep(0.2)
    assert _helpers_seconds(team) - busy < 0.1
    _mark_all(team.words, 8, counts, sums, 0)
    assert (counts == 2).all()


def test_resizing(team: Team) -> None:
    counts, sums = np.zeros(9, np.int64), np.zeros(9, np.int64)
    for i, size in enumerate((1, 2, 4, 2, 1)):
        team.resize(size)
        assert team.num_threads == size
        _mark_all(team.words, 9, counts, sums, 10)
        assert (counts == i + 1).all()


def test_kernels_get_the_cores_there_are() -> None:
    before = torch.get_num_threads()
    try:
        assert cpu.set_num_threads(1) == 1
        assert 1 <= cpu.set_num_threads(10_000) <= 10_000
        assert cpu.set_num_threads(0) == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_bits_do_not_depend_on_the_number_of_threads(
    attention_case: Callable[..., Any], lora_case: Callable[..., Any]
) -> None:
    weight, scale = torch.randint(-127, 128, (600, 300), dtype=torch.int8), torch.rand(600)
    x, gate_up, norm = torch.randn(90, 300), torch.randn(90, 1200), torch.randn(300)
    attention = attention_case([(0, 40), (300, 1), (7, 12), (64, 5)], heads=9, kv_heads=3, head_dim=64)
    adapters = lora_case(
        [(0, list(range(60))), (1, [70, 3, 80])], [{0: 8, 2: 3}, {0: 65}], {0: (500, 300), 2: (99, 300)}
    )

    def everything() -> list[torch.Tensor]:
        out = torch.ones(90, 599)
        cpu.add_lora(out, x, adapters.pool, adapters.layer, [0, 2], [0, 500, 599], adapters.lora)
        angles = torch.linspace(0, 1, 400 * 32).view(400, 32)
        cpu.rope_and_write_kv(
            attention.q, attention.k, attention.v, attention.positions, angles.cos(), angles.sin(), attention.pool,
            0, attention.batch.slot_mapping,
        )  # fmt: skip
        return [
            out,
            attention.pool.memory.clone(),
            cpu.paged_attention(attention.q, attention.pool, attention.layer, attention.batch, 0.125),
            cpu.linear_int8(x, cpu.hold(weight.clone()), scale, None),
            cpu.linear_invariant(x, cpu.hold(weight.half()), None),
            cpu.silu_mul(gate_up),
            *cpu.add_rms_norm(x, x * 2, norm, 1e-5),
        ]

    before = TEAM.num_threads
    try:
        TEAM.resize(1)
        alone = everything()
        for threads in (2, 3):
            TEAM.resize(threads)
            for _ in range(5):
                assert all(torch.equal(got, want) for got, want in zip(everything(), alone, strict=True))
    finally:
        TEAM.resize(before)


@compiled
def _ends(parts, threads, out):  # type: ignore[no-untyped-def]
    for part in range(parts):
        out[part] = ends_share(part, parts, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_a_share_ends_where_the_next_threads_begins(threads: int) -> None:
    for parts in (1, 2, 3, 5, 16, 97):
        found = np.zeros(parts, np.bool_)
        _ends(parts, threads, found)
        shares = [range(parts * i // threads, parts * (i + 1) // threads) for i in range(threads)]
        assert set(np.flatnonzero(found)) == {share[-1] for share in shares if share}
