"""Tools over HTTP: what the model is told, and what it may answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import LLAMA, MISTRAL, TIME, WEATHER, say

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>'
ARGUMENTS = {"city": "Paris", "unit": "celsius"}
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}}\n</tool_call>'


def prompt_of(server, tokenizer) -> str:
    return tokenizer.decode(server.engine.commands[-1].prompt_token_ids, skip_special_tokens=False)


# ------------------------------------------------------------------ answers


def test_a_call_is_parsed_into_the_message(server, tokenizer):
    say(server, tokenizer, CALL)
    (choice,) = server.chat(tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert call["id"].startswith("call_")
    (command,) = server.engine.commands
    assert command.params.grammar is None, "a model that calls by itself is guided by nobody"


def test_text_before_several_calls_is_content(server, tokenizer):
    say(server, tokenizer, f"Let me look.\n{CALL}\n{SECOND}")
    (choice,) = server.chat(tools=[WEATHER, TIME]).json()["choices"]
    assert choice["message"]["content"] == "Let me look."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [
        "get_weather",
        "get_time",
    ]


@pytest.mark.parametrize("stop", ['"city"', "Paris", "unit"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_no_whole_one(server, tokenizer, stop, stream):
    say(server, tokenizer, CALL)
    answer = server.chat(tools=[WEATHER], stop=stop, stream=stream)
    reasons = [reason for reason in finish_reasons(answer, stream) if reason]
    assert reasons == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_behind_a_call_cuts_nothing_of_it(server, tokenizer, stream):
    say(server, tokenizer, CALL + " and so on")
    answer = server.chat(tools=[WEATHER], stop="and so", stream=stream)
    assert [reason for reason in finish_reasons(answer, stream) if reason] == ["tool_calls"]


def finish_reasons(answer: Any, stream: bool) -> list[str | None]:
    if not stream:
        return [choice["finish_reason"] for choice in answer.json()["choices"]]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]


def test_an_answer_without_a_call_is_as_ever(server, tokenizer):
    say(server, tokenizer, "It is sunny.")
    answer = server.chat(tools=[WEATHER], logprobs=True).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "call", ['<tool_call>{"name": "get_weather", "arguments": {"city": }', "<tool_call>"]
)
def test_a_call_that_does_not_parse_stays_text(server, tokenizer, call):
    say(server, tokenizer, call)
    (choice,) = server.chat(tools=[WEATHER]).json()["choices"]
    assert choice["message"]["content"] == call
    assert choice["finish_reason"] == "stop"
    streamed = server.events(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    )
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == call


def test_one_call_is_enough_where_no_parallel_ones_are_wanted(server, tokenizer):
    say(server, tokenizer, CALL + SECOND + " and more")
    server.engine.delay = 0.002
    answer = server.chat(tools=[WEATHER, TIME], parallel_tool_calls=False).json()
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    server.wait_until(lambda: len(server.engine.aborted) == 1)  # nobody pays for what nobody wants
    spoken = len(tokenizer.encode(CALL, add_special_tokens=False))
    assert answer["usage"]["completion_tokens"] <= spoken


@pytest.mark.parametrize("burst", [1, 4, 1000])
def test_a_stream_has_name_and_id_first_and_then_arguments(server, tokenizer, burst):
    say(server, tokenizer, f"Look: {CALL}\n{SECOND}", burst)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [WEATHER, TIME],
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    events = server.events("/v1/chat/completions", body)
    assert events[-1]["usage"]["completion_tokens"] == 2 * (
        1 + len(tokenizer.encode(f"Look: {CALL}\n{SECOND}", add_special_tokens=False))
    )
    for index in range(2):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == "Look:"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["tool_calls"]
        calls: dict[int, dict[str, Any]] = {}
        for choice in mine:
            told = [delta["index"] for delta in choice["delta"].get("tool_calls", [])]
            assert len(set(told)) == len(told), "a chunk has one entry a call"
        for delta in (delta for choice in mine for delta in choice["delta"].get("tool_calls", [])):
            if delta["index"] not in calls:
                assert delta["index"] == len(calls)
                assert delta["type"] == "function"
                calls[delta["index"]] = {"id": delta["id"], "name": delta["function"]["name"], "text": ""}
            else:
                assert "id" not in delta
                assert "name" not in delta["function"]
            calls[delta["index"]]["text"] += delta["function"].get("arguments", "")
        assert [call["name"] for call in calls.values()] == ["get_weather", "get_time"]
        assert [json.loads(call["text"]) for call in calls.values()] == [ARGUMENTS, {"zone": 1}]
    ids = [
        d["id"] for e in events for c in e["choices"] for d in c["delta"].get("tool_calls", []) if "id" in d
    ]
    assert len(set(ids)) == 4


def test_an_answer_cut_short_says_length(server, tokenizer):
    say(server, tokenizer, CALL)
    (choice,) = server.chat(tools=[WEATHER], max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert CALL.startswith(choice["message"]["content"])
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}]',
        ),
        (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}'),
    ],
    ids=["mistral", "llama"],
)
def test_markers_that_are_special_tokens_are_seen(serve, tokenizer, template, answer):
    with serve(template) as server:
        say(server, tokenizer, answer)
        assert tokenizer.is_special(server.engine.script[0])
        (choice,) = server.chat(tools=[WEATHER]).json()["choices"]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        assert choice["message"]["content"] is None
        plain = server.chat().json()["choices"][0]["message"]["content"]
        assert not plain.startswith(("[TOOL", "<|py")), (
            "without tools they are left out, as all special tokens"
        )


# ------------------------------------------------------------------ what the model is told


def test_the_template_gets_the_tools_and_earlier_calls(server, tokenizer):
    call = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    strict = json.loads(json.dumps(TIME))
    strict["function"]["strict"] = False
    assert server.chat(messages=messages, tools=[WEATHER, strict]).status_code == 200
    prompt = prompt_of(server, tokenizer)
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt
    assert "strict" not in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}' in prompt
    assert "tool: sunny" in prompt


def test_a_function_without_parameters_takes_nothing(server, tokenizer):
    server.chat(tools=[{"type": "function", "function": {"name": "stop_it"}}])
    assert '"parameters": {"type": "object", "properties": {}}' in prompt_of(server, tokenizer)


def test_tool_choice_none_leaves_the_tools_out(server, tokenizer):
    say(server, tokenizer, CALL)
    (choice,) = server.chat(tools=[WEATHER], tool_choice="none").json()["choices"]
    assert "get_weather" not in prompt_of(server, tokenizer)
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("tool", [WEATHER, {"type": "function", "function": {"name": "f", "strict": False}}])
def test_tokenize_counts_the_tools_as_chat_does(server, tool):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert server.chat(**body).status_code == 200
    counted = server.client.post("/tokenize", json=body).json()["tokens"]
    assert counted == server.engine.commands[-1].prompt_token_ids


# ------------------------------------------------------------------ what guides it


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_the_engine_is_given_a_grammar(server, fields):
    assert server.chat(tools=[WEATHER, TIME], **fields).status_code == 200
    grammar = server.engine.commands[-1].params.grammar
    assert grammar is not None
    assert ("get_weather" in grammar) == ("function" not in str(fields.get("tool_choice")))
    assert "get_time" in grammar


NAMED = {"type": "function", "function": {"name": "get_weather"}}


NO_ARGUMENTS = [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}]


@pytest.mark.parametrize("parameters", NO_ARGUMENTS, ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_a_guided_call_of_a_function_without_arguments_has_none(server, parameters, strict):
    def grammar(parameters: Any) -> str | None:
        function = {"name": "ping", "strict": strict, "parameters": parameters}
        choice = "auto" if strict else "required"
        tools = [{"type": "function", "function": function}]
        assert server.chat(tools=tools, tool_choice=choice).status_code == 200
        return server.engine.commands[-1].params.grammar

    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert grammar(parameters) == grammar(closed) != grammar({**closed, "additionalProperties": True})


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_function_by_name_is_guided_to_one_call_however_many_are_allowed(server, parallel):
    def grammar(**fields: Any) -> str | None:
        assert server.chat(**fields).status_code == 200
        return server.engine.commands[-1].params.grammar

    named = grammar(tools=[WEATHER, TIME], tool_choice=NAMED, parallel_tool_calls=parallel)
    required = {"tools": [WEATHER], "tool_choice": "required"}
    assert named == grammar(**required, parallel_tool_calls=False)
    assert named != grammar(**required)


def test_strict_functions_are_guided_when_the_model_calls_by_itself(server):
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    server.chat(tools=[strict, TIME])
    grammar = server.engine.commands[-1].params.grammar
    assert grammar is not None
    assert "fahrenheit" in grammar
    assert "zone" not in grammar, "the other one is free to take any object"


def test_guided_arguments_are_streamed_as_they_come(server, tokenizer):
    say(server, tokenizer, CALL)
    server.engine.delay = 0.005
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "tool_choice": "required"}
    events = server.events("/v1/chat/completions", body)
    pieces = [d for e in events for d in e["choices"][0]["delta"].get("tool_calls", [])]
    assert len(pieces) > 5
    assert json.loads("".join(piece["function"].get("arguments", "") for piece in pieces)) == ARGUMENTS
