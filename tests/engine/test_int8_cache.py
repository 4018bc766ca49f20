"""A whole model over an int8 cache: near the float cache, more blocks in the same memory, everything else the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heddle import LLM, SamplingParams

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NAMES = [None, "r5", "r64", "r8"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_near_those_over_a_float_cache(
    start: Start, prompts: list[list[int]], backend: str
) -> None:
    chosen = prompts[9:13]
    exact = start().logits(chosen, adapter=NAMES)
    found = start(backend=backend, kv_cache_dtype="int8").logits(chosen, adapter=NAMES)
    for rows, expected in zip(found, exact, strict=True):
        error = (rows - expected).norm() / expected.norm()
        assert 1e-5 < error < 2e-2, "rounded, but not far"


def test_triton_s_kernels_give_the_reference_s_logits(start: Start, prompts: list[list[int]]) -> None:
    chosen = [prompts[8], prompts[1]]
    settings = {"kv_cache_dtype": "int8", "max_num_seqs": 2}
    expected = start(backend="reference", **settings).logits(chosen, adapter=["r5", None])
    found = start(backend="triton", **settings).logits(chosen, adapter=["r5", None])
    for rows, wanted in zip(found, expected, strict=True):
        # A value on the border of two codes may fall to either side: one step of 1/127.
        assert (rows - wanted).norm() / wanted.norm() < 5e-3


def test_the_same_memory_holds_more_tokens(start: Start) -> None:
    """K and V of 2 layers, 2 heads of 8, 16 tokens: 4096 bytes in float32; a byte each and 4 for a scale: 1536."""
    ready = start(pool_memory=1 << 20, kv_cache_dtype="int8", adapters={})._engine.ready
    assert (ready.block_bytes, ready.num_blocks) == (1536, (1 << 20) // 1536)
    assert ready.memory is not None
    assert ready.memory.blocks_total == 682
    assert ready.memory.pool_bytes == 682 * 1536
    plain = start(pool_memory=1 << 20, adapters={})._engine.ready
    assert (plain.block_bytes, plain.num_blocks) == (4096, 256)


def test_tokens_are_the_same_with_prefix_hits_and_after_preemption(
    start: Start, prompts: list[list[int]]
) -> None:
    chosen = prompts[9:13]
    calm = start(kv_cache_dtype="int8", enable_prefix_caching=False)
    expected = [o.outputs[0].token_ids for o in calm.generate(chosen, GREEDY, adapter=NAMES)]
    for settings in ({}, {"pool_memory": 200 * 1536, "preemption": "swap"}):
        llm = start(kv_cache_dtype="int8", **settings)
        for _ in range(2):
            found = llm.generate(chosen, GREEDY, adapter=NAMES)
            assert [o.outputs[0].token_ids for o in found] == expected


def test_captured_steps_over_it(
    start: Start, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from .recording_accelerator import Recorder

    expected = [
        o.outputs[0].token_ids
        for o in start(kv_cache_dtype="int8").generate(prompts[9:13], GREEDY, adapter=NAMES)
    ]
    recorder = Recorder()
    monkeypatch.setattr("heddle.core.engine.accelerator.for_device", lambda device: recorder)
    llm = start(kv_cache_dtype="int8", enforce_eager=False, max_num_seqs=4)
    found = llm.generate(prompts[9:13], GREEDY, adapter=NAMES)
    assert [o.outputs[0].token_ids for o in found] == expected
    assert recorder.replays
    assert torch.isfinite(llm.logits([prompts[9]])[0]).all()
