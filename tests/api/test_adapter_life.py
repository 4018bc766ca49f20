"""Adapters through failures, lost files, restarts and another base."""

from __future__ import annotations

import json

from heddle.core.messages import AdapterState, EngineError

from .refusals import refused


def test_an_adapter_that_cannot_be_loaded_fails_alone_and_is_tried_again(own_server):
    digest = own_server.register("a", "a", preload=False).json()["digest"]
    state = AdapterState(digest=digest, residency="disk", error="the file is damaged")
    own_server.engine.adapters[digest] = state
    shown = own_server.client.get("/adapters/a").json()
    assert (shown["status"], shown["error"]) == ("failed", "the file is damaged")
    own_server.engine.refusal = EngineError("adapter_failed", "the file is damaged", "adapter")
    refused(own_server.complete(adapter="a"), 503, "adapter_failed")
    own_server.engine.refusal = None
    assert own_server.complete(adapter="a").status_code == 200
    assert own_server.client.get("/adapters/a").json()["status"] == "ready"


def test_a_lost_file_costs_its_own_adapter_alone(base, serve, sources, tmp_path):
    with serve(tmp_path, base, adapter_roots=(sources,)) as server:
        digest = server.register("a", "a", pinned=True).json()["digest"]
        server.register("b", "b")
    (blob,) = (tmp_path / "data").rglob(f"{digest.removeprefix('sha256:')}*")
    blob.unlink()
    with serve(tmp_path, base, adapter_roots=(sources,)) as server:
        assert len(server.client.get("/adapters").json()["data"]) == 2
        refused(server.complete(adapter="a"), 503, "adapter_failed")
        refused(server.client.post("/adapters/a/load"), 503, "adapter_failed")
        assert server.complete(adapter="b").status_code == 200
        assert server.client.delete("/adapters/a").status_code == 204


def test_adapters_outlive_a_restart(base, serve, sources, tmp_path):
    settings = {"adapter_roots": (sources,), "adapters": (("z", str(sources / "c")),)}
    with serve(tmp_path, base, **settings) as server:
        server.register("a", "a", pinned=True, description="kept")
        server.register("a", "b", replace=True)
        server.complete(adapter="a")
        before = server.client.get("/adapters").json()["data"]
    with serve(tmp_path, base, **settings) as server:
        after = server.client.get("/adapters").json()["data"]
        pinned = after[0]["digest"]
        server.wait_until(lambda: server.engine.adapters[pinned].residency == "device")
        assert server.engine.adapters[pinned].pinned
        assert server.complete(adapter="a@1").status_code == 200
        assert server.client.get("/adapters/z").json()["version"] == 1, "the same weights make no new version"
    moving = {"residency", "blocks"}
    assert [{k: v for k, v in a.items() if k not in moving} for a in after] == [
        {k: v for k, v in a.items() if k not in moving} for a in before
    ]
    assert after[0]["requests"] == 1
    other = {**settings, "adapters": (("z", str(sources / "b")),)}
    with serve(tmp_path, base, **other) as server:
        assert server.client.get("/adapters/z").json()["version"] == 2


def test_an_adapter_of_another_base_is_listed_and_never_served(base, model_folder, serve, sources, tmp_path):
    with serve(tmp_path, base, adapter_roots=(sources,)) as server:
        server.register("a", "a", pinned=True)
        server.register("a", "b", replace=True)
        before = server.client.get("/adapters/a/versions").json()["data"]
    other = model_folder(tmp_path / "other", bos=True)
    config = json.loads((other / "config.json").read_text()) | {"vocab_size": 320}
    (other / "config.json").write_text(json.dumps(config))
    with serve(tmp_path, other, adapter_roots=(sources,)) as server:
        listed = server.client.get("/adapters/a").json()
        assert (listed["status"], listed["error"][:22]) == ("incompatible", "made for another base ")
        assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["tiny"]
        refused(server.complete(adapter="a"), 400, "adapter_invalid")
        assert not server.engine.adapters
        refused(server.client.post("/adapters/a/load"), 400, "adapter_invalid")
    with serve(tmp_path, base, adapter_roots=()) as server:
        assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["tiny", "a"]
        assert server.complete(adapter="a").json()["adapter"] == "a@2"
        assert server.complete(adapter="a@1").json()["adapter"] == "a@1"
        after = server.client.get("/adapters/a/versions").json()["data"]
        for version, was in zip(after, before, strict=True):
            for field in ("id", "version", "digest", "pinned", "created_at"):
                assert version[field] == was[field]
        assert server.engine.adapters[after[1]["digest"]].pinned


def test_what_a_user_made_of_a_shipped_name_stays(base, serve, sources, tmp_path):
    settings = {
        "adapter_roots": (sources,),
        "shipped_adapters": (("s", str(sources / "a")), ("t", str(sources / "b"))),
    }
    with serve(tmp_path, base, **settings) as server:
        assert [a["name"] for a in server.client.get("/adapters").json()["data"]] == ["s", "t"]
        mine = server.register("s", "b", replace=True).json()
        server.client.delete("/adapters/t")
    with serve(tmp_path, base, **settings) as server:
        s, t = server.client.get("/adapters").json()["data"]
        assert (s["version"], s["digest"]) == (2, mine["digest"])
        assert (t["name"], t["version"]) == ("t", 2), "one that was removed is shipped again"
