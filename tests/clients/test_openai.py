"""The openai client, unchanged, reads the answers of transformers and PEFT off the demo server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .conftest import NAME

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
QUESTION: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def client(demo_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def said(judge) -> dict[str, tuple[list[int], list[float]]]:
    """By prompt, and "chat" and "pirate" for the question."""
    found = {prompt: judge.of(None).greedy(judge.ids_of_text(prompt), 16) for prompt in PROMPTS}
    asked = judge.ids_of_chat(QUESTION)
    return {**found, "chat": judge.of(None).greedy(asked, 16), "pirate": judge.of("pirate").greedy(asked, 16)}


def test_completions_of_several_prompts_are_transformers(client, judge, said):
    answer = client.completions.create(model=NAME, prompt=PROMPTS, n=2, logprobs=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    for index, choice in enumerate(answer.choices):
        tokens, logprobs = said[PROMPTS[index // 2]]
        assert choice.text == judge.text(tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
        assert all(
            max(top.values()) == own
            for top, own in zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs)
        )
    assert answer.usage.prompt_tokens == sum(len(judge.ids_of_text(prompt)) for prompt in PROMPTS)


def test_streamed_completions_are_transformers(client, judge, said):
    stream = client.completions.create(model=NAME, prompt=PROMPTS[0], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == judge.text(said[PROMPTS[0]][0])


@pytest.mark.parametrize("model", [NAME, "pirate"])
def test_chats_with_and_without_an_adapter_are_transformers_and_pefts(client, judge, said, model):
    tokens, logprobs = said["chat" if model == NAME else model]
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert whole.choices[0].message.content == judge.text(tokens)
    assert [entry.logprob for entry in whole.choices[0].logprobs.content] == pytest.approx(logprobs, abs=1e-3)
    stream = client.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == judge.text(tokens)


def test_a_stop_string_ends_the_text_before_it(client, judge, said):
    text = judge.text(said[PROMPTS[0]][0])
    stop = text[7:11]
    answer = client.completions.create(model=NAME, prompt=PROMPTS[0], stop=[stop, "never there"], **GREEDY)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_echoed_prompt_has_transformers_log_probabilities(client, judge):
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], echo=True, logprobs=1, max_tokens=0)
    ids = judge.ids_of_text(PROMPTS[1])
    got = answer.choices[0].logprobs.token_logprobs
    rows = judge.of(None).rows(ids)
    assert answer.choices[0].text == PROMPTS[1]
    assert got[0] is None
    assert got[1:] == pytest.approx([float(rows[i, token]) for i, token in enumerate(ids[1:])], abs=1e-3)


def test_a_json_schema_is_kept_to(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": schema, "strict": True},
        },
        max_tokens=60,
        temperature=0,
    )
    made = json.loads(answer.choices[0].message.content)
    assert set(made) == {"city", "warm"}
    assert isinstance(made["warm"], bool)


def test_tools_that_the_template_cannot_say_are_refused_by_name(client):
    """The demo base's own template knows no tools."""
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=QUESTION, tools=[tool], **GREEDY)
    assert refused.value.param == "tools"
