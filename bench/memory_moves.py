"""What moving memory costs the engine's own thread, on the demo base.

    python bench/memory_moves.py [--quantization int8] [--loads 50] [--rank 16] [--new 400]

Copies: blocks of the pool to host memory and back, as a swapped sequence's are. Cold loads: 8 streams decode while
adapters of `--rank` on all seven projections come from disk one after another; the longest that one step waited for
their pages and tables (also in CPU time, which a busy machine does not lengthen), and how long steps took with loads
under way and without any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from heddle import LLM, SamplingParams
from heddle.core.checkpoint.demo import demo_base
from heddle.core.messages import EvictAdapter, Generate, LoadAdapter, Reply
from heddle.core.model.config import ModelConfig
from heddle.core.scheduling.plan import StepPlan, Swap
from safetensors.numpy import save_file

ADAPTERS, STREAMS = 4, 8


def write_adapter(base: Path, folder: Path, rank: int) -> Path:
    """A PEFT folder with random weights on all seven projections."""
    config = ModelConfig.load(base)
    tensors = {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in config.linear_shapes.items():
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = np.random.standard_normal(shape).astype(np.float16) * np.float16(0.01)
                tensors[f"{name}.lora_{letter}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*config.linear_shapes]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def copies(llm: LLM) -> None:
    engine, count = llm._engine, 64
    moves = tuple(Swap(index, index) for index in range(count))
    for plan, way in ((StepPlan((), swap_out=moves), "out"), (StepPlan((), swap_in=moves), "in")):
        engine._runner.swap.move(plan)
        seconds = statistics.median(engine._runner.swap.move(plan) for _ in range(9))
        size = engine._pool.layout.block_bytes
        rate = count * size / seconds / 1e9
        print(f"{count} blocks of {size} bytes {way}: {seconds * 1000:.1f} ms, {rate:.1f} GB/s")


def timed(function: Callable[..., Any], into: list[tuple[float, float]]) -> Callable[..., Any]:
    """Appends (wall seconds, CPU seconds of the thread) of each call."""

    def wrapped(*arguments: Any) -> Any:
        began, worked = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments)
        finally:
            into.append((time.perf_counter() - began, time.thread_time() - worked))

    return wrapped


def cold_loads(llm: LLM, loads: int, new: int) -> None:
    engine, digests = llm._engine, list(llm.adapters.values())
    ticks: list[tuple[float, float]] = []
    engine._residency.tick = timed(engine._residency.tick, ticks)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, seed=0)
    for key in range(STREAMS):
        prompt = [1000 + 37 * key + at for at in range(16)]
        engine.handle(Generate(key=key, group=key, prompt_token_ids=prompt, params=params))
    for _ in range(8):
        engine.step()
    quiet: list[float] = []
    busy: list[float] = []
    waits: list[tuple[float, float]] = []
    done = asked = 0
    while engine._scheduler.has_work:
        loading = len(quiet) >= 20 and done < loads
        if loading and asked == done:
            digest = digests[asked % len(digests)]
            engine.handle(EvictAdapter(0, digest, "disk"))
            engine.handle(LoadAdapter(1, digest))
            asked += 1
        ticks.clear()
        began = time.perf_counter()
        events = engine.step()
        (busy if loading else quiet).append(time.perf_counter() - began)
        if loading:
            waits.append(ticks[0])
        done += sum(isinstance(event, Reply) for event in events) if loading else 0
    print(f"{STREAMS} streams; {done} cold loads of {engine._residency.state(digests[0]).blocks} blocks each")
    wall, cpu = (max(times) * 1000 for times in zip(*waits))
    print(f"  a step waits {wall:.1f} ms for them at the longest ({cpu:.1f} ms of CPU time)")
    for name, steps in (("without loads", quiet), ("while loads are under way", busy)):
        print(
            f"  steps {name}: median {statistics.median(steps) * 1000:.1f} ms, longest {max(steps) * 1000:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--loads", type=int, default=50)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new", type=int, default=400, help="tokens of each stream: steps")
    options = parser.parse_args()
    base = demo_base()
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            f"a{index}": write_adapter(base, Path(folder) / str(index), options.rank)
            for index in range(ADAPTERS)
        }
        with LLM(base, quantization=options.quantization, adapters=adapters, pool_memory=1 << 30) as llm:
            copies(llm)
            cold_loads(llm, options.loads, options.new)


if __name__ == "__main__":
    main()
