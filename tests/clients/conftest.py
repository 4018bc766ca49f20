"""The demo server as a user starts it, and what transformers and PEFT say to the same questions."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients" / "bin" / "python"
NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def demo_url(demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`heddle demo` with float weights, so that its answers are transformers'."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    data = tmp_path_factory.mktemp("demo")
    flags = ["--port", str(port), "--quantization", "none", "--data-dir", str(data), "--log-level", "warning"]
    command = [sys.executable, "-m", "heddle.api.cli", "demo", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=data)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        assert process.poll() is None, "the demo server ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(60) == 0


@dataclass
class Voice:
    """The base, or one adapter on it."""

    model: Any
    adapter: str | None
    ends: list[int]

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        with torch.no_grad(), nullcontext() if self.adapter else self.model.disable_adapter():
            yield

    def rows(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocab], float32."""
        with self._speaking():
            return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].float(), -1)

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """New tokens, the end token included, and their log-probabilities."""
        with self._speaking():
            made = self.model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = [int(token) for token in made.sequences[0, len(ids) :]]
        rows = [torch.log_softmax(row[0].float(), -1) for row in made.logits]
        return tokens, [float(row[token]) for row, token in zip(rows, tokens)]

    def likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The sum over the continuation, and whether greedy decoding would have written it."""
        rows = self.rows([*context, *continuation])[len(context) - 1 : -1]
        chosen = [float(row[token]) for row, token in zip(rows, continuation)]
        return sum(chosen), all(int(row.argmax()) == token for row, token in zip(rows, continuation))


@dataclass
class Judge:
    """What transformers says, and with an adapter PEFT."""

    model: Any
    tokenizer: Any
    ends: list[int]

    def of(self, adapter: str | None) -> Voice:
        return Voice(self.model, adapter, self.ends)

    def ids_of_chat(self, messages: list[dict[str, str]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return [int(token) for token in ids]

    def ids_of_text(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="session")
def judge(demo_base: Path) -> Judge:
    from peft import PeftModel
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(demo_base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, ROOT / "adapters" / "pirate", adapter_name="pirate").eval()
    ends = json.loads((demo_base / "generation_config.json").read_text())["eos_token_id"]
    return Judge(
        adapted, AutoTokenizer.from_pretrained(demo_base), ends if isinstance(ends, list) else [ends]
    )


@pytest.fixture(scope="session")
def run_client() -> Any:
    """`run_client(script, *arguments)`: what a script says in the clients' environment."""
    if not CLIENTS.exists():
        pytest.skip(f"{CLIENTS.parents[1]} is missing: `make clients` makes it")

    def run(script: str, *arguments: str) -> Any:
        command = [CLIENTS, Path(__file__).with_name(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(lines[0].removeprefix("RESULT "))

    return run
