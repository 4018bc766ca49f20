"""Every field that takes a number, in every body, and what is none: a 400 with a stable code that names the field."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
import pytest
from heddle.api.protocol.adapters import AdapterPatch
from heddle.api.protocol.chat import ChatRequest
from heddle.api.protocol.completions import CompletionRequest
from heddle.api.protocol.tenants import LimitsPatch, TenantCreate, TenantPatch
from heddle.api.tenants.records import Limits

from .test_request_fields import CHAT, COMPLETIONS, refusal

Number = msgspec.inspect.IntType | msgspec.inspect.FloatType
ABSURD = [
    "1e30",
    "-1e30",
    "-1",
    "NaN",
    "Infinity",
    "1e999",
    str(2**70),
    str(-(2**70)),
    "1.5",
    "true",
    '"x"',
    "[]",
    "{}",
]
"""JSON, or what some take for it."""
OR_MINUS_ONE = {"top_k", "seed", "presence_penalty", "frequency_penalty", "thinking_token_budget"}
OR_HALVES = {"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "weight"}
UNSERVED = {
    "length_penalty", "priority", "prompt_logprobs", "routed_experts_prompt_start", "stream_interval",
    "thinking_token_budget", "truncate_prompt_tokens",
}  # fmt: skip
"""Fields that take numbers elsewhere."""


class Place(NamedTuple):
    """Where a number may stand; `text` is the whole body, with the number's place marked."""

    method: str
    path: str
    text: str
    field: str
    param: str


def numbers(kind: type[msgspec.Struct]) -> list[str]:
    """Its fields that take one number."""

    def is_number(field: msgspec.inspect.Field) -> bool:
        one = field.type
        return any(isinstance(part, Number) for part in getattr(one, "types", (one,)))

    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return [field.name for field in info.fields if is_number(field)]


def places(
    method: str, path: str, kind: type[msgspec.Struct], body: dict[str, Any], *more: str
) -> list[Place]:
    given = json.dumps(body)[1:-1]
    return [
        Place(method, path, "{" + ", ".join(filter(None, (given, f'"{field}": @'))) + "}", field, field)
        for field in (*numbers(kind), *more)
    ]


PLACES = [
    *places("POST", COMPLETIONS, CompletionRequest, {"prompt": "hi"}, *UNSERVED),
    *places(
        "POST",
        CHAT,
        ChatRequest,
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
        *UNSERVED,
    ),
    *places("PATCH", "/adapters/a", AdapterPatch, {}),
    *places("POST", "/tenants", TenantCreate, {"name": "x"}),
    *places("PATCH", "/tenants/public", TenantPatch, {}),
    *(
        Place(method, path, body % limit, limit, "limits")
        for kind, method, path, body in (
            (Limits, "POST", "/tenants", '{"name": "x", "limits": {"%s": @}}'),
            (LimitsPatch, "PATCH", "/tenants/public", '{"limits": {"%s": @}}'),
        )
        for limit in numbers(kind)
    ),
    Place("POST", COMPLETIONS, '{"prompt": [1, @]}', "", "prompt"),
    Place("POST", COMPLETIONS, '{"prompt": [[1], [@]]}', "", "prompt"),
    Place("POST", COMPLETIONS, '{"prompt": "hi", "stop_token_ids": [@]}', "", "stop_token_ids"),
    Place("POST", COMPLETIONS, '{"prompt": "hi", "logit_bias": {"65": @}}', "presence_penalty", "logit_bias"),
    Place(
        "POST",
        COMPLETIONS,
        '{"prompt": "hi", "adapter": [{"name": "a", "weight": @}]}',
        "frequency_penalty",
        "adapter",
    ),
    Place("POST", "/detokenize", '{"tokens": [1, @]}', "", "tokens"),
]


def test_every_number_has_its_place():
    fields = {place.field for place in PLACES}
    assert {"n", "top_k", "seed", "logprobs", "top_logprobs", "version", "weight", "pool_share"} <= fields


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:8])
def test_what_is_no_number_of_a_field_is_refused_by_its_name(server, value):
    for place in PLACES:
        if (value == "-1" and place.field in OR_MINUS_ONE) or (value == "1.5" and place.field in OR_HALVES):
            continue
        answer = server.client.request(place.method, place.path, content=place.text.replace("@", value))
        beyond = place.field in ("max_tokens", "max_completion_tokens") and value == str(2**70)
        in_generation = place.path in (COMPLETIONS, CHAT)
        error = refusal(
            answer, code="context_length_exceeded" if beyond and in_generation else "invalid_request"
        )
        assert error["param"] == place.param, (place, error)
    assert not server.engine.commands
    assert server.client.get("/tenants/x").status_code == 404


@pytest.mark.parametrize(("value", "fields"), [("-1", OR_MINUS_ONE), ("1.5", OR_HALVES)])
def test_what_is_a_number_of_a_field_is_taken(server, value, fields):
    for place in PLACES:
        if place.field in fields and place.path in (COMPLETIONS, CHAT):
            answer = server.client.request(place.method, place.path, content=place.text.replace("@", value))
            assert answer.status_code == 200, (place, answer.text)


def test_null_is_no_number_and_says_nothing(server):
    for place in PLACES:
        if f'"{place.field}": @' in place.text and place.path != "/tenants":
            answer = server.client.request(place.method, place.path, content=place.text.replace("@", "null"))
            assert answer.status_code == 200, (place, answer.text)
