"""`/adapters`: receipts, versions, pins, moves, removal, restarts."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from heddle.core.messages import EngineError

from .refusals import refused

FIELDS = {
    "id": str,
    "name": str,
    "tenant": str,
    "version": int,
    "digest": str,
    "status": str,
    "error": type(None),
    "residency": str,
    "pinned": bool,
    "rank": int,
    "target_modules": list,
    "size_bytes": int,
    "blocks": int,
    "matched": dict,
    "warnings": list,
    "base_model": str,
    "in_use": int,
    "requests": int,
    "tokens": int,
    "created_at": str,
    "last_used_at": type(None),
    "description": type(None),
}


def test_a_receipt_says_everything(own_server):
    receipt = own_server.register("a", "a").json()
    assert {name: type(value) for name, value in receipt.items()} == FIELDS
    assert receipt["version"] == 1
    assert re.fullmatch("sha256:[0-9a-f]{64}", receipt["digest"])
    assert receipt["matched"] == {"tensors": 8, "total": 8}
    assert receipt["target_modules"] == ["q_proj", "v_proj"]
    assert receipt["rank"] == 2
    assert receipt["size_bytes"] == 2 * 4 * (2 * 32 + 32 * 2 + 2 * 32 + 16 * 2)
    assert receipt["base_model"] == "tiny"
    assert (receipt["status"], receipt["residency"], receipt["in_use"]) == ("ready", "disk", 0)
    assert own_server.client.get("/adapters").json()["data"][0]["id"] == receipt["id"]


def test_preload_is_the_default_and_can_be_left_out(own_server):
    own_server.register("a", "a")
    digest = own_server.register("b", "b", preload=False).json()["digest"]
    own_server.wait_until(lambda: own_server.client.get("/adapters/a").json()["residency"] == "device")
    assert own_server.client.get("/adapters/a").json()["blocks"] == 3
    assert digest not in own_server.engine.adapters, "nobody has used it yet"


def test_load_and_evict(own_server):
    own_server.register("a", "a", preload=False)
    post = own_server.client.post
    assert post("/adapters/a/load").json()["residency"] == "device"
    assert post("/adapters/a/evict").json()["residency"] == "host"
    assert post("/adapters/a/evict", json={"to": "disk"}).json()["residency"] == "disk"
    assert post("/adapters/a/evict", json={"to": "moon"}).json()["error"]["param"] == "to"
    for call in ("load", "evict"):
        assert post(f"/adapters/a/{call}", json={"foo": 1}).json()["error"]["param"] == "foo"
        assert post(f"/adapters/a/{call}", json={}).status_code == 200
    refused(post("/adapters/x/load"), 404, "adapter_not_found")
    refused(post("/adapters/x/evict"), 404, "adapter_not_found")


def test_registering_again(own_server):
    assert own_server.register("a", "a").status_code == 201
    again = own_server.register("a", "a")
    assert (again.status_code, again.json()["version"]) == (200, 1)
    refused(own_server.register("a", "b"), 409, "adapter_exists")
    replaced = own_server.register("a", "b", replace=True)
    assert (replaced.status_code, replaced.json()["version"]) == (201, 2)
    back = own_server.register("a", "a", replace=True)
    assert (back.status_code, back.json()["version"]) == (201, 3)
    versions = own_server.client.get("/adapters/a/versions").json()["data"]
    assert [v["version"] for v in versions] == [1, 2, 3]
    assert versions[0]["digest"] == versions[2]["digest"]
    assert own_server.complete(adapter="a").json()["adapter"] == "a@3"
    assert own_server.complete(adapter="a@2").json()["adapter"] == "a@2"
    refused(own_server.client.get("/adapters/x/versions"), 404, "adapter_not_found")


def test_a_dry_run_changes_nothing(own_server):
    answer = own_server.client.post("/adapters?dry_run=true", json={"name": "a", "source": "a"})
    assert answer.status_code == 200
    receipt = answer.json()
    assert receipt["version"] is None
    assert receipt["blocks"] >= 1
    assert receipt["matched"] == {"tensors": 8, "total": 8}
    assert own_server.client.get("/adapters").json() == {"data": []}
    assert not own_server.engine.adapters


@pytest.mark.parametrize(
    ("query", "status"),
    [
        *((query, 200) for query in ("dry_run=true", "dry_run=1", "dry%5Frun=%74rue", "x=y&dry_run=true")),
        *((query, 400) for query in ("dry_run", "dry_run=", "dry_run=True", "dry_run=TRUE", "dry_run=yes")),
        *((query, 400) for query in ("dry_run=perhaps", "dry_run=2", "dry_run=%20true", "dry_run=true%00")),
        *((query, 400) for query in ("dry_run=false&dry_run=true", "dry_run=true&dry_run=true")),
        *((query, 400) for query in ("dry_run&dry_run=false", "dry_run=1;x=y", "dry_run=%ff")),
        *((query, 201) for query in ("", "dry_run=false", "dry_run=0")),
    ],
)
def test_no_spelling_of_a_dry_run_registers(own_server, query, status):
    """It is taken for one, or refused; only what says so or says nothing is a registration."""
    answer = own_server.client.post(f"/adapters?{query}", json={"name": "a", "source": "a"})
    assert answer.status_code == status, answer.text
    assert len(own_server.client.get("/adapters").json()["data"]) == (status == 201)
    if status == 400:
        assert answer.json()["error"]["param"] == "dry_run"


def test_patch(own_server):
    own_server.register("a", "a")
    own_server.register("a", "b", replace=True)
    patch = own_server.client.patch
    assert patch("/adapters/a", json={"description": "first"}).json()["description"] == "first"
    assert patch("/adapters/a", json={"version": 1}).json()["version"] == 1
    assert own_server.complete(adapter="a").json()["adapter"] == "a@1"
    unknown = patch("/adapters/a", json={"version": 9})
    refused(unknown, 404, "adapter_not_found")
    assert unknown.json()["error"]["param"] == "version"
    refused(patch("/adapters/x", json={"pinned": True}), 404, "adapter_not_found")
    refused(patch("/adapters/a", json={"pinned": "yes"}), 400, "invalid_request")
    refused(patch("/adapters/a", json={"version": True}), 400, "invalid_request")
    refused(patch("/adapters/a", json={"description": "x" * 5000}), 400, "invalid_request")


def test_a_receipt_says_that_preloading_failed(own_server):
    digest = own_server.register("other", "a", preload=False).json()["digest"]
    own_server.engine.too_large = {digest}
    answer = own_server.register("a", "a", preload=True)
    assert answer.status_code == 201
    assert answer.json()["residency"] == "disk"
    assert answer.json()["warnings"][-1] == "not preloaded: the adapter is larger than the pool"


def test_two_names_share_equal_weights(own_server):
    a = own_server.register("a", "a", pinned=True).json()
    b = own_server.register("b", "a").json()
    assert a["digest"] == b["digest"]
    assert a["id"] != b["id"]
    assert own_server.client.delete("/adapters/a").status_code == 204
    assert own_server.complete(adapter="b").json()["adapter"] == "b@1"
    assert not own_server.engine.adapters[b["digest"]].pinned
    assert own_server.client.delete("/adapters/b").status_code == 204
    assert not own_server.engine.adapters


def test_removal(own_server):
    own_server.register("a", "a")
    own_server.register("a", "b", replace=True)
    delete = own_server.client.delete
    answer = delete("/adapters/a@2")
    assert (answer.status_code, answer.content) == (204, b"")
    assert own_server.client.get("/adapters/a").json()["version"] == 1
    refused(own_server.complete(adapter="a@2"), 404, "model_not_found")
    assert delete("/adapters/a").status_code == 204
    refused(own_server.complete(adapter="a"), 404, "model_not_found")
    refused(delete("/adapters/a"), 404, "adapter_not_found")
    refused(own_server.client.get("/adapters/a"), 404, "adapter_not_found")
    assert not own_server.engine.adapters
    assert not list((own_server.config.data_dir / "uploads").iterdir())


def test_requests_under_way_keep_a_removed_adapter_until_they_end(own_server):
    digest = own_server.register("a", "a").json()["digest"]
    own_server.engine.hang_after = 1
    answers = []
    thread = threading.Thread(target=lambda: answers.append(own_server.complete(adapter="a")))
    thread.start()
    own_server.wait_until(lambda: own_server.engine.running)
    assert own_server.client.get("/adapters/a").json()["in_use"] == 1
    refused(own_server.client.post("/adapters/a/evict"), 409, "adapter_in_use")
    assert own_server.client.delete("/adapters/a").status_code == 204
    refused(own_server.complete(adapter="a"), 404, "model_not_found")
    assert digest in own_server.engine.adapters, "a request holds it"
    own_server.do(_let_go(own_server.engine))
    thread.join(10)
    assert answers[0].json()["adapter"] == "a@1"
    own_server.wait_until(lambda: not own_server.engine.adapters)


async def _let_go(engine) -> None:
    engine.released.set()


def test_its_hold_ends_before_the_last_byte(own_server):
    own_server.register("a", "a")
    for fields in ({}, {"stop": "l"}, {"stream": True}, {"n": 3, "stream": True, "stop": "e"}):
        assert own_server.complete(adapter="a", **fields).status_code == 200
        assert own_server.client.post("/adapters/a/evict").json()["in_use"] == 0


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a/b", "a:b", "a@1", ".a", "-a", "é", "a" * 129, "a\n", "a "]
)
def test_names_that_are_none(own_server, name):
    refused(own_server.register(name, "a"), 400, "invalid_request")


def test_the_bases_name_is_taken(own_server):
    refused(own_server.register("tiny", "a"), 409, "adapter_exists")
    assert own_server.register("Tiny", "a").status_code == 201


def test_the_bases_name_at_start(base, serve, sources, tmp_path):
    from heddle.api.errors import ApiError
    from heddle.lora.errors import StoreError

    with (
        pytest.raises(StoreError, match="tiny"),
        serve(tmp_path, base, adapters=(("tiny", str(sources / "a")),)),
    ):
        pass
    with serve(tmp_path, base, adapters=(("a", str(sources / "a")),)) as server:
        assert server.complete(adapter="a").status_code == 200
    with pytest.raises(ApiError, match="served-model-name"), serve(tmp_path, base, served_model_name="a"):
        pass


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a"},
        {"source": "a"},
        {"name": "a", "source": "nope"},
        {"name": "a", "source": "/etc"},
        {"name": "a", "source": "../../etc"},
        {"name": "a", "source": "a/../../x"},
        {"name": "a", "source": "%2e%2e/x"},
        {"name": "a", "source": "a\0"},
        {"name": "a", "source": ""},
        {"name": "a", "source": "hf:"},
        {"name": "a", "source": "hf:../x"},
        {"name": "a", "source": "a", "pinned": "true"},
        {"name": "a", "source": "a", "replace": 1},
        {"name": 5, "source": "a"},
    ],
    ids=json.dumps,
)
def test_bad_registrations(own_server, body):
    answer = own_server.client.post("/adapters", json=body)
    assert answer.status_code == 400, answer.text
    assert own_server.client.get("/adapters").json() == {"data": []}


def test_links_do_not_lead_out_of_the_root(base, serve, sources, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(sources / "a")
    (root / "files").mkdir()
    (root / "files" / "adapter_config.json").write_bytes((sources / "a" / "adapter_config.json").read_bytes())
    (root / "files" / "adapter_model.safetensors").symlink_to(sources / "a" / "adapter_model.safetensors")
    with serve(tmp_path, base, adapter_roots=(root,)) as server:
        for source in ("out", "files", str(sources / "a")):
            answer = server.register("a", source)
            assert answer.status_code == 400
            assert str(sources) not in answer.text.replace(json.dumps(source), "")


def test_many_registrations_of_one_name_at_once(own_server):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: own_server.register("a", "ab"[i % 2]).status_code, range(16)))
    assert answers.count(201) == 1
    assert set(answers) <= {200, 201, 409}
    (one,) = own_server.client.get("/adapters").json()["data"]
    assert one["version"] == 1
    with ThreadPoolExecutor(16) as pool:
        removals = list(
            pool.map(
                lambda i: (
                    own_server.register("x", "c").status_code
                    if i % 2
                    else own_server.client.delete("/adapters/x").status_code
                ),
                range(16),
            )
        )
    assert set(removals) <= {200, 201, 204, 404}
    assert own_server.client.delete("/adapters/x").status_code in (204, 404)
    own_server.wait_until(lambda: len(own_server.engine.adapters) == 1)


def test_vllms_calls(own_server):
    post = own_server.client.post
    answer = post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"})
    assert (answer.status_code, "a" in answer.text) == (200, True)
    assert own_server.complete(model="a").json()["model"] == "a"
    answer = post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
    refused(answer, 409, "adapter_exists")
    assert post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/etc"}).status_code == 400
    assert post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
    refused(post("/v1/unload_lora_adapter", json={"lora_name": "a"}), 404, "adapter_not_found")
    refused(own_server.complete(model="a"), 404, "model_not_found")


def test_the_engines_messages_name_adapters_as_their_callers_do(own_server):
    digest = own_server.register("a", "a").json()["digest"]
    own_server.register("b", "b")
    message = f"adapter {digest[:19]} takes 9 blocks of memory"
    own_server.engine.refusal = EngineError("capacity_exceeded", message, "prompt")
    error = own_server.complete(adapter=[{"name": "b"}, {"name": "a"}]).json()["error"]
    assert (error["message"], error["param"]) == ("adapter a@1 takes 9 blocks of memory", "prompt")
    own_server.engine.refusal = None
    own_server.engine.pin_limit = 0
    message = refused(own_server.client.patch("/adapters/a", json={"pinned": True}), 409, "pin_limit")
    assert "sha256" not in message


def test_a_name_that_was_removed_goes_on_counting_its_versions(own_server):
    """`a@1` may be written down somewhere: it never comes to mean other weights."""
    own_server.register("a", "a")
    assert own_server.client.delete("/adapters/a").status_code == 204
    assert own_server.register("a", "b").json()["version"] == 2
    refused(own_server.complete(adapter="a@1"), 404, "model_not_found")
    assert own_server.complete(adapter="a").json()["adapter"] == "a@2"
