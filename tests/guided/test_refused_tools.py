"""Tools over HTTP: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import LLAMA, NO_TOOLS, UNKNOWN, WEATHER, refusal, say
from .test_tools_http import CALL, prompt_of

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER] * 200}, "tools"),
    *(
        ({"tools": [{"type": "function", "function": {"name": name}}]}, "tools")
        for name in ("", "a b", "x" * 65, 'a"', "é", "a\n")
    ),
    *(
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}, "tools")
        for schema in (
            {"type": "array"},
            {"type": "object", "properties": {"a": {"type": "strng"}}},
            {"properties": {"a": {"$ref": "#/nowhere"}}},
            {"properties": {"a": {"$ref": "https://example.org/x.json"}}},
            {"properties": [1]},
            {"properties": {"a": {"pattern": "("}}},
            [],
            "x",
        )
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [WEATHER], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    (
        {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"tools": [WEATHER], "guided_regex": "a+"}, "guided_regex"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (
        {
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}},
                }
            ],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BROKEN, ids=lambda value: str(value)[:70])
def test_wrong_tools_are_refused_by_name(server, fields, param):
    refusal(server.chat(**fields), param)
    assert not server.engine.commands
    assert server.chat(tools=[WEATHER]).status_code == 200


def test_a_keyword_that_cannot_be_enforced_matters_only_where_it_would_be(server):
    loose = {"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    tool = {"type": "function", "function": loose}
    assert server.chat(tools=[tool]).status_code == 200
    assert "uniqueItems" in refusal(server.chat(tools=[tool], tool_choice="required"), "tools")
    tool["function"]["strict"] = True
    assert "uniqueItems" in refusal(server.chat(tools=[tool]), "tools")


def test_arguments_in_earlier_turns_must_be_an_object(server):
    for arguments in ("[1]", "5", "{", "null"):
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "x"},
        ]
        assert "messages[1].tool_calls[0]" in refusal(server.chat(messages=messages), "messages")


def test_a_template_without_tools_refuses_them(serve):
    with serve(NO_TOOLS) as server:
        assert "does not take tools" in refusal(server.chat(tools=[WEATHER]), "tools")
        assert "does not take tools" in refusal(server.chat(tools=[WEATHER], tool_choice="required"), "tools")
        assert server.chat(tools=[WEATHER], tool_choice="none").status_code == 200
        assert server.chat(tools=[]).status_code == 200


def test_calls_of_an_unknown_format_stay_text_and_cannot_be_forced(serve, tokenizer):
    with serve(UNKNOWN) as server:
        say(server, tokenizer, CALL)
        (choice,) = server.chat(tools=[WEATHER]).json()["choices"]
        assert choice["message"]["content"] == CALL
        assert "get_weather" in prompt_of(server, tokenizer)
        refusal(server.chat(tools=[WEATHER], tool_choice="required"), "tool_choice")


def test_llamas_calls_cannot_be_told_from_other_json(serve):
    with serve(LLAMA) as server:
        message = refusal(
            server.chat(tools=[WEATHER], response_format={"type": "json_object"}), "response_format"
        )
        assert "JSON without a mark" in message
        assert server.chat(tools=[WEATHER], tool_choice="required").status_code == 200
