"""A whole model through Triton's kernels under their interpreter: the numbers and tokens of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from heddle import LLM, SamplingParams

CHOICES = [None, "r5", [{"name": "r4", "weight": 0.7}, {"name": "r8", "weight": -0.4}]]


def test_mixed_adapters_give_the_reference_s_logits_and_everybody_s_tokens(
    start: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """Prefills of 2 to 8 tokens and decodes, base and adapter and two adapters on a row, in common steps."""
    chosen = [prompts[i] for i in (8, 1, 11)]
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    tokens, logits = {}, {}
    for backend in ("reference", "cpu", "triton"):
        llm = start(backend=backend)
        outputs = llm.generate(chosen, greedy, adapter=CHOICES)
        tokens[backend] = [output.outputs[0].token_ids for output in outputs]
        if backend != "cpu":
            logits[backend] = llm.logits(chosen, adapter=CHOICES)
    assert tokens["triton"] == tokens["reference"]
    assert tokens["triton"] == tokens["cpu"]
    for found, expected in zip(logits["triton"], logits["reference"]):
        assert torch.isfinite(found).all()
        assert (found - expected).abs().max() / expected.abs().max() <= 1e-4
