"""Requests that are heavy to read keep nobody waiting: long ones are worked on aside, senseless ones refused early."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from heddle.api import turns
from heddle.api.generation import prompts
from heddle.api.http import connection


def test_the_event_loop_goes_on_while_a_prompt_is_tokenised(server, monkeypatch):
    tokenizer = server.state.services.prompts._tokenizer
    go, inside = threading.Event(), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        inside.set()
        go.wait(10)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr(prompts, "SHORT", 200)  # longer ones go to a thread
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.complete(prompt="a" * 240)))
    thread.start()
    assert inside.wait(10)
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/adapters").status_code == 200
    go.set()
    thread.join(10)
    assert answers[0].status_code == 200


def test_a_text_of_megabytes_is_refused_without_being_tokenised(server, monkeypatch):
    monkeypatch.setattr(server.state.services.prompts._tokenizer, "encode", None)
    text = "ab " * 1_000_000
    for answer in (server.complete(prompt=text), server.chat(messages=[{"role": "user", "content": text}])):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "tokens at the least, and the model's context is 256" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 60_000}, "/v1/chat/completions"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}] * 60_000}]}, "/v1/chat/completions"),
        ({"messages": [], "prediction": [[]] * 60_000}, "/v1/chat/completions"),
        ({"messages": [], "metadata": {f"a{n}": 1 for n in range(600_000)}}, "/v1/chat/completions"),
        ({"prompt": [1000] * 1_000_000}, "/v1/completions"),
        ({"tokens": [1000] * 1_000_000}, "/detokenize"),
    ],
    ids=["messages", "content parts", "lists", "keys", "token ids", "token ids for a text"],
)
def test_countless_values_are_refused_before_they_are_read(server, monkeypatch, fields, path):
    monkeypatch.setattr(connection, "decode", None)
    answer = server.client.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), answer.text
    assert re.search(r"the body holds \d+ (lists and objects|values), and at most \d+", answer.text)


def test_large_bodies_that_come_together_are_read_in_different_rounds_of_the_loop(server, monkeypatch):
    """Each takes longer than a turn, so the next one waits until the loop has been round."""
    decode, rounds, now = connection.decode, [], 0
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)

    def count() -> None:
        nonlocal now
        now += 1
        server.loop.call_soon(count)

    def noted(body: bytes, body_type: Any) -> Any:
        rounds.append(now)
        return decode(body, body_type)

    monkeypatch.setattr(connection, "decode", noted)
    server.loop.call_soon_threadsafe(count)
    text = "ab " * 100_000
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: server.complete(prompt=text), range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert len(set(rounds)) == 4


def test_a_text_about_roles_is_no_list_of_messages(server):
    text = '{"role": "user", "type": "x"}, ' * 60_000
    answer = server.chat(messages=[{"role": "user", "content": text}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_many_sequences_are_submitted_in_turns(server):
    answer = server.complete(prompt=["hi", "ho"], n=75, max_tokens=3, temperature=1.0)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["hel"] * 150
    assert server.engine.submitted_at_once == [64, 64, 22]
    assert len({command.key for command in server.engine.commands}) == 150
