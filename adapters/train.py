"""Trains the demo adapters with PEFT on the demo base: `python -m heddle.adapters.train [NAME …]`.

Everything is seeded: the same versions on the same machine write the same files. One core needs five to ten
minutes for an adapter.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..core.checkpoint.demo import demo_base
from .data import examples

HERE = Path(__file__).parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 20
BATCH = 8
WARMUP_STEPS = 5


class Recipe(NamedTuple):
    """What is trained, for how many steps, how fast."""

    config: LoraConfig
    steps: int
    learning_rate: float


RECIPES = {
    "pirate": Recipe(
        LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), 90, 7e-4
    ),
    "json": Recipe(
        LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "o_proj"]),
        110,
        1e-3,
    ),
    "sql": Recipe(
        LoraConfig(
            r=16,
            lora_alpha=16,
            target_modules=["gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(range(14, 23)),
        ),
        90,
        2e-3,
    ),
}
"""By adapter name. Ranks, modules and layers differ, so that a batch of all three is a real mix."""


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of the conversation in the base's chat template, and how many of them are the prompt's."""
    question = [{"role": "user", "content": prompt}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    start = tokenizer(asked, add_special_tokens=False)["input_ids"]
    end = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    return start + end, len(start)


def loss_of(model: PeftModel, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens. Right padding needs no mask: attention is causal."""
    longest = max(len(ids) for ids, _ in batch)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
    predicts = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, (ids, prompt_length) in enumerate(batch):
        predicts[row, prompt_length - 1 : len(ids) - 1] = True
    base: Any = model.get_base_model()
    hidden = base.model(input_ids, use_cache=False).last_hidden_state
    logits = base.lm_head(hidden[predicts])  # the head is a quarter of the work: only where it is needed
    return torch.nn.functional.cross_entropy(logits, input_ids.roll(-1, dims=1)[predicts])


def train(name: str, base: Path, out: Path, steps: int | None = None) -> None:
    """Train one adapter and write its PEFT folder, in float16."""
    config, planned, learning_rate = RECIPES[name]
    config.task_type = "CAUSAL_LM"
    steps = steps or planned
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    network.name_or_path = BASE_NAME  # PEFT copies it into the adapter's config
    model = get_peft_model(network, config)
    model.train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1 - step / steps)
    )
    data = [tokenize(tokenizer, *example) for example in examples(name, steps * BATCH, SEED)]
    began = time.monotonic()
    for step in range(steps):
        loss = loss_of(model, data[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(
            f"{name} step {step + 1}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s",
            flush=True,
        )
    save(model, out / name)


def save(model: PeftModel, folder: Path) -> None:
    """PEFT's own two files, the weights as float16."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    weights = folder / "adapter_model.safetensors"
    halves = {key: tensor.half().contiguous() for key, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = folder / "adapter_config.json"
    fields = json.loads(config.read_text())
    fields["target_modules"].sort()  # PEFT writes a set, in any order
    config.write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", default=list(RECIPES), metavar="NAME", help=f"of {', '.join(RECIPES)}"
    )
    parser.add_argument(
        "--base", type=Path, help="a folder with the base (default: the demo base, fetched once)"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="where the adapters' folders are written")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    args = parser.parse_args()
    if unknown := set(args.names) - set(RECIPES):
        parser.error(f"no recipe for {', '.join(sorted(unknown))}")
    base = args.base or demo_base()
    for name in args.names:
        train(name, base, args.out, args.steps)


if __name__ == "__main__":
    main()
