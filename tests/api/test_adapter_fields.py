"""The fields of adapter calls mean what they say: misspelt ones are refused, preload is kept, settings are named."""

from __future__ import annotations

import pytest


def test_a_bad_adapter_of_the_settings_is_named_with_its_path(base, serve, tmp_path):
    from heddle.lora.errors import AdapterInvalid

    with (
        pytest.raises(AdapterInvalid, match=r"--adapter x=.*nowhere"),
        serve(tmp_path, base, adapters=(("x", str(tmp_path / "nowhere")),)),
    ):
        pass


def test_a_misspelt_field_is_refused_by_name(own_server, sources):
    server = own_server
    body = {"name": "a", "source": "a", "replcae": True}
    answer = server.client.post("/adapters", json=body)
    assert answer.status_code == 400
    assert "replcae" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "replcae"
    assert server.client.get("/adapters/a").status_code == 404
    assert server.client.post("/adapters", json={"name": "a", "source": "a"}).status_code == 201
    for call, method, wrong in (
        ("/adapters/a", "PATCH", {"pined": True}),
        ("/adapters/a/evict", "POST", {"too": "disk"}),
    ):
        answer = server.client.request(method, call, json=wrong)
        assert answer.status_code == 400
        assert next(iter(wrong)) in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == next(iter(wrong))
    answer = server.complete(adapter=[{"name": "a", "wieght": 0.5}])
    assert answer.status_code == 400
    assert "wieght" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "adapter"


def test_preload_true_is_answered_when_the_adapter_is_on_the_device(own_server, sources):
    server = own_server
    body = {"name": "a", "source": "a", "preload": True}
    answer = server.client.post("/adapters", json=body)
    assert (answer.status_code, answer.json()["residency"]) == (201, "device")
