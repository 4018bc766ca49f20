"""Whole requests a second on the demo base, as tokens a second: Heddle beside PEFT's mixed batch, in one run.

    python bench/throughput.py [--streams 1 16] [--new 64] [--no-peft]

Workload: 64 prompt tokens and 64 new ones (end tokens ignored), greedy, fresh random prompts for every measurement; the
base alone, and 8 adapters of ranks 4 to 16 on all seven projections, spread evenly over the streams. The figure is
new tokens over wall seconds, prefill included. Figures of one run compare; those of two machines, or two hours, do not.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from heddle import LLM, SamplingParams
from heddle.core.checkpoint.demo import demo_base

PROMPT_TOKENS = 64
RANKS = (4, 6, 8, 8, 10, 12, 16, 16)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Measure = Callable[[int, bool], float]
"""(streams, with adapters) -> seconds."""


def prompts(count: int) -> list[list[int]]:
    """Token ids nobody has in a cache."""
    return [[random.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def make_adapters(base: Path, folder: Path) -> dict[str, Path]:
    """One PEFT folder for each of RANKS, random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    paths = {}
    for number, rank in enumerate(RANKS):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=MODULES, init_lora_weights=False)
        adapted = get_peft_model(model, config)
        name = f"a{number}"
        adapted.save_pretrained(str(folder / name))
        paths[name] = folder / name
        model = adapted.unload()
    return paths


def heddle(base: Path, adapters: dict[str, Path], quantization: Any, new: int) -> tuple[LLM, Measure]:
    llm = LLM(str(base), quantization=quantization, adapters=adapters, pool_memory=1 << 30)
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)

    def measure(streams: int, with_adapters: bool) -> float:
        names = [f"a{i % len(RANKS)}" if with_adapters else None for i in range(streams)]
        batch = prompts(streams)
        began = time.perf_counter()
        llm.generate(batch, params, adapter=names)
        return time.perf_counter() - began

    return llm, measure


def peft(base: Path, adapters: dict[str, Path], new: int) -> Measure:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, path in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(path, name)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=name)
    model.eval()

    def measure(streams: int, with_adapters: bool) -> float:
        names = [f"a{i % len(RANKS)}" if with_adapters else "__base__" for i in range(streams)]
        ids = torch.tensor(prompts(streams))
        extra = {"adapter_names": names} if with_adapters else {}
        began = time.perf_counter()
        with torch.inference_mode():
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            if with_adapters:
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **extra)
            else:
                with model.disable_adapter():
                    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return time.perf_counter() - began

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--no-peft", action="store_true")
    options = parser.parse_args()
    base = demo_base()
    print(f"{os.cpu_count()} CPUs, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{PROMPT_TOKENS} + {options.new} tokens, new tokens a second\n")
    header = "  ".join(f"{n:>3} {kind:<11}" for n in options.streams for kind in ("base", "8 adapters"))
    print(f"{'':<16}{header}")
    with tempfile.TemporaryDirectory() as scratch:
        adapters = make_adapters(base, Path(scratch))

        def row(name: str, measure: Measure) -> None:
            cells = []
            for streams in options.streams:
                for with_adapters in (False, True):
                    # Not counted: compilation, and the load of every adapter that takes part.
                    measure(min(streams, len(RANKS)), with_adapters)
                    seconds = measure(streams, with_adapters)
                    cells.append(f"{streams * options.new / seconds:>15.1f}")
            print(f"{name:<16}" + "  ".join(cells), flush=True)

        for quantization in ("int8", "none"):
            llm, measure = heddle(base, adapters, quantization, options.new)
            row(f"heddle {'float32' if quantization == 'none' else quantization}", measure)
            llm.close()
        if not options.no_peft:
            torch.set_num_threads(os.cpu_count() or 1)
            row("PEFT float32", peft(base, adapters, options.new))


if __name__ == "__main__":
    main()
