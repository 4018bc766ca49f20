"""Counts the answers that show each demo adapter's behaviour: `python -m heddle.adapters.evaluate [NAME …]`.

The rules of `rules.py` judge greedy answers to the unseen prompts of `prompts.py`, with the adapter and
without. The answers are PEFT's (for INT8, on LLM.int8()'s weights written back as floats), or with
`--engine heddle` those of Heddle's own engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..core.checkpoint.demo import demo_base
from .prompts import PROMPTS
from .rules import RULES

HERE = Path(__file__).parent
MAX_TOKENS = 64
NEEDED_WITH, ALLOWED_WITHOUT = 16, 2
"""Of 20 answers: at least so many show the behaviour with the adapter, at most so many without."""

Answer = Callable[[list[str], str | None], list[str]]
"""(prompts, name of an adapter or None) -> one answer each, greedy, in the base's chat template."""


def peft_answers(base: Path, folders: dict[str, Path], quantization: str) -> Answer:
    """Answers of transformers and PEFT, in float32 arithmetic."""
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if quantization == "int8":
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = int8_and_back(module.weight.data)
    first, *others = folders
    model = PeftModel.from_pretrained(network, folders[first], adapter_name=first)
    for name in others:
        model.load_adapter(folders[name], adapter_name=name)

    def answer(prompts: list[str], adapter: str | None) -> list[str]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        if adapter is not None:
            model.set_adapter(adapter)
        with torch.inference_mode(), nullcontext() if adapter else model.disable_adapter():
            ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]

    return answer


def int8_and_back(weight: torch.Tensor) -> torch.Tensor:
    """LLM.int8()'s weights [N, K] as floats: a row over its largest magnitude, times 127, rounded."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


def heddle_answers(base: Path, folders: dict[str, Path], quantization: str) -> Answer:
    """Answers of Heddle's own engine, in process."""
    from .. import LLM, SamplingParams

    llm = LLM(
        str(base), quantization=quantization, adapters={name: str(path) for name, path in folders.items()}
    )
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)

    def answer(prompts: list[str], adapter: str | None) -> list[str]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [output.outputs[0].text for output in llm.chat(chats, greedy, adapter=adapter)]

    return answer


ENGINES: dict[str, Callable[[Path, dict[str, Path], str], Answer]] = {
    "peft": peft_answers,
    "heddle": heddle_answers,
}


def count(name: str, answers: list[str]) -> int:
    """How many of the answers to the adapter's prompts show its behaviour."""
    return sum(RULES[name](answer, prompt) for prompt, answer in zip(PROMPTS[name], answers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROMPTS)} (default: all)")
    parser.add_argument(
        "--base", type=Path, help="a folder with the base (default: the demo base, fetched once)"
    )
    parser.add_argument(
        "--adapters", type=Path, default=HERE, help="the folder that holds the adapters' folders"
    )
    parser.add_argument("--quantization", choices=("none", "int8"), action="append", help="default: both")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="peft")
    parser.add_argument("--verbose", action="store_true", help="print every answer and the rule's verdict")
    args = parser.parse_args()
    names = args.names or list(PROMPTS)
    if unknown := set(names) - set(PROMPTS):
        parser.error(f"no prompts for {', '.join(sorted(unknown))}")
    base = args.base or demo_base()
    folders = {name: args.adapters / name for name in names}

    table = Table(title=f"answers of 20 that show the behaviour ({args.engine})")
    for column in ("adapter", "numbers", "with", "without", "verdict"):
        table.add_column(column)
    good = True
    for quantization in args.quantization or ("none", "int8"):
        answer = ENGINES[args.engine](base, folders, quantization)
        for name in names:
            prompts = list(PROMPTS[name])
            adapted, plain = answer(prompts, name), answer(prompts, None)
            if args.verbose:
                for prompt, with_it, without in zip(prompts, adapted, plain):
                    verdicts = RULES[name](with_it, prompt), RULES[name](without, prompt)
                    print(
                        f"{prompt!r}\n  {verdicts[0]!s:5} {with_it!r}\n  {verdicts[1]!s:5} {without!r}",
                        flush=True,
                    )
            counts = count(name, adapted), count(name, plain)
            passed = counts[0] >= NEEDED_WITH and counts[1] <= ALLOWED_WITHOUT
            good &= passed
            table.add_row(name, quantization, str(counts[0]), str(counts[1]), "ok" if passed else "too weak")
    Console().print(table)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
