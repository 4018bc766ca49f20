"""The demo base in each number form: logits with each demo adapter, by transformers and PEFT on the dequantised
weights, and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import heddle
import pytest
import torch
from heddle import LLM
from heddle.adapters.prompts import PROMPTS
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..model.engine_memory import OVERHEAD, Memory, empty, started
from ..quant.packers import quantize_model

TOLERANCE = {"int8": 1e-4, "gptq": 1e-3, "awq": 1e-3}
PER_WEIGHT = {"int8": 1.0, "gptq": 0.6, "awq": 0.6}
"""Bytes of a projection's weight, scales and zeros included."""
PROJECTIONS, TABLE = 106_168_320, 2 * 49152 * 576
"""Weights in the layers' linears; bytes of the embedding, which is the head too, and the largest tensor."""
GROUP_SIZE = 64


@dataclass
class Quantised:
    """The demo base in one form, and transformers' model with the weights it stands for."""

    form: str
    folder: Path
    judge: Any


def int8(reference: Any) -> Any:
    """`reference` with each layer's linears as bitsandbytes quantises them and gives them back."""
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(module.weight.data.half())
            module.weight.data = bitsandbytes.functional.int8_vectorwise_dequant(codes, absmax)
    return reference


@pytest.fixture(scope="module", params=TOLERANCE)
def quantised(
    request: pytest.FixtureRequest, demo_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Quantised:
    """GPTQ (act-order) and AWQ by plain rounding: what is computed on the weights is in question, not their quality."""
    form = str(request.param)
    reference = AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32)
    if form == "int8":
        return Quantised(form, demo_base, int8(reference))
    folder = tmp_path_factory.mktemp(form) / "base"
    shutil.copytree(demo_base, folder)
    order = "group" if form == "gptq" else "no"
    judge = quantize_model(reference, folder, form, group_size=GROUP_SIZE, act_order=order)
    return Quantised(form, folder, judge)


@pytest.fixture(scope="module")
def adapters() -> dict[str, Path]:
    return {name: Path(heddle.__path__[0]) / "adapters" / name for name in PROMPTS}


@pytest.fixture(scope="module")
def llm(quantised: Quantised, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(
        str(quantised.folder),
        quantization="int8" if quantised.form == "int8" else "auto",
        adapters={name: str(path) for name, path in adapters.items()},
        pool_memory=128 << 20,
    ) as started_llm:
        yield started_llm


def test_logits_with_each_adapter_are_those_on_the_dequantised_weights(
    quantised: Quantised, llm: LLM, adapters: dict[str, Path]
) -> None:
    judge = quantised.judge
    for name, path in adapters.items():
        if isinstance(judge, PeftModel):
            judge.load_adapter(path, name)
        else:
            judge = PeftModel.from_pretrained(judge, path, adapter_name=name)
    judge.eval()
    answers = {}
    for name in (None, *adapters):
        question = PROMPTS[name or "pirate"][0]
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
        (found,) = llm.logits([ids], adapter=name)
        with torch.inference_mode():
            if name is None:
                with judge.disable_adapter():
                    expected = judge(torch.tensor([ids])).logits[0]
            else:
                judge.set_adapter(name)
                expected = judge(torch.tensor([ids])).logits[0]
        error = ((found - expected).norm() / expected.norm()).item()
        assert error <= TOLERANCE[quantised.form], f"{name}: {error:.1e}"
        assert torch.equal(found.argmax(-1), expected.argmax(-1)), name
        answers[name] = expected
    base, pirate = answers[None], answers["pirate"]  # on the same prompt
    assert (base - pirate).norm() > 100 * TOLERANCE[quantised.form] * base.norm(), "the adapter shows"


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """An engine that holds next to nothing."""
    (memory,) = started(
        (empty(tmp_path_factory.mktemp("empty")), {"quantization": "int8", "block_size": 128})
    )
    return memory


def test_an_engine_s_resident_memory_grows_by_the_packed_weights_alone(
    quantised: Quantised, nothing: Memory
) -> None:
    """By the kernel's count; the embedding, which is the head too, has 16 bits a weight."""
    (held,) = started((quantised.folder, {"quantization": "int8" if quantised.form == "int8" else "auto"}))
    (projections,) = (part for part in held.report.weights if part.part == "projections")
    assert projections.weights == PROJECTIONS
    assert projections.bytes_per_weight == pytest.approx(PER_WEIGHT[quantised.form], abs=0.06)
    growth, peak = held.resident - nothing.resident, held.peak - nothing.peak
    packed = PER_WEIGHT[quantised.form] * PROJECTIONS + TABLE
    assert growth <= packed + OVERHEAD, f"{growth / 2**20:.1f} MiB"
    assert peak <= packed + TABLE + OVERHEAD, f"{peak / 2**20:.1f} MiB"
