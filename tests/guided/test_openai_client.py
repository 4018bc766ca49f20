"""The whole server in its own processes over a model that speaks noise, and the unmodified OpenAI client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from ..api.server_process import Process, served
from .conftest import TIME, WEATHER

QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, TIME)}


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    data = tmp_path_factory.mktemp("data")
    with served(engine={"model": str(base)}, served_model_name="tiny", data_dir=data) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def obeys(call: Any) -> None:
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=0, le=8)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    pets: list[Pet] = pydantic.Field(max_length=2)
    home: Literal["Paris", "Berlin"] | None


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Person, n=3, max_completion_tokens=300
    )
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert all(choice.finish_reason == "stop" for choice in answer.choices)


def test_a_streamed_json_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = Person.model_json_schema()
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
            max_completion_tokens=300,
            stream=True,
        )
    )
    assert len(chunks) > 5
    Person.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_vllms_fields_guide_completions(client: openai.OpenAI) -> None:
    fields: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": r"[a-f]{4}-\d{2}"}, r"[a-f]{4}-\d{2}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"regex": "[xyz]{3}"}}, "[xyz]{3}"),
        ({"guided_json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, r"\[.*\]"),
    ]
    for extra, pattern in fields:
        answer = client.completions.create(
            model="tiny", prompt=["a", "b"], max_tokens=60, n=2, extra_body=extra
        )
        assert len(answer.choices) == 4
        assert all(re.fullmatch(pattern, choice.text, re.DOTALL) for choice in answer.choices)


@pytest.mark.parametrize("choice", ["required", "get_time"])
def test_calls_that_must_be_made_obey_their_schemas(client: openai.OpenAI, choice: str) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[WEATHER, TIME],  # type: ignore[list-item]
        tool_choice=named,
        n=4,
        max_completion_tokens=300,
        seed=3,
    )
    for one in answer.choices:
        assert one.message.content is None
        assert one.finish_reason == "tool_calls"
        assert one.message.tool_calls
        for call in one.message.tool_calls:
            obeys(call)
            assert choice in ("required", call.function.name)
        if choice != "required":
            assert len(one.message.tool_calls) == 1, "parallel calls are allowed, and yet it is the one named"


def test_streamed_calls_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 100,
        "seed": 5,
    }
    whole = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    for answer in (whole, streamed):
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls or []:
            obeys(call)
    first, second = (answer.choices[0].message.tool_calls or [] for answer in (whole, streamed))
    assert [(c.function.name, c.function.arguments) for c in first] == [
        (c.function.name, c.function.arguments) for c in second
    ]


def test_one_call_where_no_parallel_ones_are_wanted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[WEATHER, TIME],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
        n=4,
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        obeys(call)


def test_an_answer_or_a_call(client: openai.OpenAI) -> None:
    """Either obeys what was asked of it."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    strict: Any = {"type": "function", "function": {**TIME["function"], "strict": True}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[strict],
        parallel_tool_calls=False,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
        },
        n=4,
        max_completion_tokens=100,
    )
    for choice in answer.choices:
        if choice.message.tool_calls:
            assert choice.message.content is None
            for call in choice.message.tool_calls:
                obeys(call)
        else:
            jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_refusals_name_the_field_and_hostile_ones_hurt_nobody(server: Process, client: openai.OpenAI) -> None:
    endless = {"type": "integer", "multipleOf": 62615533}
    too_complex = "(.{0,1000}[a-z]){0,100}x"

    def ask(**extra: Any) -> Any:
        return client.completions.create(model="tiny", prompt="a", max_tokens=20, extra_body=extra)

    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(ask, guided_json=endless), pool.submit(ask, guided_regex="(")]
        heavy = [pool.submit(ask, guided_regex=too_complex) for _ in range(2)]
        quiet = [pool.submit(ask) for _ in range(4)]
        assert all(one.result().usage.completion_tokens for one in quiet)
        for one, field in zip(hostile, ["guided_json", "guided_regex"]):
            with pytest.raises(openai.BadRequestError) as refused:
                one.result()
            assert refused.value.param == field
        for one in heavy:  # it depends on what the model says whether a step is too much
            failure = one.exception()
            assert failure is None or getattr(failure, "param", None) == "guided_regex"
    assert re.fullmatch("[a-z]{3}", ask(guided_regex="[a-z]{3}").choices[0].text)
    assert server.client.get("/ready").status_code == 200
