"""The demo base, guided: what it says of itself is sensible, and what a grammar asks for is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from heddle import LLM, Grammar, SamplingParams

from ..api.server_process import Process, served
from .conftest import WEATHER

CHATML_TOOLS = """{%- if tools %}{{ '<|im_start|>system\nYou may call functions. They are:\n' }}
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ 'To call one, say:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def with_tools(demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo base with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("demo") / "with-tools"
    folder.mkdir()
    for file in demo_base.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(CHATML_TOOLS)
    return folder


@pytest.fixture(scope="module")
def client(with_tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    engine = {
        "model": str(with_tools),
        "quantization": "int8",
        "pool_memory": 64 << 20,
        "check_invariants": False,
    }
    data = tmp_path_factory.mktemp("data")
    with served(engine=engine, served_model_name="demo", data_dir=data) as process:
        yield _client(process)


def _client(process: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_tool_is_called_with_what_was_asked_for(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "What is the weather in Paris in celsius?"}
    request: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
    request["parallel_tool_calls"] = False
    answer = client.chat.completions.create(messages=[question], tool_choice="required", **request)
    (call,) = answer.choices[0].message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    assert arguments == {"city": "Paris", "unit": "celsius"}
    assert answer.choices[0].finish_reason == "tool_calls"
    turns: Any = [
        question,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'},
    ]
    second = client.chat.completions.create(messages=turns, **request)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


def test_choices_and_schemas_are_kept_to(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Is Paris the capital of France? Answer yes or no."}]
    request: dict[str, Any] = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(extra_body={"guided_choice": ["yes", "no"]}, **request)
    assert answer.choices[0].message.content in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}, **request
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_in_python_too(demo_base: Path) -> None:
    with LLM(demo_base, quantization="int8", pool_memory=64 << 20) as llm:
        (request,) = llm.generate(
            ["The capital of France is"],
            SamplingParams(temperature=0, grammar=Grammar.choice([" Rome", " Paris", " a city"])),
        )
        assert request.outputs[0].text == " Paris"
        with pytest.raises(ValueError, match="does not take tools"):
            llm.chat([{"role": "user", "content": "hi"}], tools=[WEATHER])
