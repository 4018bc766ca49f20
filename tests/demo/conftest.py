"""A real server on the real demo base, and adapters for it made by PEFT itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
RANKS = {"r1": 1, "r4": 4, "r5": 5, "r8": 8, "r16": 16, "r64": 64}
ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "r1": ALL_MODULES,
    "r4": ["q_proj", "v_proj"],
    "r5": ["k_proj", "o_proj", "down_proj"],
    "r8": ALL_MODULES,
    "r16": ["gate_proj", "up_proj"],
    "r64": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


class Server:
    """`heddle` with some arguments as a child process, and a client for it."""

    def __init__(self, *arguments: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.arguments = arguments
        self.http = httpx.Client(base_url=self.url, timeout=300)
        self.start()

    def start(self) -> None:
        command = [Path(sys.executable).with_name("heddle"), *self.arguments, "--port", str(self.port)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log.read_text()}")
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def peft_adapters(demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Six adapters with random weights, strong enough that each changes the base's answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("peft")
    base = AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32)
    for number, (name, rank) in enumerate(RANKS.items()):
        torch.manual_seed(number)
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=TARGETS[name], init_lora_weights=False
        )
        model = get_peft_model(base, config)
        model.save_pretrained(folder / name)
        base = model.unload()
    return {name: folder / name for name in RANKS}


@pytest.fixture(scope="module")
def server(
    demo_base: Path, peft_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    started = Server(
        "demo",
        "--data-dir",
        str(folder / "data"),
        "--adapter-root",
        str(next(iter(peft_adapters.values())).parent),
        log=folder / "log",
    )
    started.folder = folder  # type: ignore[attr-defined]
    yield started
    if started.process.poll() is None:
        assert started.stop() == 0, started.log.read_text()


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
