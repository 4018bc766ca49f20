"""A chat's messages over HTTP: what reaches the template, and what is refused with its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import RunningServer, make_base, running
from .test_request_fields import refusal

NAMING = """{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}: {{ m.content }}
{%- for call in m.tool_calls or [] %} calls {{ call.function.name }}{% endfor %}
{%- if m.tool_call_id %} answers {{ m.tool_call_id }}{% endif %};{% endfor %}"""
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": FUNCTION} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answering(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "sunny"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    """Its template writes all that it knows of a message."""
    home = tmp_path_factory.mktemp("naming")
    base = make_base(home / "base", template=NAMING, max_positions=1024)
    with running(home, base) as started:
        yield started


def prompt_of(server: RunningServer, messages: list[dict[str, Any]]) -> str:
    """The same in chat and in `/tokenize`."""
    server.engine.reset()
    answer = server.chat(messages=messages)
    assert answer.status_code == 200, answer.text
    ids = server.engine.commands[-1].prompt_token_ids
    assert server.client.post("/tokenize", json={"messages": messages}).json()["tokens"] == ids
    return bytes(ids).decode()


def told_as(role: str) -> str:
    """A role as a template is told that knows no developers."""
    return "system" if role == "developer" else role


def refused_at(server: RunningServer, messages: list[dict[str, Any]], param: str) -> str:
    server.engine.reset()
    errors = [
        refusal(server.client.post(path, json={"messages": messages}))
        for path in ("/v1/chat/completions", "/tokenize")
    ]
    assert errors[0] == errors[1]
    assert errors[0]["param"] == param
    assert not server.engine.commands
    return str(errors[0]["message"])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize("name", ["a", "Ada Lovelace", "世界", "x" * 64])
def test_a_name_reaches_the_template(server, role, name):
    text = prompt_of(server, [{"role": role, "name": name, "content": "hi"}])
    assert text == f"{told_as(role)}({name}): hi;"
    assert prompt_of(server, [{"role": role, "name": None, "content": "hi"}]) == f"{told_as(role)}: hi;"


@pytest.mark.parametrize(
    "name", [5, True, ["a"], {"a": "b"}, "", "x" * 65, "x" * 100_000], ids=lambda n: str(n)[:9]
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_name_is_a_text_of_1_to_64_characters(server, role, name):
    message = {
        "role": role,
        "name": name,
        "content": "hi",
        **({"tool_call_id": "1"} if role == "tool" else {}),
    }
    told = refused_at(server, [USER, calling("1"), message], "messages[2].name")
    assert told.startswith("messages[2].name must ")
    assert len(told) < 200


def test_answers_of_tools_follow_their_calls(server):
    chat = [USER, calling("1", "2"), answering("2"), answering("1"), USER, calling("3"), answering("3")]
    assert "tool: sunny answers 2;tool: sunny answers 1;" in prompt_of(server, chat)
    later = [USER, calling("1"), answering("1"), {"role": "assistant", "content": "ok"}, answering("1")]
    assert prompt_of(server, later).endswith("tool: sunny answers 1;")


@pytest.mark.parametrize(
    "messages",
    [
        [USER, answering("1")],
        [USER, calling("2"), answering("1")],
        [USER, calling(), answering("1")],
        [USER, calling("1"), answering("1 ")],
        [USER, calling("1"), answering("")],
        [USER, answering("1"), calling("1")],
        [USER, calling("1"), answering("1"), answering("2")],
        [USER, calling("1"), {"role": "tool", "content": "sunny"}],
        [USER, calling("1"), answering(None)],
        [USER, calling("1"), answering(1)],
        [USER, calling("1"), answering(["1"])],
        [USER, {"role": "assistant", "content": "x", "tool_calls": [{"function": FUNCTION}]}, answering("1")],
    ],
    ids=str,
)
def test_an_answer_to_no_call_is_refused(server, messages):
    last = 1 if messages[1]["role"] == "tool" else len(messages) - 1
    messages = [
        message if message.get("tool_calls") != [] else {**message, "content": "x"} for message in messages
    ]
    refused_at(server, messages, f"messages[{last}].tool_call_id")


@pytest.mark.parametrize(
    ("role", "fields", "owner"),
    [
        ("user", {"tool_call_id": "1"}, "tool"),
        ("assistant", {"tool_call_id": "1"}, "tool"),
        ("user", {"tool_calls": calling("1")["tool_calls"]}, "assistant"),
        ("system", {"function_call": FUNCTION}, "assistant"),
        ("user", {"refusal": "no"}, "assistant"),
        ("user", {"audio": {"id": "1"}}, "assistant"),
    ],
)
def test_a_field_of_another_role_is_refused(server, role, fields, owner):
    (field,) = fields
    told = refused_at(server, [{"role": role, "content": "hi", **fields}], f"messages[0].{field}")
    assert told == f"messages[0].{field} is of {owner} messages alone (role {role!r})"
    nothing = {field: [] if field == "tool_calls" else None}
    assert prompt_of(server, [{"role": role, "content": "hi", **nothing}]) == f"{role}: hi;"


# ------------------------------------------------------------------ parts and roles

ROLES = ["system", "developer", "user", "assistant", "tool"]
PARTS: dict[str, Any] = {
    "text": "hi",
    "refusal": "I cannot",
    "image_url": {"url": "data:"},
    "input_audio": {"data": "", "format": "wav"},
    "file": {"file_id": "1"},
    "video_url": {"url": "data:"},
    "thinking": "hm",
}
TAKEN = {*(("text", role) for role in ROLES), ("refusal", "assistant")}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_taken_where_openai_takes_it_and_it_is_text(server, kind, role):
    parts = [{"type": "text", "text": "so"}, {"type": kind, kind: PARTS[kind]}]
    answers = {"tool_call_id": "1"} if role == "tool" else {}
    chat = [calling("1"), {"role": role, "content": parts, **answers}]
    if (kind, role) in TAKEN:
        assert f"{told_as(role)}: so\n{PARTS[kind]}" in prompt_of(server, chat)
    else:
        told = refused_at(server, chat, "messages")
        assert told.startswith("messages[1].content[1]: parts of type ")
        assert repr(kind) in told


def test_what_an_assistant_refused_is_told_like_what_it_said(server):
    """OpenAI's answers have it beside a null content."""
    refused = {"role": "assistant", "content": None, "refusal": "I cannot"}
    assert prompt_of(server, [USER, refused]) == "user: hi;assistant: I cannot;"
    assert prompt_of(server, [{**refused, "content": "No."}]) == "assistant: No.\nI cannot;"
    assert "must be a string" in refused_at(server, [{**refused, "refusal": 5}], "messages[0].refusal")


# ------------------------------------------------------------------ calls of earlier turns


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}},
        {"id": "1", "type": "function"},
        {"id": "1", "type": "function", "function": {}},
        {"id": "1", "type": "function", "function": {"name": 5, "arguments": "{}"}},
        {"id": 1, "type": "function", "function": FUNCTION},
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": [1]}},
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": 5}},
    ],
    ids=str,
)
def test_a_call_that_no_template_could_write_is_refused(server, call):
    chat = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert refused_at(server, chat, "messages").startswith("messages[1].tool_calls[0]")


def test_a_function_s_message_says_whose_it_is(server):
    message = {"role": "function", "name": "f", "content": "sunny"}
    assert prompt_of(server, [message]) == "function(f): sunny;"
    del message["name"]
    refused_at(server, [message], "messages[0].name")
