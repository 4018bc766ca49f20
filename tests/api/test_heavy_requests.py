"""Requests that are heavy to read keep nobody waiting: long ones are worked on aside, senseless ones refused early."""

from __future__ import annotations

import threading

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


def test_messages_by_the_hundred_thousand_are_refused_before_they_are_read(server, monkeypatch):
    monkeypatch.setattr(connection, "decode", None)
    for messages in (
        [{"role": "user", "content": "a"}] * 30_000,
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}],
    ):
        answer = server.chat(messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text


def test_a_text_about_roles_is_no_list_of_messages(server):
    text = '{"role": "user", "type": "x"}, ' * 60_000
    answer = server.chat(messages=[{"role": "user", "content": text}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"
