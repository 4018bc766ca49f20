"""INT8 on the same weights: Heddle, bitsandbytes' own LLM.int8() forward, the dequantised weights in float32."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from heddle import LLM
from heddle.bench import float_model


@dataclass(frozen=True)
class Distance:
    """Of one set of logits from another."""

    found: str
    expected: str
    relative: float
    """|found - expected| / |expected|, Frobenius."""
    largest: float
    """The largest difference over the largest expected value."""
    same_first: float
    """Share of the positions at which both hold the same token likeliest."""


def distance(found: str, a: torch.Tensor, expected: str, b: torch.Tensor) -> Distance:
    off = a - b
    return Distance(
        found,
        expected,
        float(off.norm() / b.norm()),
        float(off.abs().max() / b.abs().max()),
        float((a.argmax(1) == b.argmax(1)).float().mean()),
    )


def distances(base: Path, windows: Sequence[Sequence[int]]) -> list[Distance]:
    """bitsandbytes and Heddle each to the float32 model, and to bitsandbytes' dequantised weights in float32."""
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says once a layer that it casts to float16
    model = float_model.load(base)
    float32 = float_model.logits(model, windows)
    own = float_model.load(base, device_map="cpu", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with torch.no_grad():
        for name, module in own.named_modules():
            if type(module).__name__ == "Linear8bitLt":
                scale = module.weight.SCB.float().unsqueeze(1) / 127
                model.get_submodule(name).weight.copy_(module.weight.float() * scale)
    dequantised = float_model.logits(model, windows)
    theirs = float_model.logits(own, windows)
    threads = torch.get_num_threads()
    with LLM(base, quantization="int8", pool_memory=1 << 28, num_threads=threads) as llm:
        ours = torch.cat(llm.logits([list(window) for window in windows]))
    return [
        distance(name, found, against, expected)
        for against, expected in (("float32", float32), ("its dequantised weights in float32", dequantised))
        for name, found in (("bitsandbytes LLM.int8()", theirs), ("Heddle INT8", ours))
    ]
