"""A server that nobody uses leaves the registry's threads alone, and still hears of what another server changes."""

from __future__ import annotations

import time

from heddle.api.tenants.records import Limits
from heddle.api.tenants.service import FOLLOW_SECONDS

from .conftest import RunningServer


def test_an_idle_server_asks_no_thread_about_the_registry_until_it_has_changed(
    own_server: RunningServer, monkeypatch
):
    server = own_server
    assert server.state.services is not None
    tenants, adapters = server.state.services.tenants._store, server.state.services.adapters._store
    asked: list[str] = []
    for store in (tenants, adapters):
        question = store.revision
        monkeypatch.setattr(
            store, "revision", lambda question=question: (asked.append("asked"), question())[1]
        )
    time.sleep(2 * FOLLOW_SECONDS)  # what came before is followed by now
    asked.clear()
    time.sleep(4 * FOLLOW_SECONDS)
    assert not asked
    tenants.create("from-elsewhere", 2.0, Limits())
    server.wait_until(lambda: "from-elsewhere" in server.engine.shares)
    assert asked
