"""Bounds that hold for everyone: on the lists of a request, before anything goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import TenantServer


@pytest.fixture
def world(shared_tenants: TenantServer) -> Iterator[TenantServer]:
    """Its stub engine is as new."""
    shared_tenants.server.engine.reset()
    yield shared_tenants
    shared_tenants.server.wait_until(lambda: not shared_tenants.server.state.in_flight)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [1] * 300}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1_000_000}, None),
        ({"logit_bias": {f"{i:07}": 1 for i in range(300)}}, "logit_bias"),
        ({"logit_bias": {f"{i:07}": 1 for i in range(300_000)}}, "logit_bias"),
        ({"logit_bias": {str(i): -100 for i in range(257)}, "n": 128, "prompt": ["x"] * 32}, "logit_bias"),
        ({"stop_token_ids": list(range(257)), "n": 128, "prompt": ["x"] * 32}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": ""}] * 2000}, "messages"),
        ({"messages": [{}] * 500_000}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_lists_are_bounded_before_anything_goes_through_them(
    world: TenantServer, fields: dict[str, Any], param: str | None
):
    """Where there is so much that it is not even read, no field can be named."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = world.admin.post(path, json={"prompt": "x", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert any(str(limit) in error["message"] for limit in (264, 1024, 1 << 20, 50_000, 500_000)), error[
        "message"
    ]
    assert not world.server.engine.commands


def test_a_bias_for_most_tokens_is_fine(world: TenantServer):
    bias = {str(token): -100 for token in range(264) if token != 65}
    body = {"prompt": "hi", "logit_bias": bias, "n": 4}
    assert world.admin.post("/v1/completions", json=body).status_code == 200
