"""The whole server in its own processes: a tiny real model, real adapters, the unmodified OpenAI client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import LlamaForCausalLM

from .peft_reference import reference, text_of
from .server_process import PROMPT, SCRIPT, Process, served


@pytest.fixture(scope="module")
def server(world) -> Iterator[Process]:
    settings = {
        "engine": {"model": str(world["base"])},
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": world["home"] / "data",
    }
    with served(**settings) as process:
        for name in ("one", "five", "sixteen"):
            answer = process.client.post("/adapters", json={"name": name, "source": name})
            assert answer.status_code == 201, answer.text
            assert answer.json()["matched"]["tensors"] == answer.json()["matched"]["total"]
        yield process


@pytest.fixture(scope="module")
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("adapter", [None, "one", "five", "sixteen"])
def test_the_openai_client_completes_as_transformers_and_peft_do(client, world, adapter):
    tokens, logprobs = reference(world, adapter, [*PROMPT.encode()], 12)
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    by_field = client.completions.create(model="tiny", extra_body={"adapter": adapter}, **request)
    by_model = client.completions.create(model=adapter or "tiny", **request)
    streamed = list(client.completions.create(model=adapter or "tiny", stream=True, **request))
    for answer in (by_field, by_model):
        choice = answer.choices[0]
        assert choice.text == text_of(tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
        assert answer.usage.completion_tokens == len(tokens)
        assert answer.adapter == (adapter and f"{adapter}@1")
    assert by_model.model == (adapter or "tiny")
    assert "".join(chunk.choices[0].text for chunk in streamed) == text_of(tokens)
    assert streamed[-1].choices[0].finish_reason == by_field.choices[0].finish_reason


def test_the_openai_client_chats(client, world):
    prompt = [256, 258, *b"hi", 259]
    tokens, logprobs = reference(world, "five", prompt, 10)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    request: dict[str, Any] = {"messages": messages, "max_completion_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(model="five", logprobs=True, top_logprobs=2, n=2, **request)
    assert answer.usage.prompt_tokens == len(prompt)
    for choice in answer.choices:
        assert choice.message.content == text_of(tokens)
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-3)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    stream = client.chat.completions.create(
        model="tiny",
        extra_body={"adapter": "five@1"},
        stream=True,
        stream_options={"include_usage": True},
        **request,
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(tokens)
    assert chunks[-1].usage.completion_tokens == len(tokens)


def test_the_openai_client_sees_stops_models_and_errors(client, world):
    tokens, _ = reference(world, "one", [*PROMPT.encode()], 12)
    text = text_of(tokens)
    stop = text[4:6]
    answer = client.completions.create(model="one", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["tiny", "five", "one", "sixteen"]
    assert client.models.retrieve("five").parent == "tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[], temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert long.value.code == "context_length_exceeded"


def test_a_version_made_current_again_finds_its_cache_warm(server, world):
    prompt = f"Begun like no other: {PROMPT}, {PROMPT}"
    expected = {name: text_of(reference(world, name, [*prompt.encode()], 6)[0]) for name in ("one", "five")}

    def complete() -> tuple[str, int, str]:
        answer = server.complete(prompt=prompt, adapter="turning", max_tokens=6).json()
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["text"], details["cached_tokens"], answer["adapter"]

    server.client.post("/adapters", json={"name": "turning", "source": "one"})
    assert complete() == (expected["one"], 0, "turning@1")
    server.client.post("/adapters", json={"name": "turning", "source": "five", "replace": True})
    assert complete() == (expected["five"], 0, "turning@2"), "nothing of the old weights is found"
    assert server.client.patch("/adapters/turning", json={"version": 1}).json()["version"] == 1
    text, cached, adapter = complete()
    assert (text, adapter) == (expected["one"], "turning@1")
    assert cached >= len(prompt) - 16, "all but the last block at least"
    assert server.client.delete("/adapters/turning").status_code == 204


def test_weighted_adapters_are_summed(server, world):
    """Two equal halves of one adapter are that adapter; weight 0 is the base."""
    whole = server.complete(adapter="five", logprobs=0).json()["choices"][0]
    halves = [{"name": "five", "weight": 0.5}, {"name": "five@1", "weight": 0.5}]
    summed = server.complete(adapter=halves, logprobs=0).json()["choices"][0]
    assert summed["text"] == whole["text"]
    assert summed["logprobs"]["token_logprobs"] == pytest.approx(
        whole["logprobs"]["token_logprobs"], abs=1e-4
    )
    base = server.complete().json()["choices"][0]["text"]
    assert server.complete(adapter=[{"name": "five", "weight": 0}]).json()["choices"][0]["text"] == base


def test_concurrent_requests_are_each_as_alone(server):
    requests = [
        {"adapter": adapter, "prompt": f"{PROMPT} {i}", "logprobs": 1, "seed": i, "temperature": i % 2}
        for i, adapter in enumerate([None, "one", "five", "sixteen"] * 4)
    ]
    alone = [server.complete(**request).json()["choices"][0] for request in requests]
    with ThreadPoolExecutor(16) as pool:
        together = [a.json()["choices"][0] for a in pool.map(lambda r: server.complete(**r), requests)]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    for one, other in zip(alone, together):
        assert other["logprobs"]["token_logprobs"] == pytest.approx(
            one["logprobs"]["token_logprobs"], abs=1e-4
        )


def test_prompt_logprobs_are_the_models(server, world):
    model = LlamaForCausalLM.from_pretrained(world["base"]).eval()
    ids = [*PROMPT.encode()]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    for _ in range(2):  # the second time beside a warm prefix cache
        body = server.complete(max_tokens=0, echo=True, logprobs=2).json()
        got = body["choices"][0]["logprobs"]["token_logprobs"]
        assert got[0] is None
        assert got[1:] == pytest.approx(expected, abs=1e-3)
        assert body["usage"]["completion_tokens"] == 0


def test_the_prefix_cache_shows_in_usage(server):
    prompt = "0123456789abcdef" * 3
    first = server.complete(prompt=prompt, adapter="one").json()
    again = server.complete(prompt=prompt, adapter="one").json()
    assert first["choices"] == again["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] in (32, 47)
    other = server.complete(prompt=prompt, adapter="five").json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_evicted_adapter_comes_back_with_the_same_text(server):
    before = server.complete(adapter="sixteen").json()["choices"]
    for to in ("host", "disk"):
        answer = server.client.post("/adapters/sixteen/evict", json={"to": to}).json()
        assert (answer["residency"], answer["blocks"]) == (to, 0)
        cold = server.complete(adapter="sixteen", on_cold="reject")
        assert (cold.status_code, cold.json()["error"]["code"]) == (503, "adapter_cold")
        server.wait_until(lambda: server.client.get("/adapters/sixteen").json()["residency"] == "device")
        assert server.client.post("/adapters/sixteen/evict", json={"to": to}).json()["residency"] == to
        assert server.complete(adapter="sixteen").json()["choices"] == before
    assert server.client.post("/adapters/sixteen/load").json()["blocks"] > 0


def test_a_dry_run_plans_the_blocks_it_takes(server):
    body = {"name": "planned", "source": "sixteen"}
    planned = server.client.post("/adapters?dry_run=true", json=body).json()["blocks"]
    assert planned == server.client.post("/adapters/sixteen/load").json()["blocks"]


def test_what_can_never_fit_is_refused_at_once(world, tmp_path):
    block = 2 * 2 * 2 * 16 * 8 * 4  # bytes: layers, K and V, kv heads, tokens, head_dim, float32
    engine = {"model": str(world["base"]), "pool_memory": 8 * block}
    room = 8 * 16
    with served(engine=engine, served_model_name="tiny", data_dir=tmp_path) as server:
        answer = server.complete(prompt="x" * (room + 10))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capacity_exceeded")
        answer = server.client.post(
            "/v1/completions", json={"prompt": "x" * (room - 5), "ignore_eos": True, "temperature": 0}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5, "nobody asked for 16, so the room is taken"
        assert server.complete(prompt="x" * (room - 5), max_tokens=16).status_code == 400
        assert server.complete().status_code == 200


def test_clients_that_leave_free_everything(server):
    for i in range(30):
        body = {"prompt": f"{i} {PROMPT}", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2}
        with server.client.stream("POST", "/v1/completions", json={**body, "adapter": "one"}) as answer:
            if i % 3:
                next(answer.iter_raw())
    server.wait_until(lambda: server.metric("running") == 0 and server.metric("waiting") == 0)
    server.complete()
    server.wait_until(lambda: server.metric("blocks_used") == 0)
    shown = server.client.get("/adapters/one").json()
    assert shown["in_use"] == 0
    assert server.client.post("/adapters/one/evict").status_code == 200


def test_a_killed_engine_comes_back_with_every_adapter(server):
    before = server.complete(adapter="five").json()["choices"]
    answers: list[httpx.Response] = []

    def long(stream: bool) -> None:
        body = {"prompt": PROMPT, "max_tokens": 230, "ignore_eos": True, "n": 64, "stream": stream}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=long, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.metric("running") + server.metric("waiting") > 64)  # both are there
    os.kill(server.engine_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    for answer in answers:
        begun = "internal_error" in answer.text
        assert begun or "overloaded" in answer.text, "what had not begun is to be sent again"
        assert answer.status_code in ((200, 500) if begun else (200, 503))
        assert "[DONE]" not in answer.text
    assert server.client.get("/health").status_code == 200
    server.wait_until(lambda: server.is_up("/ready"), 120)
    assert server.complete(adapter="five").json()["choices"] == before
    names = [a["name"] for a in server.client.get("/adapters").json()["data"]]
    assert names == ["five", "one", "sixteen"]


def test_pinned_adapters_are_back_on_the_device_after_an_engine_died(server):
    server.client.patch("/adapters/five", json={"pinned": True}).raise_for_status()
    try:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: not server.is_up("/ready"), 60)
        server.wait_until(lambda: server.is_up("/ready"), 120)
        server.wait_until(lambda: server.client.get("/adapters/five").json()["residency"] == "device")
    finally:
        server.client.patch("/adapters/five", json={"pinned": False}).raise_for_status()


def test_the_port_answers_before_the_base_is_loaded_and_sigterm_lets_requests_finish(world, tmp_path):
    process = Process(engine={"model": str(world["base"])}, served_model_name="tiny", data_dir=tmp_path)
    try:
        process.wait_until(lambda: process.is_up("/health"))
        assert process.client.get("/ready").status_code == 503
        early = process.complete()
        assert (early.status_code, early.json()["error"]["code"]) == (503, "overloaded")
        process.until_ready()
        assert process.is_up("/ready")
        answers: list[httpx.Response] = []

        def long() -> None:
            body = {"prompt": PROMPT, "max_tokens": 230, "ignore_eos": True, "n": 16}
            answers.append(httpx.post(f"{process.url}/v1/completions", json=body, timeout=60))

        thread = threading.Thread(target=long)
        thread.start()
        process.wait_until(lambda: process.metric("running") > 0)
        begun = socket.create_connection(("127.0.0.1", process.port), timeout=30)
        begun.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
        time.sleep(0.2)
        process.popen.send_signal(signal.SIGTERM)
        with begun:
            assert begun.recv(1 << 16).startswith(b"HTTP/1.1 503 "), "nobody waits for the rest of its body"
        refused = []
        while thread.is_alive() and not refused:
            answer = process.complete()
            if answer.status_code == 503:
                refused.append(answer.json()["error"]["code"])
        thread.join(60)
        assert refused == ["shutting_down"]
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 16 * 230
        assert process.popen.wait(30) == 0
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


def test_sigterm_while_loading_ends_with_status_0(world, tmp_path):
    process = Process(engine={"model": str(world["base"])}, data_dir=tmp_path)
    process.wait_until(lambda: process.is_up("/health"))
    assert process.end() == 0


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_base_that_cannot_be_served_ends_with_status_1(world, tmp_path, missing, capfd):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in world["base"].iterdir():
        if file.name != missing:
            (folder / file.name).write_bytes(file.read_bytes())
    process = Process(engine={"model": str(folder)}, data_dir=tmp_path / "data")
    assert process.popen.wait(60) == 1
    assert "heddle: " in capfd.readouterr().err


def test_a_port_that_is_taken_ends_with_status_1(server, world, tmp_path, capfd):
    config = {"engine": {"model": str(world["base"])}, "port": server.port, "data_dir": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, json.dumps(config)], timeout=60, check=False)
    assert done.returncode == 1
    assert str(server.port) in capfd.readouterr().err
