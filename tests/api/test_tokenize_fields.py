"""`/tokenize` and `/detokenize`: every field is heeded or refused by its name, and counts are those of answers."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.api.protocol.tokenize import TokenizeRequest

from .test_request_fields import refusal

TURNS = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/tokenize?": TURNS,
    "/detokenize": {"tokens": [104, 105]},
}
CALLS = pytest.mark.parametrize("path", BODIES)


OF_TOKENIZE = frozenset({
    "model", "adapter", "prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
    "tools",
})  # fmt: skip


@pytest.mark.parametrize(
    "body", [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}], ids=list
)
def test_tokenize_ignores_no_field_of_vllms(server, body):
    for field in OF_TOKENIZE:
        error = refusal(server.client.post("/tokenize", json={**body, field: [[{}]]}))
        assert error["param"] == field, error
    for field, values in TokenizeRequest.UNSERVED.items():
        for value in values:
            assert server.client.post("/tokenize", json={**body, field: value}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "hi", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "hi", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "hi", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True}, "add_special_tokens"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True},
            "continue_final_message",
        ),
        ({"prompt": "hi", "chat_template": "{{ 1 }}"}, "chat_template"),
    ],
    ids=str,
)
def test_tokenize_refuses_what_it_would_not_heed(server, fields, param):
    assert refusal(server.client.post("/tokenize", json=fields))["param"] == param


def test_tokenize_takes_the_defaults_of_vllms_clients(server):
    prompt = {"prompt": "hi", "add_special_tokens": True, "add_generation_prompt": True, "tools": None}
    turns = {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": False, "tools": []}
    for body in (prompt, turns):
        assert server.client.post("/tokenize", json=body).status_code == 200


# ------------------------------------------------------------------ fields nobody knows


@CALLS
@pytest.mark.parametrize(
    "field",
    ["foo", "add_special_token", "temperature", "max_tokens", "on_cold", "truncate_prompt_tokens", "Model"],
)
def test_a_field_of_neither_call_is_refused_by_its_name(server, path, field):
    for value in (None, 1, "x", True):
        error = refusal(server.client.post(path, json={**BODIES[path], field: value}))
        assert error["param"] == field
        assert field in error["message"]


# ------------------------------------------------------------------ the adapter

GOOD: list[dict[str, Any]] = [
    {},
    {"model": "tiny"},
    {"model": "a"},
    {"adapter": None},
    {"adapter": "a"},
    {"model": "tiny", "adapter": "a@1"},
    {"model": "a", "adapter": "a"},
    {"adapter": [{"name": "a", "weight": 0.5}, {"name": "b"}]},
]
BAD: list[dict[str, Any]] = [
    {"model": "nope"},
    {"model": ""},
    {"adapter": "nope"},
    {"adapter": "a@7"},
    {"adapter": [{"name": "a"}, {"name": "nope"}]},
    {"model": "nope", "adapter": "a"},
    {"model": "a", "adapter": "b"},
    {"model": "a", "adapter": None},
    {"adapter": []},
    {"adapter": 5},
    {"adapter": [{"name": "a", "weight": 1e9}]},
    {"adapter": [{"name": "a", "wait": 1}]},
    {"model": 5},
]


@CALLS
@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_an_adapter_is_chosen_as_for_an_answer_and_counts_with_the_bases_tokenizer(server, path, fields):
    answer = server.client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json() == server.client.post(path, json=BODIES[path]).json()
    if path != "/detokenize":
        generate = server.chat if "messages" in BODIES[path] else server.complete
        assert answer.json()["count"] == generate(**fields).json()["usage"]["prompt_tokens"]


@CALLS
@pytest.mark.parametrize("fields", BAD, ids=str)
def test_an_adapter_is_refused_as_for_an_answer(server, path, fields):
    refused = server.client.post(path, json={**BODIES[path], **fields})
    expected = server.complete(**fields)
    assert (refused.status_code, refused.json()) == (expected.status_code, expected.json())
    assert refused.status_code in (400, 404)


# ------------------------------------------------------------------ tools


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "custom", "custom": {"name": "f"}}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f"}}] * 2,
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    ],
    ids=str,
)
def test_tools_are_checked_as_for_an_answer(server, tools):
    told = refusal(server.client.post("/tokenize", json={**TURNS, "tools": tools}))
    assert told == refusal(server.chat(tools=tools))
    assert told["param"] == "tools"
