"""The product's own story on the real base: register, choose, evict, list, restart, survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "The three most important rules of cooking are",
    "Water boils at",
]


def _cli(server: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("heddle")
    return subprocess.run(
        [program, *arguments, "--url", server.url], capture_output=True, text=True, check=False
    )


def _engine_pid(server: Any) -> int:
    children = psutil.Process(server.process.pid).children(recursive=True)
    engines = [
        child.pid for child in children if any("core.engine.process" in word for word in child.cmdline())
    ]
    assert len(engines) == 1, [child.cmdline() for child in children]
    return engines[0]


def _register_all(server: Any, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        answer = server.http.post("/adapters", json={"name": name, "source": str(folder)})
        assert answer.status_code in (200, 201), answer.text


def test_the_demo_serves_three_adapters_under_public(server: Any):
    listed = server.http.get("/adapters").json()["data"]
    assert len([entry for entry in listed if entry["tenant"] == "public"]) >= 3
    models = server.http.get("/v1/models").json()["data"]
    assert models[0]["parent"] is None
    assert all(entry["parent"] == models[0]["id"] for entry in models[1:])


def test_an_adapter_made_by_peft_is_taken_whole_and_changes_the_answer(
    server: Any, peft_adapters: dict[str, Path]
):
    answer = server.http.post("/adapters", json={"name": "first", "source": str(peft_adapters["r8"])})
    assert answer.status_code == 201, answer.text
    receipt = answer.json()
    assert receipt["matched"]["tensors"] == receipt["matched"]["total"] == 30 * 7 * 2
    assert receipt["rank"] == 8

    base = server.complete(PROMPTS[0])["choices"][0]["text"]
    adapted = server.complete(PROMPTS[0], adapter="first")
    assert "Paris" in base
    assert adapted["choices"][0]["text"] != base
    assert adapted["adapter"] == "first@1"

    unknown = server.http.post("/v1/completions", json={"prompt": "x", "adapter": "nobody"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"

    evicted = server.http.post("/adapters/first/evict", json={})
    assert evicted.status_code == 200
    assert evicted.json()["residency"] == "host"
    assert server.complete(PROMPTS[0], adapter="first")["choices"][0]["text"] == adapted["choices"][0]["text"]

    listed = _cli(server, "adapters", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert "first" in listed.stdout
    table = _cli(server, "adapters", "list")
    for column in ("name", "tenant", "version", "rank", "size", "residency", "pinned", "in use", "last used"):
        assert column in table.stdout.lower(), table.stdout


def test_a_restart_brings_every_adapter_back(server: Any, peft_adapters: dict[str, Path]):
    answer = server.http.post("/adapters", json={"name": "kept", "source": str(peft_adapters["r4"])})
    assert answer.status_code in (200, 201)
    before = server.complete(PROMPTS[1], adapter="kept")["choices"][0]["text"]
    assert server.stop() == 0
    server.start()
    names = {entry["name"] for entry in server.http.get("/adapters").json()["data"]}
    assert "kept" in names
    assert server.complete(PROMPTS[1], adapter="kept")["choices"][0]["text"] == before


def test_sixteen_streams_over_six_adapters_equal_each_alone(server: Any, peft_adapters: dict[str, Path]):
    _register_all(server, peft_adapters)
    choices = [None, *peft_adapters]
    requests = [
        {
            "prompt": PROMPTS[number % len(PROMPTS)] + " " + "so " * (number % 5),
            "adapter": choices[number % len(choices)],
            "temperature": 0,
            "max_tokens": 20,
            "logprobs": 2,
            "ignore_eos": True,
        }
        for number in range(16)
    ]

    def stream(request: dict[str, Any]) -> tuple[list[str], list[float], str]:
        tokens: list[str] = []
        logprobs: list[float] = []
        text = ""
        with server.http.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["text"]
                        if choice.get("logprobs"):
                            tokens += choice["logprobs"]["tokens"]
                            logprobs += choice["logprobs"]["token_logprobs"]
        return tokens, logprobs, text

    alone = [stream(request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(stream, requests))
    for one, mixed in zip(alone, together, strict=True):
        assert len(one[0]) == 20
        assert mixed[0] == one[0]
        assert mixed[2] == one[2]
        assert mixed[1] == pytest.approx(one[1], abs=1e-4)
    assert len({result[2] for result in alone}) > 7  # the adapters do differ


def test_the_engine_killed_under_load_comes_back_with_every_adapter(
    server: Any, peft_adapters: dict[str, Path]
):
    _register_all(server, peft_adapters)
    before = server.complete(PROMPTS[0], adapter="r16")["choices"][0]["text"]
    results: list[int] = []

    def run() -> None:
        body = {"prompt": PROMPTS[1], "adapter": "r16", "max_tokens": 400, "ignore_eos": True}
        results.append(server.http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    os.kill(_engine_pid(server), signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=30)
    assert results == [500] * 4

    deadline = time.monotonic() + 60
    while server.http.get("/ready").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.complete(PROMPTS[0], adapter="r16")["choices"][0]["text"] == before
    names = {entry["name"] for entry in server.http.get("/adapters").json()["data"]}
    assert set(peft_adapters) <= names


def test_the_openai_client_completes_chats_and_streams(server: Any):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    base = client.models.list().data[0].id
    adapter = next(
        entry["name"] for entry in server.http.get("/adapters").json()["data"] if entry["name"] == "pirate"
    )
    done = client.completions.create(model=base, prompt=PROMPTS[0], max_tokens=8, temperature=0)
    assert "Paris" in done.choices[0].text

    question = [{"role": "user", "content": "What is the capital of France?"}]
    plain = client.chat.completions.create(model=base, messages=question, max_tokens=32, temperature=0)
    by_model = client.chat.completions.create(model=adapter, messages=question, max_tokens=32, temperature=0)
    by_field = client.chat.completions.create(
        model=base, messages=question, max_tokens=32, temperature=0, extra_body={"adapter": adapter}
    )
    assert by_model.choices[0].message.content == by_field.choices[0].message.content
    assert by_model.choices[0].message.content != plain.choices[0].message.content

    pieces = client.chat.completions.create(
        model=adapter, messages=question, max_tokens=32, temperature=0, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == by_model.choices[0].message.content


def test_after_random_requests_and_aborts_nothing_is_held(server: Any, peft_adapters: dict[str, Path]):
    import random

    import httpx

    _register_all(server, peft_adapters)
    random_choice = random.Random(5)
    adapters = [None, *peft_adapters]

    def one(number: int) -> None:
        chosen = random.Random(number)
        body = {
            "prompt": "word " * chosen.randint(1, 60),
            "adapter": chosen.choice(adapters),
            "max_tokens": chosen.randint(1, 12),
            "n": chosen.choice([1, 1, 2]),
            "stream": chosen.random() < 0.5,
        }
        patience = chosen.choice([0.05, 0.3, 1.0, 60.0, 60.0])
        try:
            with server.http.stream("POST", "/v1/completions", json=body, timeout=patience) as answer:
                for _ in answer.iter_lines():
                    if chosen.random() < 0.05:
                        break
        except httpx.TimeoutException:
            pass

    order = list(range(300))
    random_choice.shuffle(order)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, order))

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        memory = server.http.get("/admin/memory").json()
        holds = [entry["in_use"] for entry in server.http.get("/adapters").json()["data"]]
        if memory["blocks_used"] == 0 and not any(holds):
            break
        time.sleep(0.1)
    assert memory["blocks_used"] == 0, memory
    assert not any(holds)
    kept = memory["blocks_free"] + memory["blocks_cached"] + memory["blocks_adapters"]
    assert kept == memory["blocks_total"]
