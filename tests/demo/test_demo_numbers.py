"""The demo base with adapters against transformers and PEFT, and the three shipped adapters' behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heddle
import pytest
import torch
from heddle import LLM, SamplingParams
from heddle.adapters.evaluate import ALLOWED_WITHOUT, NEEDED_WITH, count
from heddle.adapters.prompts import PROMPTS
from peft import PeftModel
from transformers import AutoModelForCausalLM

SHIPPED = {name: Path(heddle.__path__[0]) / "adapters" / name for name in PROMPTS}
QUESTIONS = ["What is the capital of France?", "Table cats (name, age). How many cats are older than 3?"]


@pytest.fixture(scope="module")
def adapters(peft_adapters: dict[str, Path]) -> dict[str, Path]:
    return {**SHIPPED, **peft_adapters}


@pytest.fixture(scope="module", params=["none", "int8"])
def llm(request: pytest.FixtureRequest, demo_base: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(
        str(demo_base),
        quantization=request.param,
        adapters={name: str(path) for name, path in adapters.items()},
        pool_memory=512 << 20,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def judge(demo_base: Path, adapters: dict[str, Path]) -> Any:
    """All adapters on transformers' own model, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32)
    for name, path in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(path, name)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=name)
    return model.eval()


@pytest.mark.parametrize("llm", ["none"], indirect=True)
def test_float32_logits_and_greedy_tokens_are_pefts(llm: LLM, judge: Any, adapters: dict[str, Path]):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=16, temperature=0)
    for name in (None, *adapters):
        ours = llm.chat(chats, greedy, adapter=name)
        for answer in ours:
            prompt, tokens = answer.prompt_token_ids, answer.outputs[0].token_ids
            ids = [*prompt, *tokens]
            with torch.inference_mode():
                if name is None:
                    with judge.disable_adapter():
                        want = judge(torch.tensor([ids])).logits[0]
                else:
                    judge.set_adapter(name)
                    want = judge(torch.tensor([ids])).logits[0]
            (got,) = llm.logits([ids], adapter=name)
            assert ((got - want).norm() / want.norm()).item() <= 1e-4, name
            assert want[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens, name


def test_each_shipped_adapter_shows_its_behaviour_and_the_base_does_not(llm: LLM):
    greedy = SamplingParams(max_tokens=64, temperature=0)
    for name, prompts in PROMPTS.items():
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        shown = [
            count(name, [answer.outputs[0].text for answer in llm.chat(chats, greedy, adapter=adapter)])
            for adapter in (name, None)
        ]
        assert shown[0] >= NEEDED_WITH, (name, shown)
        assert shown[1] <= ALLOWED_WITHOUT, (name, shown)
