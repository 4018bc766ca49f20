"""Which adapter a request runs on: the fields `model` and `adapter`."""

from __future__ import annotations

import pytest


def digests(server) -> dict[str, str]:
    return {a["name"]: a["digest"] for a in server.client.get("/adapters").json()["data"]}


def used(server) -> list[tuple[str, float]]:
    """Name and weight of what the engine was told to use."""
    names = {digest: name for name, digest in digests(server).items()}
    return [(names[use.digest], use.weight) for use in server.engine.commands[-1].adapters]


@pytest.mark.parametrize(
    ("fields", "model", "label", "uses"),
    [
        ({}, "tiny", None, []),
        ({"model": "tiny"}, "tiny", None, []),
        ({"model": None}, "tiny", None, []),
        ({"adapter": None}, "tiny", None, []),
        ({"model": "tiny", "adapter": None}, "tiny", None, []),
        ({"adapter": "a"}, "tiny", "a@1", [("a", 1.0)]),
        ({"model": "tiny", "adapter": "a"}, "tiny", "a@1", [("a", 1.0)]),
        ({"adapter": "a@1"}, "tiny", "a@1", [("a", 1.0)]),
        ({"model": "a"}, "a", "a@1", [("a", 1.0)]),
        ({"model": "a@1"}, "a@1", "a@1", [("a", 1.0)]),
        ({"model": "a", "adapter": "a"}, "a", "a@1", [("a", 1.0)]),
        ({"model": "a", "adapter": "a@1"}, "a", "a@1", [("a", 1.0)]),
        ({"model": "a", "adapter": [{"name": "a"}]}, "a", ["a@1"], [("a", 1.0)]),
        (
            {"adapter": [{"name": "a", "weight": 0.7}, {"name": "b", "weight": 0.3}]},
            "tiny",
            ["a@1", "b@1"],
            [("a", 0.7), ("b", 0.3)],
        ),
        (
            {"adapter": [{"name": "a", "weight": 0.5}, {"name": "a@1", "weight": 0.25}]},
            "tiny",
            ["a@1", "a@1"],
            [("a", 0.75)],
        ),
    ],
)
def test_what_a_request_runs_on(server, fields, model, label, uses):
    body = server.complete(**fields).json()
    assert (body["model"], body["adapter"]) == (model, label)
    assert used(server) == uses
    body = server.chat(**fields).json()
    assert (body["model"], body["adapter"]) == (model, label)
    for event in server.events("/v1/completions", {"prompt": "x", **fields}):
        assert (event["model"], event["adapter"]) == (model, label)


@pytest.mark.parametrize("digits", [12, 20, 64])
def test_a_version_is_named_by_its_digest(server, digits):
    digest = digests(server)["a"].removeprefix("sha256:")
    body = server.complete(adapter=f"a@{digest[:digits]}").json()
    assert body["adapter"] == "a@1"
    assert server.complete(adapter=f"a@{digest[:11]}").status_code == 404
    assert server.complete(adapter=f"b@{digest[:digits]}").status_code == 404


@pytest.mark.parametrize(
    "name",
    ["typo", " ", "", "A", "a ", "a@2", "a@0", "a@", "@1", "a:1", "../a", "tiny@1", "\0", "a" * 500, "ａ"],
)
def test_unknown_names_are_404_and_never_the_base(server, name):
    bodies = []
    for field in ("model", "adapter"):
        for post in (server.complete, server.chat):
            answer = post(**{field: name})
            assert answer.status_code == 404, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", field)
            bodies.append(error["message"])
    assert len(set(bodies)) == 1
    assert server.complete(model=name, adapter="a").status_code == 404
    assert not server.engine.commands


@pytest.mark.parametrize(
    "adapter", [None, "b", [{"name": "a", "weight": 0.5}], [{"name": "a"}, {"name": "b"}]], ids=str
)
def test_a_model_that_names_an_adapter_and_a_field_that_says_otherwise(server, adapter):
    answer = server.complete(model="a", adapter=adapter)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "adapter"


def test_a_name_with_a_colon_or_slash_is_one_name(base, serve, tmp_path):
    from heddle.api.config import ServerConfig
    from heddle.core.config import EngineConfig

    assert (
        ServerConfig(engine=EngineConfig(model="x/y"), served_model_name="org/m:120b").base_name
        == "org/m:120b"
    )
    with serve(tmp_path, base, served_model_name="org/m:120b") as server:
        assert server.complete(model="org/m:120b").status_code == 200
        for name in ("org/m", "org/m:", "120b", "m:120b"):
            assert server.complete(model=name).status_code == 404
        assert server.client.get("/v1/models/org/m:120b").json()["id"] == "org/m:120b"


def test_models_lists_the_base_first_and_then_adapters(server, base):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny", "a", "b"]
    assert models["data"][0]["root"] == str(base)
    assert [model["parent"] for model in models["data"]] == [None, "tiny", "tiny"]
    assert server.client.get("/v1/models/a").json() == models["data"][1]
    assert server.client.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


def test_on_cold_reaches_the_engine_and_a_cold_adapter_is_a_503(server):
    from heddle.core.messages import EngineError

    server.complete(adapter="a", on_cold="reject")
    assert server.engine.commands[-1].on_cold == "reject"
    server.engine.refusal = EngineError("adapter_cold", "it is being loaded", "adapter")
    answer = server.complete(adapter="a", on_cold="reject")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "adapter_cold"
    assert int(answer.headers["retry-after"]) > 0


def test_usage_is_counted_for_the_adapter(server):
    before = server.client.get("/adapters/b").json()
    server.complete(adapter="b")
    server.events("/v1/completions", {"prompt": "hi", "adapter": "b"})
    after = server.client.get("/adapters/b").json()
    assert after["requests"] - before["requests"] == 2
    assert after["tokens"] - before["tokens"] == 2 * (2 + 7)  # prompt; digit, hello, end
    assert after["last_used_at"] is not None
    assert after["in_use"] == 0
