"""Holds on adapter versions: what names mean, what was removed under a request, and what came back before it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from heddle.api.adapters import holds as holds_module
from heddle.api.adapters.holds import Holds
from heddle.api.adapters.revisions import Revisions
from heddle.api.workers import Pool


class Kept:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Registry:
    """A store whose answers the test sets; `meaning` of a reference is a digest."""

    def __init__(self) -> None:
        self.meaning: dict[str, str] = {}
        self.present = 1
        self.at_once = True
        self.lost: set[str] = set()
        self.kept: dict[str, list[Kept]] = {}
        self.looked_up: list[str] = []

    def revision_at_once(self) -> int | None:
        return self.present if self.at_once else None

    def revision(self) -> int:
        return self.present

    def resolve_at(self, ref: str, tenant: str) -> tuple[Any, int]:
        self.looked_up.append(ref)
        return SimpleNamespace(digest=self.meaning.get(ref, ref)), self.present

    def keep(self, digest: str) -> Kept | None:
        if digest in self.lost:
            return None
        kept = Kept()
        self.kept.setdefault(digest, []).append(kept)
        return kept

    def remove(self, ref: str, tenant: str) -> Any:
        self.present += 1
        digest = self.meaning.pop(ref, ref)
        self.lost.add(digest)
        return SimpleNamespace(unreferenced=[digest])

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if digest in self.lost]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool("registry", 4)
    yield pool
    pool.close()


@pytest.fixture
async def holds(registry: Any, pool: Pool) -> Holds:
    return Holds(registry, pool)


async def test_what_a_name_means_is_asked_once_while_nothing_changes(registry: Registry, holds: Holds):
    registry.meaning["a"] = "one"
    for _ in range(3):
        assert (await holds.resolve("a", "public")).digest == "one"
        holds.release("one")
    assert registry.looked_up == ["a"]
    registry.meaning["a"] = "two"
    registry.present += 1  # any server's change
    assert (await holds.resolve("a", "public")).digest == "two"
    assert registry.looked_up == ["a", "a"]
    await holds.resolve("a", "another tenant")
    assert registry.looked_up == ["a", "a", "a"]


async def test_a_removed_adapter_is_freed_after_its_last_request(holds: Holds):
    await holds.resolve("a", "public")
    await holds.resolve("a", "public")
    holds.remove("a", "public")
    assert holds.freeable() == []
    assert not holds.release("a")
    assert holds.release("a")
    assert holds.freeable() == ["a"]
    assert holds.freeable() == []


async def test_weights_registered_again_under_a_request_are_not_freed_with_it(holds: Holds):
    await holds.resolve("a", "public")
    holds.remove("a", "public")
    holds.returned("a")
    assert not holds.release("a")
    assert holds.freeable() == []


async def test_weights_that_come_back_while_the_registry_is_asked_are_not_freed(
    registry: Registry, holds: Holds
):
    """Between the answer that nobody names them and the note of it they are registered again."""
    ask = registry.unreferenced

    def and_then_registered(digests: Iterable[str]) -> list[str]:
        gone = ask(digests)
        registry.lost.clear()
        if gone:
            holds.returned("a")
        return gone

    registry.unreferenced = and_then_registered  # type: ignore[method-assign]
    holds.remove("a", "public")
    assert holds.freeable() == []


async def test_a_held_adapters_file_is_kept_and_let_go_of_when_it_is_removed(
    registry: Registry, holds: Holds
):
    await holds.resolve("a", "public")
    await holds.resolve("a", "public")
    (kept,) = registry.kept["a"]
    holds.release("a")
    holds.release("a")
    await holds.resolve("a", "public")
    assert registry.kept["a"] == [kept], "the next request finds it kept"
    assert not kept.closed
    holds.remove("a", "public")
    assert holds.freeable() == []
    assert not kept.closed
    assert holds.release("a")
    assert holds.freeable() == ["a"]
    assert kept.closed


async def test_only_so_many_files_stay_open_for_nobody(
    registry: Registry, holds: Holds, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(holds_module, "IDLE_FILES", 2)
    for name in ("held", "a", "b", "c"):
        await holds.resolve(name, "public")
    for name in "abc":
        holds.release(name)
    closed = {name for name, (kept,) in registry.kept.items() if kept.closed}
    assert closed == {"a"}
    await holds.resolve("a", "public")
    assert [kept.closed for kept in registry.kept["a"]] == [True, False]
    holds.close()
    assert all(kept.closed for every in registry.kept.values() for kept in every)


async def test_a_version_removed_elsewhere_between_look_up_and_hold_is_looked_up_again(
    registry: Registry, holds: Holds
):
    """What was found is replaced at another server, and its file is gone before it could be kept."""
    registry.meaning["a"] = "old"
    registry.lost.add("old")
    keep = registry.keep

    def replaced(digest: str) -> Kept | None:
        registry.meaning["a"] = "new"
        return keep(digest)

    registry.keep = replaced  # type: ignore[method-assign]
    assert (await holds.resolve("a", "public")).digest == "new"
    assert (holds.count("old"), holds.count("new")) == (0, 1)


async def test_a_version_freed_between_look_up_and_hold_is_looked_up_again(registry: Registry, holds: Holds):
    """A removal is carried out whole while the answer of the look-up is on its way."""
    registry.meaning["a"] = "old"
    look_up = registry.resolve_at

    def removed_behind(ref: str, tenant: str) -> tuple[Any, int]:
        found = look_up(ref, tenant)
        if found[0].digest == "old":
            holds.remove("a", tenant)
            registry.meaning["a"] = "new"
            assert holds.freeable() == ["old"]
        return found

    registry.resolve_at = removed_behind  # type: ignore[method-assign]
    assert (await holds.resolve("a", "public")).digest == "new"
    assert (holds.count("old"), holds.count("new")) == (0, 1)


async def test_what_another_server_removed_is_freed_once_no_request_holds_it(
    registry: Registry, holds: Holds
):
    await holds.resolve("held", "public")
    await holds.resolve("kept", "public")
    holds.release("kept")
    registry.lost |= {"held", "idle", "kept"}
    holds.removed_elsewhere(["idle", "other"])
    assert sorted(holds.freeable()) == ["idle", "kept"]
    assert registry.kept["kept"][0].closed
    assert holds.release("held")
    assert holds.freeable() == ["held"]


async def test_a_request_ends_while_a_removal_waits_for_the_database(
    registry: Registry, holds: Holds, pool: Pool
):
    await holds.resolve("a", "public")
    goes_on = threading.Event()
    remove = registry.remove

    def slow(ref: str, tenant: str) -> Any:
        assert goes_on.wait(10)
        return remove(ref, tenant)

    registry.remove = slow  # type: ignore[method-assign]
    removal = asyncio.ensure_future(pool(holds.remove, "b", "public"))
    await asyncio.sleep(0.01)
    assert not holds.release("a")  # would wait here for ever
    assert (await holds.resolve("a", "public")).digest == "a"
    goes_on.set()
    await removal


async def test_one_question_answers_everyone_who_came_before_it_was_put(registry: Any, pool: Pool):
    registry.at_once = False
    asked: list[int] = []
    put, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow() -> int:
        asked.append(registry.present)
        loop.call_soon_threadsafe(put.set)
        assert gate.wait(10)
        return asked[-1]

    registry.revision = slow
    revisions = Revisions(registry, pool)
    early = [asyncio.ensure_future(revisions.now()) for _ in range(5)]
    await put.wait()
    registry.present = 7
    late = [asyncio.ensure_future(revisions.now()) for _ in range(5)]
    late[0].cancel()  # nobody else minds
    await asyncio.sleep(0.01)
    gate.set()
    assert await asyncio.gather(*early) == [1] * 5
    assert await asyncio.gather(*late[1:]) == [7] * 4, "never an answer from before they asked"
    assert asked == [1, 7]


async def test_a_registry_out_of_reach_is_tried_again_by_the_next_request(registry: Any, pool: Pool):
    registry.at_once = False
    answers = iter([OSError("gone"), 5])

    def ask() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    registry.revision = ask
    revisions = Revisions(registry, pool)
    with pytest.raises(OSError, match="gone"):
        await revisions.now()
    assert await revisions.now() == 5
