"""A server with a stub engine on a real port, a tokenizer with one token a byte, and adapters that fit its
base.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import tokenizers
from heddle.api.config import ServerConfig
from heddle.api.loading import load
from heddle.api.server import HttpServer
from heddle.api.state import Phase, ServerState
from heddle.api.workers import Workers
from heddle.core.config import EngineConfig
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from .stub_engine import StubEngine

T = TypeVar("T")

VOCAB = 264
"""256 bytes, <s>, </s>, <|user|>, <|assistant|>, and padding up to here."""

STRICT_TEMPLATE = """{{ bos_token }}{% for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('Only system, user and assistant speak here') }}{% endif %}
{%- if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def make_base(
    folder: Path, *, bos: bool = False, template: str | None = STRICT_TEMPLATE, max_positions: int = 256
) -> Path:
    """A model folder without weights, for who needs no forward. `bos`: the tokenizer begins every text with
    <s>.
    """
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _byte_of(character: str) -> int:
    """GPT-2's printable spelling of bytes, undone with the published rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return ord(character) if ord(character) in printable else rest[ord(character) - 256]


def make_adapter(folder: Path, seed: int, rank: int = 2) -> Path:
    """A PEFT folder on q and v of both layers of the tests' base."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for module, out in (("q_proj", 32), ("v_proj", 16)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{key}.lora_A.weight"] = random.standard_normal((rank, 32)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = random.standard_normal((out, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class RunningServer:
    """A server in a thread with its own event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine = StubEngine(config.engine)
        self.client = httpx.Client(timeout=20)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.client.base_url = httpx.URL(self.url)
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self._failure = error
            self._ready.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.state, workers = ServerState(self.config), Workers()
        http = HttpServer(self.state)
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        try:
            async with AsyncExitStack() as stack:
                stack.callback(workers.close)
                self.state.services = await load(self.config, self.engine, self.state.metrics, workers, stack)
                self.state.phase = Phase.SERVING
                self._ready.set()
                await self._stop.wait()
        finally:
            http.should_exit = True
            await serving

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self.client.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.005)

    # what tests say most often

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "hi", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def register(self, name: str, source: str, **fields: Any) -> httpx.Response:
        return self.client.post("/adapters", json={"name": name, "source": source, **fields})

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of a stream that ends as it should."""
        answer = self.client.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("\n\n")
        lines = answer.text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        assert "data: [DONE]" not in lines[:-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def running(tmp_path: Path, base: Path, **settings: Any) -> Iterator[RunningServer]:
    """A server of its own, with adapters `a`, `b` (and `b2`) to be had below its adapter root."""
    engine = EngineConfig(model=str(base), max_model_len=settings.pop("max_model_len", None))
    roots = settings.pop("adapter_roots", (tmp_path / "adapters",))
    settings = {"served_model_name": "tiny", "data_dir": tmp_path / "data", **settings}
    config = ServerConfig(engine=engine, adapter_roots=roots, **settings)
    server = RunningServer(config)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter root with the folders a, b and c."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate("abc"):
        make_adapter(root / name, seed)
    return root


@pytest.fixture(scope="session")
def shared_server(
    base: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("shared"), base, adapter_roots=(sources,)) as server:
        for name in "ab":
            assert server.register(name, name).status_code == 201
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """For tests that change no adapter. The stub engine is as new for each."""
    shared_server.engine.reset()
    yield shared_server
    shared_server.wait_until(lambda: not shared_server.engine.running and not shared_server.state.in_flight)


@pytest.fixture
def own_server(base: Path, sources: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """For tests that register and remove."""
    with running(tmp_path, base, adapter_roots=(sources,)) as server:
        yield server


@pytest.fixture
def serve() -> Callable[..., AbstractContextManager[RunningServer]]:
    """`serve(folder for data, base, **settings)`: a context with a server of its own."""
    return running


@pytest.fixture(scope="session")
def model_folder() -> Callable[..., Path]:
    return make_base


@pytest.fixture(scope="session")
def adapter_folder() -> Callable[..., Path]:
    return make_adapter


@pytest.fixture(scope="session")
def world(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base with random weights and adapters on it, saved by transformers and PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

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
