"""Adapters whose files are in 16 bits lie so in a CPU's pool: half the blocks, and not a bit of an answer changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle import LLM
from heddle.core.messages import GetMemory, Reply
from heddle.core.model.config import ModelConfig
from heddle.lora.inspect import inspect
from heddle.lora.layout import blocks_of
from safetensors.torch import load_file, save_file

Start = Callable[..., LLM]
KINDS = {"F16": torch.float16, "BF16": torch.bfloat16}
FILE = "adapter_model.safetensors"


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> Path:
    shutil.copytree(source, target)
    save_file(change(load_file(source / FILE)), target / FILE)
    return target


@pytest.fixture(scope="module", params=KINDS)
def folders(
    request: pytest.FixtureRequest, adapters: dict[str, Path], tmp_path_factory: Any
) -> dict[str, Path]:
    """One adapter's values, exact in 16 bits: in files of 16 bits, of 32, and of both."""
    root, dtype = tmp_path_factory.mktemp(request.param), KINDS[request.param]

    def mixed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        first = min(rounded)
        return rounded | {first: rounded[first].float()}

    source = adapters["r64"]
    return {
        "narrow": copied(source, root / "narrow", lambda ts: {n: t.to(dtype) for n, t in ts.items()}),
        "wide": copied(source, root / "wide", lambda ts: {n: t.to(dtype).float() for n, t in ts.items()}),
        "mixed": copied(source, root / "mixed", mixed),
    }


def adapter_blocks(llm: LLM) -> int:
    (reply,) = llm._engine.handle(GetMemory(call=1))
    assert isinstance(reply, Reply)
    assert reply.memory is not None
    return reply.memory.blocks_adapters


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_are_the_same_bits_and_take_half_the_room(
    start: Start, folders: dict[str, Path], prompts: list[list[int]], backend: str
) -> None:
    blocks, logits = {}, {}
    for name, folder in folders.items():
        llm = start(adapters={name: folder}, backend=backend)
        logits[name] = llm.logits(prompts[:4], adapter=name)
        blocks[name] = adapter_blocks(llm)
    for name in ("narrow", "mixed"):
        for mine, wide in zip(logits[name], logits["wide"], strict=True):
            assert torch.equal(mine, wide)
    assert blocks["mixed"] == blocks["wide"]
    assert blocks["narrow"] <= blocks["wide"] // 2 + 1


def test_both_kinds_in_one_batch(start: Start, folders: dict[str, Path], prompts: list[list[int]]) -> None:
    llm = start(adapters=folders)
    names = [*folders, None, *folders]
    together = llm.logits(prompts[: len(names)], adapter=names)
    for prompt, name, found in zip(prompts, names, together, strict=False):
        (alone,) = llm.logits([prompt], adapter=name)
        assert torch.equal(found, alone), name


def test_what_an_adapter_will_take_is_known_before(
    start: Start, base: Path, folders: dict[str, Path], prompts: list[list[int]]
) -> None:
    model = ModelConfig.load(base).base_model("base", base)
    for name, folder in folders.items():
        llm = start(adapters={name: folder})
        llm.logits(prompts[:1], adapter=name)
        ready, spec = llm._engine.ready, inspect(folder, model, max_rank=512, max_bytes=1 << 30)
        planned = blocks_of(
            spec, model, widest="float32", any_form=ready.any_adapter_form, block_bytes=ready.block_bytes
        )
        assert planned == adapter_blocks(llm)
