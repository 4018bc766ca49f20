"""What transformers and PEFT themselves answer with the tests' tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM


def reference(
    world: dict[str, Path], adapter: str | None, prompt: list[int], count: int
) -> tuple[list[int], list[float]]:
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
