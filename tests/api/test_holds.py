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
