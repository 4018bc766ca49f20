"""What a request's fields may say: every bad value is a 400 that names its field, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

BIG = 5279552648203111001
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refusal(answer, status: int = 400, code: str = "invalid_request") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        # stop strings
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": [f"s{i}" for i in range(10_000)]}, "stop"),
        ({"stop": [1]}, "stop"),
        # prompts
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
        # ids outside the vocabulary
        ({"prompt": [[1, 264]]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [[BIG]]}, "prompt"),
        ({"prompt": [[10**30]]}, "prompt"),
        ({"prompt": [[1.5]]}, "prompt"),
        ({"prompt": [[1.0]]}, "prompt"),
        ({"stop_token_ids": [151645], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        # seeds
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": "100"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 1.5}, "seed"),
        # odd floats
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        # counts
        ({"n": 1_000_000}, "n"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"logprobs": 1_000_000}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        # streams
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
        # adapters
        ({"adapter": 5}, "adapter"),
        ({"adapter": []}, "adapter"),
        ({"adapter": [{"name": "a", "weight": "1"}]}, "adapter"),
        ({"adapter": [{"weight": 1}]}, "adapter"),
        ({"adapter": [{"name": "a", "weight": 1e9}]}, "adapter"),
        ({"adapter": [{"name": "a"}] * 33}, "adapter"),
        ({"on_cold": "never"}, "on_cold"),
        # fields that are known and not served
        ({"suffix": "x"}, "suffix"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_bad_values_are_refused_by_name(server, fields, param):
    error = refusal(server.complete(**fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.complete().status_code == 200
    assert not server.engine.aborted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_bad_values_of_chat_are_refused_by_name(server, fields, param):
    assert refusal(server.chat(**fields))["param"] == param
    assert server.chat().status_code == 200


def test_an_echo_in_chat_is_told_where_it_is_served(server):
    message = refusal(server.chat(echo=True))["message"]
    assert message == "echo is not served here: it is a field of /v1/completions"
    assert server.chat(echo=False).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(server, number):
    body = f'{{"prompt": "hi", "temperature": {number}}}'
    refusal(server.client.post("/v1/completions", content=body))


NUMBERS = (
    "n", "best_of", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "max_completion_tokens",
)  # fmt: skip
"""Fields that are one number, in completions and chat."""
HUGE = [
    "1e30",
    "-1e30",
    "1" + "0" * 30,
    "-1" + "0" * 30,
    "1e999",
    "-1e999",
    "1" + "0" * 400,
    "NaN",
    "Infinity",
]


@pytest.mark.parametrize("number", HUGE, ids=lambda number: number[:8])
def test_a_number_out_of_range_is_refused_by_its_field(server, number):
    """Also where no number of the language holds it, so that the body cannot even be read."""
    prompt, turns = '"prompt": "hi"', '"messages": [{"role": "user", "content": "hi"}]'
    both = [(field, f'"{field}": {number}') for field in NUMBERS]
    both += [
        ("logit_bias", f'"logit_bias": {{"65": {number}}}'),
        ("stop_token_ids", f'"stop_token_ids": [1, {number}]'),
        ("adapter", f'"adapter": [{{"name": "a", "weight": {number}}}]'),
    ]
    cases = [(COMPLETIONS, field, f"{prompt}, {text}") for field, text in both]
    cases += [(CHAT, field, f"{turns}, {text}") for field, text in both]
    cases += [
        (COMPLETIONS, "logprobs", f'{prompt}, "logprobs": {number}'),
        (COMPLETIONS, "prompt", f'"prompt": [1, {number}]'),
        (COMPLETIONS, "prompt", f'"prompt": [[1], [{number}]]'),
        (CHAT, "top_logprobs", f'{turns}, "logprobs": true, "top_logprobs": {number}'),
    ]
    for path, field, text in cases:
        answer = server.client.post(path, content=f"{{{text}}}")
        beyond = field.startswith("max_") and number.startswith("10")
        error = refusal(answer, code="context_length_exceeded" if beyond else "invalid_request")
        assert error["param"] == field, text[:80]
        assert len(error["message"]) < 600
    assert not server.engine.commands


@pytest.mark.parametrize("tokens", [257, 10**5, 2**31, 10**12, 10**30])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_longer_than_the_context_is_one_fault_however_much_longer(server, tokens, field):
    for answer in (server.complete(**{field: tokens}), server.chat(**{field: tokens})):
        error = refusal(answer, code="context_length_exceeded")
        assert error["param"] == field
        assert f"{field} = {tokens}" in error["message"]
        assert "256" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi"} trailing',
        b'{"x": ' + b"[" * 100_000,
        b'{"user": ' + b'{"a": ' * 50_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_malformed_bodies_are_refused(server, body):
    refusal(server.client.post("/v1/completions", content=body))
    assert server.complete().status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None},
        {"stop": []},
        {"seed": 0},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"temperature": 0},
        {"temperature": 1e-8},
        {"top_k": -1},
        {"top_k": 0},
        {"n": None, "max_tokens": None, "logprobs": None, "adapter": None},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"user": "someone", "x_unknown": {"deep": [1]}, "spaces_between_special_tokens": True},
        {"response_format": {"type": "text"}, "guided_json": None, "suffix": None},
        {"skip_special_tokens": True, "length_penalty": 1.0},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"stream_options": None},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_good_values_are_taken(server, fields):
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text


def test_sampling_fields_reach_the_engine(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "7": 2.5},
        "seed": -7,
        "stop_token_ids": [9, 10],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
    }
    assert server.complete(**fields).status_code == 200
    (command,) = server.engine.commands
    params = command.params
    expected = {**fields, "logit_bias": {5: -100.0, 7: 2.5}, "stop_token_ids": (9, 10)}
    assert {name: getattr(params, name) for name in expected} == expected
    assert command.prompt_token_ids == [*b"hi"]


def test_defaults_are_openais(server):
    server.complete()
    server.chat()
    completion, chat = server.engine.commands
    assert (completion.params.max_tokens, completion.shorten) == (16, True)
    assert chat.params.max_tokens is None
    assert completion.params.temperature == chat.params.temperature == 1.0
    assert completion.params.logprobs is completion.params.prompt_logprobs is None


def test_every_sequence_has_a_seed_of_its_own(server):
    server.complete(prompt=["A", "B"], n=3, seed=5)
    seeds = [command.params.seed for command in server.engine.commands]
    assert len(set(seeds[:3])) == 3
    assert seeds[0] == 5
    assert seeds[:3] == seeds[3:], "a prompt's answers do not depend on its neighbours"
    server.engine.reset()
    server.complete(prompt=["A", "B"], n=3)
    assert len({command.params.seed for command in server.engine.commands}) == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 128}, "n"), ({"best_of": 128}, "best_of"), ({}, "prompt"), ({"n": 1}, "prompt")],
)
def test_more_sequences_than_can_queue_are_refused_before_any_is_made(server, monkeypatch, fields, param):
    engine = server.state.services.engine
    monkeypatch.setattr(engine, "config", msgspec.structs.replace(engine.config, max_queued_requests=1000))
    error = refusal(server.complete(prompt=["a"] * 1024, **fields))
    assert error["param"] == param
    assert not server.engine.commands


@pytest.mark.parametrize("length", [63, 64, 65])
def test_a_prompt_may_fill_the_context_but_for_one_token(base, serve, tmp_path, length):
    with serve(tmp_path, base, max_model_len=64) as server:
        answer = server.complete(prompt="x" * length)
        if length == 63:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == 1
        else:
            error = refusal(answer, code="context_length_exceeded")
            assert str(length) in error["message"]
            assert "64" in error["message"]
            assert error["param"] == "prompt"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_prompt_and_answer_beyond_the_context_are_refused_by_the_field_used(base, serve, tmp_path, field):
    with serve(tmp_path, base, max_model_len=64) as server:
        error = refusal(server.complete(prompt="x" * 60, **{field: 10}), code="context_length_exceeded")
        assert error["param"] == field
        assert "60" in error["message"]
        error = refusal(server.chat(**{field: 60}), code="context_length_exceeded")
        assert error["param"] == field


def test_a_begin_token_alone_is_a_prompt(model_folder, serve, tmp_path):
    base = model_folder(tmp_path / "bos", bos=True)
    with serve(tmp_path, base) as server:
        for prompt, ids in (("", [256]), ("hi", [256, *b"hi"]), ("<s>hi", [256, *b"hi"]), ([1, 2], [1, 2])):
            answer = server.complete(prompt=prompt)
            assert answer.status_code == 200, answer.text
            assert server.engine.commands[-1].prompt_token_ids == ids
            assert answer.json()["usage"]["prompt_tokens"] == len(ids)
        refusal(server.complete(prompt="", add_special_tokens=False))
        server.chat()
        assert server.engine.commands[-1].prompt_token_ids.count(256) == 1


def test_the_engines_refusal_names_the_callers_fields(server):
    from heddle.core.messages import EngineError

    server.engine.refusal = EngineError("capacity_exceeded", "no room", "max_tokens")
    assert refusal(server.chat(max_completion_tokens=4), code="capacity_exceeded")["param"] == (
        "max_completion_tokens"
    )
    server.engine.refusal = EngineError("capacity_exceeded", "no room", "prompt")
    assert refusal(server.chat(), code="capacity_exceeded")["param"] == "messages"
    server.engine.refusal = EngineError("overloaded", "full")
    answer = server.complete(stream=True)
    refusal(answer, 503, "overloaded")
    assert answer.headers["retry-after"]
