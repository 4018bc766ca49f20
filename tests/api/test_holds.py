"""Holds on adapter versions: what was removed under a request, and came back before the request ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heddle.api.holds import Holds


@pytest.fixture
def holds() -> Holds:
    store: Any = SimpleNamespace(
        resolve=lambda ref, tenant: SimpleNamespace(digest="d"),
        remove=lambda ref, tenant: SimpleNamespace(unreferenced=["d"]),
        keep=lambda digest: None,
    )
    return Holds(store)


def test_a_removed_adapter_is_freed_after_its_last_request(holds: Holds):
    holds.resolve("a", "public")
    holds.resolve("a", "public")
    holds.remove("a", "public")
    assert holds.freeable() == []
    assert not holds.release("d")
    assert holds.release("d")
    assert holds.freeable() == ["d"]
    assert holds.freeable() == []


def test_weights_registered_again_under_a_request_are_not_freed_with_it(holds: Holds):
    holds.resolve("a", "public")
    holds.remove("a", "public")
    holds.returned("d")
    assert not holds.release("d")
    assert holds.freeable() == []


class Kept:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_held_adapters_file_is_kept_from_the_first_request_to_the_last():
    kept: list[Kept] = []

    def keep(digest: str) -> Kept:
        kept.append(Kept())
        return kept[-1]

    store: Any = SimpleNamespace(resolve=lambda ref, tenant: SimpleNamespace(digest="d"), keep=keep)
    holds = Holds(store)
    holds.resolve("a", "public")
    holds.resolve("a", "public")
    assert len(kept) == 1
    holds.release("d")
    assert not kept[0].closed
    holds.release("d")
    assert kept[0].closed
    holds.resolve("a", "public")
    assert len(kept) == 2


def test_a_version_removed_elsewhere_between_look_up_and_hold_is_looked_up_again():
    """What was found is replaced at another server, and its file is gone before it could be kept."""
    found = iter(["old", "new"])
    store: Any = SimpleNamespace(
        resolve=lambda ref, tenant: SimpleNamespace(digest=next(found)),
        keep=lambda digest: None if digest == "old" else Kept(),
    )
    holds = Holds(store)
    assert holds.resolve("a", "public").digest == "new"
    assert (holds.count("old"), holds.count("new")) == (0, 1)


def test_what_another_server_removed_is_freed_once_no_request_holds_it():
    gone: list[str] = []
    store: Any = SimpleNamespace(
        resolve=lambda ref, tenant: SimpleNamespace(digest=ref),
        keep=lambda digest: None,
        unreferenced=lambda digests: [digest for digest in digests if digest in gone],
    )
    holds = Holds(store)
    holds.resolve("held", "public")
    gone += ["held", "idle"]
    holds.removed_elsewhere(["idle", "other"])
    assert holds.freeable() == ["idle"]
    assert holds.release("held")
    assert holds.freeable() == ["held"]
