"""Grammars that wait to be compiled: tenants take turns, and one that floods takes no other's place."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from heddle.core.engine.grammars import Grammars
from heddle.core.messages import Generate, TenantShare
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.block_pool import BlockPool
from heddle.core.scheduling.tenants import Tenants
from heddle.core.text.grammar import GrammarCompiler, GrammarError


class SlowCompiler:
    """Compiles one grammar each time it is told to; remembers their order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._go = threading.Semaphore(0)

    def compile(self, grammar: str) -> str:
        self.order.append(grammar)
        assert self._go.acquire(timeout=30)
        if grammar == "wrong":
            raise GrammarError("nothing satisfies it")
        return grammar

    def go_on(self, count: int) -> None:
        for _ in range(count):
            self._go.release()


class World:
    def __init__(self) -> None:
        self.compiler = SlowCompiler()
        self.woken = threading.Semaphore(0)
        self.grammars = Grammars(
            lambda: cast(GrammarCompiler, self.compiler), 10, lambda: cast(Any, self.woken.release())
        )
        self._keys = 0

    def begin(self, tenant: str, grammar: str) -> int:
        self._keys += 1
        params = SamplingParams(grammar=grammar, seed=0)
        self.grammars.begin(
            Generate(key=self._keys, group=self._keys, prompt_token_ids=[1], params=params, tenant=tenant)
        )
        return self._keys

    def finished(self, count: int) -> list[tuple[int, str | None]]:
        """Keys of the next ones, with the code of the error."""
        ready: list[tuple[int, str | None]] = []
        while len(ready) < count:
            assert self.woken.acquire(timeout=30)
            ready += [(c.key, None if error is None else error.code) for c, error in self.grammars.drain()]
        return ready


def test_tenants_take_turns_however_many_one_of_them_sends() -> None:
    world = World()
    world.begin("loud", "loud 0")
    while not world.compiler.order:  # it is being compiled
        time.sleep(0.001)
    for index in range(1, 20):
        world.begin("loud", f"loud {index}")
    for index in range(2):
        world.begin("quiet", f"quiet {index}")
    world.compiler.go_on(22)
    world.finished(22)
    assert world.compiler.order[:5] == ["loud 0", "loud 1", "quiet 0", "loud 2", "quiet 1"]
    assert world.compiler.order[5:] == [f"loud {index}" for index in range(3, 20)]
    world.grammars.close()


def test_what_waits_is_counted_by_tenant_to_its_end_or_abort() -> None:
    world = World()
    first, wrong = world.begin("a", "first"), world.begin("a", "wrong")
    left = world.begin("b", "left")
    assert (world.grammars.waiting, dict(world.grammars.by_tenant)) == (3, {"a": 2, "b": 1})
    world.grammars.forget([left, 99])
    assert (world.grammars.waiting, dict(world.grammars.by_tenant)) == (2, {"a": 2})
    world.compiler.go_on(3)
    assert world.finished(2) == [(first, None), (wrong, "invalid_request")]
    assert (world.grammars.waiting, dict(world.grammars.by_tenant)) == (0, {})
    assert "left" not in world.compiler.order, "nobody wants it any more"
    assert world.grammars.guides.keys() == {first}
    world.grammars.close()


def tenants(told_apart: bool = True, **weights: float) -> Tenants:
    found = Tenants(BlockPool(8), max_num_seqs=4, max_queued=12, told_apart=told_apart)
    for name, weight in weights.items():
        found.set(TenantShare(name=name, weight=weight))
    return found


@pytest.mark.parametrize(
    ("compiling", "tenant", "refused"),
    [
        ({"loud": 11}, "loud", False),
        ({"loud": 12}, "loud", True),
        ({"loud": 12}, "quiet", False),
        ({"loud": 12, "quiet": 5}, "quiet", False),
        ({"loud": 12, "quiet": 6}, "quiet", True),  # half of the places are its own
        ({"loud": 12, "heavy": 8}, "heavy", False),
        ({"loud": 12, "heavy": 9}, "heavy", True),  # three quarters
        ({"loud": 12, "quiet": 6}, "third", False),
        ({f"t{index}": 1 for index in range(100)}, "t5", True),
        ({f"t{index}": 1 for index in range(100)}, "new", False),  # one place at least
    ],
)
def test_where_as_many_wait_as_may_each_tenant_has_its_share(
    compiling: dict[str, int], tenant: str, refused: bool
) -> None:
    refusal = tenants(heavy=3).grammar_refusal(tenant, compiling)
    assert (refusal is not None) == refused
    if refusal is not None:
        assert refusal.code == "overloaded"


def test_where_tenants_are_not_told_apart_all_have_one_bound() -> None:
    first_come = tenants(told_apart=False, heavy=3)
    assert first_come.grammar_refusal("quiet", {"loud": 11}) is None
    assert first_come.grammar_refusal("quiet", {"loud": 12}) is not None
