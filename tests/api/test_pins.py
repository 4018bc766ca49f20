"""Pins: they follow a name from version to version, and end where the pool has no room for them."""

from __future__ import annotations

from .refusals import refused


def test_pins_follow_a_name_to_its_current_version(own_server):
    engine, patch = own_server.engine, own_server.client.patch
    first = own_server.register("a", "a", pinned=True).json()
    assert first["pinned"] is True
    assert engine.adapters[first["digest"]].pinned
    second = own_server.register("a", "b", replace=True).json()
    assert second["pinned"] is True
    assert [engine.adapters[r["digest"]].pinned for r in (first, second)] == [False, True]
    assert patch("/adapters/a", json={"version": 1}).json()["pinned"] is True
    assert [engine.adapters[r["digest"]].pinned for r in (first, second)] == [True, False]
    assert patch("/adapters/a", json={"pinned": False}).json()["pinned"] is False
    assert not any(state.pinned for state in engine.adapters.values())


def test_a_pin_beyond_the_limit_is_409_and_changes_nothing(own_server):
    own_server.engine.pin_limit = 1
    own_server.register("a", "a", pinned=True)
    refused(own_server.register("b", "b", pinned=True), 409, "pin_limit")
    assert [a["name"] for a in own_server.client.get("/adapters").json()["data"]] == ["a"]
    own_server.register("b", "b")
    refused(own_server.client.patch("/adapters/b", json={"pinned": True}), 409, "pin_limit")
    assert own_server.client.get("/adapters/b").json()["pinned"] is False
    assert own_server.register("a", "c", replace=True, pinned=True).status_code == 201, "it moves"


def test_a_version_is_not_removed_where_the_pin_cannot_pass_to_the_next(own_server):
    engine, client = own_server.engine, own_server.client
    first = own_server.register("a", "a").json()
    second = own_server.register("a", "b", replace=True, pinned=True).json()
    engine.too_large = {first["digest"]}
    refused(client.delete("/adapters/a@2"), 409, "pin_limit")
    assert client.get("/adapters/a").json()["version"] == 2
    assert [engine.adapters[r["digest"]].pinned for r in (first, second)] == [False, True]
    engine.too_large = set()
    assert client.delete("/adapters/a@2").status_code == 204
    assert (
        client.get("/adapters/a").json() | {"pinned": True, "version": 1} == client.get("/adapters/a").json()
    )
    assert engine.adapters[first["digest"]].pinned
    assert client.delete("/adapters/a@1").status_code == 204, "the last version takes the pin with it"
