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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import sys
import msgspec
from heddle.api.server import ServerConfig, run

config = msgspec.json.decode(sys.argv[1], type=ServerConfig, dec_hook=lambda kind, value: kind(value))
sys.exit(run(config))
"""
PROMPT = "The quick brown fox"


class Process:
    """`run` in a process."""

    def __init__(self, **settings: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        engine = {
            "num_threads": 1,
            "pool_memory": 8_000_000,
            "check_invariants": True,
            **settings.pop("engine"),
        }
        config = {"engine": engine, "port": self.port, "log_level": "warning", **settings}
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, json.dumps(config, default=str)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def until_ready(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def end(self) -> int:
        self.client.close()
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
        return self.client.post("/v1/completions", json=body)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"heddle_{name} "))

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children]
        return pid

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.05)

    def is_up(self, path: str) -> bool:
        try:
            return self.client.get(path).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def served(**settings: Any) -> Iterator[Process]:
    process = Process(**settings)
    try:
        process.until_ready()
        yield process
    finally:
        if process.popen.poll() is None:
            process.end()


@pytest.fixture(scope="module")
def world(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base with random weights and adapters on it, saved by transformers and PEFT."""
    home = tmp_path_factory.mktemp("world")
    base = model_folder(home / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [257, 258]
    model.save_pretrained(base)
    adapters = home / "adapters"
    for rank, name in ((1, "one"), (5, "five"), (16, "sixteen")):
        peft = get_peft_model(
            LlamaForCausalLM.from_pretrained(base),
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj", "down_proj"]),
        )
        for parameter_name, parameter in peft.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3)
        peft.save_pretrained(adapters / name)
    return {"base": base, "adapters": adapters, "home": home}


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


def reference(world, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, by transformers and PEFT."""
    model = LlamaForCausalLM.from_pretrained(world["base"]).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, world["adapters"] / adapter).eval()
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            row = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            if tokens[-1] in (257, 258):
                break
    return tokens[len(prompt) :], logprobs


def text_of(tokens: list[int]) -> str:
    """One token is one byte; others are special and no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


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
        assert "internal_error" in answer.text
        assert answer.status_code in (200, 500)
        assert "[DONE]" not in answer.text
    assert server.client.get("/health").status_code == 200
    server.wait_until(lambda: server.is_up("/ready"), 120)
    assert server.complete(adapter="five").json()["choices"] == before
    names = [a["name"] for a in server.client.get("/adapters").json()["data"]]
    assert names == ["five", "one", "sixteen"]


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
        process.popen.send_signal(signal.SIGTERM)
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
def test_a_base_that_cannot_be_served_ends_with_status_2(world, tmp_path, missing, capfd):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in world["base"].iterdir():
        if file.name != missing:
            (folder / file.name).write_bytes(file.read_bytes())
    process = Process(engine={"model": str(folder)}, data_dir=tmp_path / "data")
    assert process.popen.wait(60) == 2
    assert "heddle: " in capfd.readouterr().err


def test_a_port_that_is_taken_ends_with_status_1(server, world, tmp_path, capfd):
    config = {"engine": {"model": str(world["base"])}, "port": server.port, "data_dir": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, json.dumps(config)], timeout=60, check=False)
    assert done.returncode == 1
    assert str(server.port) in capfd.readouterr().err
