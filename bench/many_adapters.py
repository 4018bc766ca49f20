"""Many adapters, memory for a few: registered over HTTP, used by Zipf traffic, every sampled answer as if alone.

    python bench/many_adapters.py [--adapters 1000] [--room 8] [--requests 2000]

Adapters of rank 4 on q and v with random weights, so strong that almost every answer differs from the base's and
from every other's; the pool holds `--room` of them beside the KV of the requests under way. Prints the rate of
registration, times to the first token of requests that found their adapter on the device (warm) and that did not
(cold), and the server's memory before and after. Status 1 where an answer failed, differed from the same request on
an idle server or from PEFT's greedy tokens, or where memory grew by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tokenizers
from heddle.core.checkpoint.demo import demo_base
from heddle.core.model.config import ModelConfig
from heddle.lora.base import MODULES, BaseModel
from heddle.lora.layout import AdapterLayout
from heddle.lora.spec import Delta
from safetensors.numpy import save

RANK = 4
ADAPTED = ("q_proj", "v_proj")
BLOCK_SIZE = 16
STREAMS = 8
"""Requests under way at a time."""
CLOSE = 1e-3
"""PEFT's two best logits nearer than this may change places."""
GROWTH = 0.02
PROMPTS = (
    "The first thing to know is",
    "Once upon a time there was",
    "In the morning she went to",
    "My favourite recipe begins with",
    "The capital of the country is",
)


@dataclass(frozen=True)
class Asked:
    """One request of the traffic and what came of it."""

    adapter: str | None
    prompt: int
    text: str = ""
    warm: bool = False
    seconds: float = 0.0
    """To the first token."""
    error: str | None = None


@dataclass
class Report:
    """Figures, and what is wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


def adapter_files(base: BaseModel, number: int, strength: float) -> dict[str, bytes]:
    """A PEFT adapter that is the same for the same number: float16, B of standard deviation `strength`."""
    chance = np.random.default_rng(number)
    tensors = {}
    for layer in range(base.num_layers):
        for module in ADAPTED:
            out_features, in_features = base.shapes[module]
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a = chance.standard_normal((RANK, in_features)) / np.sqrt(in_features)
            tensors[f"{key}.lora_A.weight"] = a.astype(np.float16)
            b = chance.standard_normal((out_features, RANK)) * strength
            tensors[f"{key}.lora_B.weight"] = b.astype(np.float16)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": list(ADAPTED),
    }  # fmt: skip
    return {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": save(tensors)}


def pool_bytes(model: ModelConfig, base: BaseModel, room: int, tokens: int) -> int:
    """Of a pool for `room` adapters and STREAMS sequences of so many tokens, in float32."""
    block = model.num_layers * 2 * model.num_kv_heads * model.head_dim * BLOCK_SIZE * 4
    modules = sorted(MODULES.index(module) for module in ADAPTED)
    deltas = [Delta(layer, module, RANK, 1.0) for layer in range(model.num_layers) for module in modules]
    layout = AdapterLayout.plan(deltas, base.shapes, base.num_layers, block_bytes=block, itemsize=4)
    sequences = STREAMS * -(-tokens // BLOCK_SIZE)
    return block * (room * layout.num_blocks + sequences)


class Server:
    """`heddle serve` in a process of its own."""

    def __init__(self, base: Path, home: Path, pool: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.name = "base"
        command = [
            sys.executable, "-P", "-m", "heddle.api.cli", "serve", base, "--port", port,
            "--served-model-name", self.name, "--quantization", "none", "--dtype", "float32",
            "--pool-memory", pool, "--block-size", BLOCK_SIZE, "--swap-space", 0.1, "--max-model-len", 256,
            "--data-dir", home / "data", "--log-level", "warning",
        ]  # fmt: skip
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=300, limits=httpx.Limits(max_connections=STREAMS)
        )
        assert self.process.stdout is not None
        if not any(line.startswith("ready") for line in self.process.stdout):
            raise SystemExit("the server did not start")

    def register(self, name: str, files: dict[str, bytes]) -> None:
        parts = [("files", (file, content)) for file, content in files.items()]
        data = {"name": name, "preload": "false"}
        answer = self.client.post("/adapters", data=data, files=parts)
        if answer.status_code != 201:
            raise SystemExit(f"{name} was refused: {answer.text}")

    def ask(self, prompts: list[list[int]], asked: Asked, new: int) -> Asked:
        """The greedy answer, streamed."""
        warm = False
        if asked.adapter is not None:
            warm = self.client.get(f"/adapters/{asked.adapter}").json()["residency"] == "device"
        body = {
            "prompt": prompts[asked.prompt], "adapter": asked.adapter, "max_tokens": new, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        began, first, text = time.perf_counter(), 0.0, ""
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                return Asked(asked.adapter, asked.prompt, error=answer.text)
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - began
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Asked(asked.adapter, asked.prompt, error=line)
                text += chunk["choices"][0]["text"]
        return Asked(asked.adapter, asked.prompt, text, warm, first)

    def memory(self) -> int:
        """Resident bytes of the server and its engine."""
        api = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (api, *api.children(recursive=True)))

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(60)


@contextmanager
def serving(base: Path, pool: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="heddle-many-") as home:
        server = Server(base, Path(home), pool)
        try:
            yield server
        finally:
            server.close()


def zipf(names: Sequence[str], count: int, seed: int) -> list[Asked]:
    """Requests for adapters of which the k-th most popular is asked for in proportion to 1/k."""
    chance = random.Random(seed)
    order = random.Random(0).sample(list(names), len(names))
    chosen = chance.choices(order, [1 / (k + 1) for k in range(len(order))], k=count)
    return [Asked(name, chance.randrange(len(PROMPTS))) for name in chosen]


def percentiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "too few"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"p50 {cuts[49] * 1000:.0f} ms, p99 {cuts[98] * 1000:.0f} ms ({len(values)} requests)"


def run(arguments: argparse.Namespace) -> Report:
    """Everything, in order."""
    folder, new = arguments.base or demo_base(), arguments.new
    model = ModelConfig.load(folder)
    base = model.base_model("base", folder)
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [text.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    pool = pool_bytes(model, base, arguments.room, max(map(len, prompts)) + new)
    names = [f"adapter-{number:04}" for number in range(arguments.adapters)]
    files = {name: number for number, name in enumerate(names)}
    report = Report()
    with serving(folder, pool) as server, ThreadPoolExecutor(STREAMS) as threads:

        def register(name: str) -> None:
            server.register(name, adapter_files(base, files[name], arguments.strength))

        def ask(asked: Asked) -> Asked:
            return server.ask(prompts, asked, new)

        began = time.perf_counter()
        list(threads.map(register, names))
        rate = len(names) / (time.perf_counter() - began)
        report.figures["registrations a second"] = round(rate, 1)
        warm_up = max(arguments.requests // 4, 2 * STREAMS)
        for asked in threads.map(ask, zipf(names, warm_up, seed=1)):
            report.check(asked.error is None, f"{asked.adapter}: {asked.error}")
        before = server.memory()
        began = time.perf_counter()
        traffic = list(threads.map(ask, zipf(names, arguments.requests, seed=2)))
        seconds = time.perf_counter() - began
        after = server.memory()
        for asked in traffic:
            report.check(asked.error is None, f"{asked.adapter}: {asked.error}")
        report.figures["requests a second"] = round(len(traffic) / seconds, 1)
        for word, warm in (("warm", True), ("cold", False)):
            times = [asked.seconds for asked in traffic if asked.warm == warm and asked.error is None]
            report.figures[f"time to first token, {word}"] = percentiles(times)
        growth = after / before - 1
        report.figures["memory before, MB"] = round(before / 1e6, 1)
        report.figures["memory after, MB"] = round(after / 1e6, 1)
        report.figures["growth"] = f"{growth:+.2%}"
        report.check(growth <= GROWTH, f"memory grew by {growth:.2%}")
        sample = sample_of(traffic, arguments.sample)
        check_alone(server, prompts, sample, new, report)
    check_peft(folder, base, text, prompts, sample[: arguments.peft], files, arguments.strength, report)
    return report


def sample_of(traffic: Sequence[Asked], count: int) -> list[Asked]:
    """Answers on different adapters, chosen at random."""
    by_adapter = {asked.adapter: asked for asked in traffic}
    chosen = list(by_adapter.values())
    return random.Random(3).sample(chosen, min(count, len(chosen)))


def check_alone(
    server: Server, prompts: list[list[int]], sample: Sequence[Asked], new: int, report: Report
) -> None:
    """Each sampled answer is that of the same request on an idle server; few are the base's or alike."""
    base = [server.ask(prompts, Asked(None, prompt), new).text for prompt in range(len(prompts))]
    for asked in sample:
        alone = server.ask(prompts, asked, new).text
        report.check(alone == asked.text, f"{asked.adapter}: {asked.text!r} in traffic, {alone!r} alone")
    different = sum(asked.text != base[asked.prompt] for asked in sample)
    unique = len({(asked.prompt, asked.text) for asked in sample})
    report.figures["sampled answers equal to alone"] = f"{len(sample)} asked again"
    report.figures["of these unlike the base's"] = different
    report.figures["of these unlike all others"] = unique
    report.check(min(different, unique) >= 0.95 * len(sample), "the adapters are too weak to tell apart")


def check_peft(
    folder: Path,
    base: BaseModel,
    text: tokenizers.Tokenizer,
    prompts: list[list[int]],
    sample: Sequence[Asked],
    files: dict[str, int],
    strength: float,
    report: Report,
) -> None:
    """PEFT's greedy tokens give the same text, up to where its two best are too close to call."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    equal = 0
    for asked in sample:
        assert asked.adapter is not None
        with tempfile.TemporaryDirectory() as adapter:
            for name, content in adapter_files(base, files[asked.adapter], strength).items():
                Path(adapter, name).write_bytes(content)
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            model = PeftModel.from_pretrained(loaded, adapter).eval()
        prompt = prompts[asked.prompt]
        said, tokens, close = text.decode(prompt), list(prompt), False
        with torch.no_grad():
            while not close and text.decode(tokens)[len(said) :] != asked.text and len(tokens) < 256:
                logits = model(torch.tensor([tokens])).logits[0, -1]
                best, second = logits.topk(2).values.tolist()
                tokens.append(int(logits.argmax()))
                close = best - second < CLOSE
                if not asked.text.startswith(text.decode(tokens)[len(said) :].rstrip("\ufffd")):
                    break
        found = text.decode(tokens)[len(said) :]
        equal += found == asked.text
        report.check(
            close or found == asked.text, f"{asked.adapter}: {asked.text!r} answered, PEFT says {found!r}"
        )
    report.figures["of these PEFT's greedy tokens"] = f"{equal} of {len(sample)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a checkpoint's folder [the demo base]")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--room", type=int, default=8, help="adapters that the pool holds")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--new", type=int, default=12, help="tokens of each answer")
    parser.add_argument("--strength", type=float, default=0.7, help="standard deviation of B")
    parser.add_argument("--sample", type=int, default=100, help="answers asked for again alone")
    parser.add_argument("--peft", type=int, default=10, help="answers computed by PEFT")
    report = run(parser.parse_args())
    for name, value in report.figures.items():
        print(f"{name:36} {value}")
    for fault in report.faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
