"""A whole server whose pool holds three sequences, and 24 streams at once: each is the answer it has alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .server_process import Process, served

BLOCK = 2 * 2 * 2 * 16 * 8 * 4
"""Bytes: layers, K and V, kv heads, tokens, head_dim, float32."""


@pytest.fixture(scope="module")
def server(world: dict[str, Any]) -> Iterator[Process]:
    engine = {
        "model": str(world["base"]),
        "pool_memory": (3 * 6 + 2) * BLOCK,
        "preemption": "swap",
        "enable_prefix_caching": False,
    }
    settings = {"engine": engine, "served_model_name": "tiny", "adapter_roots": [world["adapters"]]}
    with served(**settings, data_dir=world["home"] / "pressed") as process:
        assert process.client.post("/adapters", json={"name": "one", "source": "one"}).status_code == 201
        yield process


def requests() -> list[dict[str, Any]]:
    """Greedy and seeded, one choice and three, on the base and an adapter."""
    return [
        {
            "prompt": f"{index:02d} bottles of beer",
            "adapter": "one" if index % 4 == 3 else None,
            "max_tokens": 70,
            "temperature": index % 2,
            "seed": index,
            "n": 3 if index % 3 == 2 else 1,
            "logprobs": 2,
            "ignore_eos": True,
        }
        for index in range(24)
    ]


def streamed(server: Process, body: dict[str, Any]) -> dict[str, Any]:
    """A stream put together: text, tokens, log-probabilities and reason of each choice, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/completions", json={"model": "tiny", **body, **extra}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for delta in event["choices"]:
            one = choices.setdefault(
                delta["index"], {"text": "", "tokens": [], "token_logprobs": [], "finish_reason": None}
            )
            assert one["finish_reason"] is None, "something after the end"
            one["text"] += delta["text"]
            one["finish_reason"] = delta["finish_reason"]
            for name in ("tokens", "token_logprobs"):
                one[name] += (delta.get("logprobs") or {}).get(name, [])
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def whole(server: Process, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.client.post("/v1/completions", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    names = ("tokens", "token_logprobs")
    choices = [
        {
            "text": choice["text"],
            **{name: choice["logprobs"][name] for name in names},
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer.json()["choices"]
    ]
    return {"choices": choices, "usage": answer.json()["usage"]}


def counted(server: Process, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"heddle_{name}_total ")))


def test_streams_under_pressure_are_the_answers_each_has_alone(server: Process) -> None:
    """Through swaps: text, tokens, log-probabilities, reasons and usage; nothing is streamed twice."""
    bodies = requests()
    for body in bodies[4::5]:  # these are to stop at a letter that they come to say
        text = whole(server, body)["choices"][0]["text"]
        body["stop"] = [next(letter for letter in text[8:] if letter.isascii() and letter.isprintable())]
    alone = [whole(server, body) for body in bodies]
    before = counted(server, "swap_ins")
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda body: streamed(server, body), bodies))
    swap_ins, swap_outs = counted(server, "swap_ins"), counted(server, "swap_outs")
    assert before < swap_ins <= swap_outs == counted(server, "preemptions")
    assert swap_outs - swap_ins <= len(bodies[4::5]), (
        "only what stops at a letter can end while it is swapped out"
    )
    for one, other in zip(alone, together):
        assert other == one
    assert {choice["finish_reason"] for one in together for choice in one["choices"]} == {"length", "stop"}
