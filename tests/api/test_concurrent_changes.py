"""Changes of one name at the same time: a receipt is of its own registration, a refused version never existed."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

SOURCES = ("a", "b", "c")


def test_each_receipt_is_of_what_was_sent(own_server):
    digests = {source: own_server.register(f"only-{source}", source).json()["digest"] for source in SOURCES}
    draw = random.Random(5)

    def replace(_: int) -> tuple[str, bool | None, httpx.Response]:
        source, pinned = draw.choice(SOURCES), draw.choice([None, True, False])
        fields: dict[str, Any] = {"replace": True, "preload": draw.choice([True, False])}
        return source, pinned, own_server.register("q", source, pinned=pinned, **fields)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(replace, range(60)))
    versions = own_server.client.get("/adapters/q/versions").json()["data"]
    made = {version["version"]: version["digest"] for version in versions}
    for source, pinned, answer in answers:
        assert answer.status_code in (200, 201), answer.text
        receipt = answer.json()
        assert receipt["digest"] == digests[source] == made[receipt["version"]]
        assert pinned is None or receipt["pinned"] is pinned
    created = [answer.json()["version"] for _, _, answer in answers if answer.status_code == 201]
    assert sorted(created) == sorted(made), "one version each"
    current = own_server.client.get("/adapters/q").json()
    assert own_server.engine.adapters[current["digest"]].pinned is current["pinned"]


def test_a_version_that_may_not_be_pinned_is_never_seen(own_server):
    """The pin of a name's new version is refused while requests and listings run."""
    before = own_server.register("x", "a", pinned=True).json()
    engine = own_server.engine
    pin, seen = engine.pin, []

    async def slow_refusal(digest: str, pinned: bool) -> Any:
        if pinned and digest != before["digest"]:
            await asyncio.sleep(0.4)
            engine.pin_limit, limit = 0, engine.pin_limit
            try:
                return await pin(digest, pinned)
            finally:
                engine.pin_limit = limit
        return await pin(digest, pinned)

    engine.pin = slow_refusal
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(own_server.register, "x", "c", replace=True)
        while not refused.done():
            seen.append(own_server.client.get("/adapters/x").json()["version"])
            seen.append(own_server.complete(adapter="x").json()["adapter"])
    assert (refused.result().status_code, refused.result().json()["error"]["code"]) == (409, "pin_limit")
    assert len(seen) > 2
    assert set(seen) == {1, "x@1"}
    assert engine.adapters[before["digest"]].pinned, "the pin is back where it was"
    assert set(engine.adapters) == {before["digest"]}, "what was refused is forgotten"
    del engine.pin
    again = own_server.register("x", "c", replace=True)
    assert (again.status_code, again.json()["version"], again.json()["pinned"]) == (201, 2, True)


def test_after_the_answer_to_a_change_no_request_sees_what_was_before(own_server):
    """Replacements, rollbacks and removals while others ask all the time, so that what names mean is remembered."""
    over = threading.Event()
    strange: list[httpx.Response] = []

    def ask(reference: str) -> None:
        with httpx.Client(base_url=own_server.url, timeout=20) as client:
            while not over.is_set():
                answer = client.post("/v1/completions", json={"prompt": "hi", "adapter": reference})
                if answer.status_code not in (200, 404):
                    strange.append(answer)

    def meant(reference: str) -> str:
        answer = own_server.complete(adapter=reference)
        body = answer.json()
        return body["adapter"] if answer.status_code == 200 else body["error"]["code"]

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask, reference) for reference in ("x", "x", "x@1")]
        try:
            for _ in range(8):
                first = own_server.register("x", "a").json()["version"]
                assert meant("x") == f"x@{first}"
                second = own_server.register("x", "b", replace=True).json()["version"]
                assert meant("x") == f"x@{second}"
                assert own_server.client.patch("/adapters/x", json={"version": first}).status_code == 200
                assert meant("x") == f"x@{first}"
                assert own_server.client.delete(f"/adapters/x@{first}").status_code == 204
                assert meant(f"x@{first}") == "model_not_found"
                assert meant("x") == f"x@{second}"
                assert own_server.client.delete("/adapters/x").status_code == 204
                assert meant("x") == meant(f"x@{second}") == "model_not_found"
        finally:
            over.set()
    assert all(one.exception() is None for one in asking)
    assert [answer.text for answer in strange] == []
    files = own_server.config.data_dir / "blobs"
    own_server.wait_until(lambda: not list(files.rglob("*.safetensors")), 10)


def test_a_name_that_means_what_it_meant_is_not_asked_for_again(own_server, monkeypatch):
    store = own_server.state.services.adapters._store
    asked: list[str] = []
    resolve_at = store.resolve_at

    def counting(ref: str, tenant: str) -> Any:
        asked.append(ref)
        return resolve_at(ref, tenant)

    monkeypatch.setattr(store, "resolve_at", counting)
    own_server.register("x", "a")
    for _ in range(5):
        assert own_server.complete(adapter="x").json()["adapter"] == "x@1"
    assert asked == ["x"]
    own_server.client.patch("/adapters/x", json={"description": "other words"})
    assert own_server.complete(adapter="x").json()["adapter"] == "x@1"
    assert asked == ["x", "x"], "any change may be one of its meaning"


def test_changes_that_wait_for_the_registry_keep_no_question_waiting(own_server, monkeypatch):
    """Its lock or its disk may be slow; whoever only asks, and every request for an adapter, goes on."""
    server = own_server
    assert server.register("a", "a").status_code == 201
    store = server.state.services.adapters._store
    change, waiting, released = store.patch, threading.Event(), threading.Event()

    def slow(*args: Any, **fields: Any) -> Any:
        waiting.set()
        assert released.wait(20)
        return change(*args, **fields)

    monkeypatch.setattr(store, "patch", slow)
    with ThreadPoolExecutor(4) as threads:
        changes = [
            threads.submit(server.client.patch, "/adapters/a", json={"description": str(n)}) for n in range(4)
        ]
        try:
            assert waiting.wait(20)
            assert server.client.get("/adapters").json()["data"][0]["description"] is None
            assert server.complete(adapter="a").status_code == 200
        finally:
            released.set()
        assert {change.result().status_code for change in changes} == {200}
