"""The real demo base against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
import transformers

# Ids of the demo base: common words, numbers, line breaks and special tokens.
TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 8111, 314, 216, 33, 34, 35, 198, 198, 1, 2]


@pytest.fixture(scope="module")
def reference(demo_base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32).eval()


def test_float32_logits_are_transformers(tiny: Any, demo_base: Path, reference: Any) -> None:
    model = tiny.load(demo_base, "cpu")
    assert model.config.tie_word_embeddings
    bench = tiny.Bench(model, block_size=16, num_blocks=8)
    found = [bench.step({"a": TOKENS[:13]})["a"], bench.step({"a": TOKENS[13:19]})["a"]]
    found.append(bench.step({"a": TOKENS[19:]})["a"])
    tiny.close(torch.cat(found), tiny.oracle(reference, TOKENS))


def test_int8_logits_are_those_of_bitsandbytes_weights(tiny: Any, demo_base: Path, reference: Any) -> None:
    model = tiny.load(demo_base, "cpu", quantization="int8")
    found = tiny.Bench(model, block_size=16, num_blocks=8).step({"a": TOKENS})["a"]
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(module.weight.data.half())
            module.weight.data = bitsandbytes.functional.int8_vectorwise_dequant(codes, absmax)
    tiny.close(found, tiny.oracle(reference, TOKENS))
