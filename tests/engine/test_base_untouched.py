"""Adapters that come, work and go leave the base as it was, bit for bit, in every number form."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle import LLM

from ..quant.packers import quantize_model

FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"quantization": "int8"},
    "int8 with int8 activations": {"quantization": "int8", "int8_activations": True},
    "gptq": {},
    "awq": {},
}


@pytest.fixture(params=FORMS)
def llm(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Iterator[LLM]:
    """The tiny base in one form, no adapter yet; free blocks are full of NaN before each step."""
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    if request.param in ("gptq", "awq"):
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        quantize_model(reference, folder, request.param)
    settings = {"pool_memory": 2 << 20, "check_invariants": True, "num_threads": 1, **FORMS[request.param]}
    with LLM(folder, **settings) as llm:
        assert llm._engine.ready.quantization == request.param.split()[0]
        yield llm


def test_base_logits_are_the_same_bits_after_twenty_loads_uses_and_removals_of_an_adapter(
    llm: LLM, adapters: dict[str, Path], prompts: list[list[int]]
) -> None:
    before = llm.logits(prompts[:4])
    names = ["r5", "r16", "r64", "r8"]
    used: dict[str, list[torch.Tensor]] = {}
    for turn in range(20):
        name = names[turn % len(names)]
        llm.load_adapter("x", adapters[name])
        found = llm.logits(prompts[:4], adapter=["x", None, "x", "x"])
        assert torch.equal(found[1], before[1])
        assert (found[0] - before[0]).abs().max() > 0.01
        assert _same(found, used.setdefault(name, found))
        llm.remove_adapter("x")
    assert _same(llm.logits(prompts[:4]), before)
    counts = llm._engine._blocks.counts()
    assert counts["adapters"] == 0, counts


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
