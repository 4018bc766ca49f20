"""Settings with which an engine starts, and those with which it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle import LLM, SamplingParams
from heddle.core.config import EngineConfig
from heddle.core.engine.engine import Engine
from heddle.core.errors import EngineStartError

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 300}, "--max-model-len 300"),
        ({"pool_memory": 100}, "hold no block"),
        ({"kv_cache_dtype": "int8", "block_size": 1}, "--block-size 1: a block of 96 bytes cannot hold"),
        ({"model": "/nowhere"}, "no config.json"),
    ],
)
def test_settings_that_cannot_be_are_named(base: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        Engine(EngineConfig(**({"model": str(base), "pool_memory": 1 << 20} | settings)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("eager", [None, True, False])
def test_a_setting_that_changes_nothing_is_said(base: Path, eager: bool | None, backend: Any) -> None:
    """Only the reference operations are never captured."""
    config = EngineConfig(model=str(base), pool_memory=1 << 20, enforce_eager=eager, backend=backend)
    engine = Engine(config)
    try:
        said = any("--no-enforce-eager" in note for note in engine.ready.notes)
        assert said == (eager is False and backend == "reference")
    finally:
        engine.close()


def test_a_pool_that_cannot_be_allocated_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("heddle.core.engine.pool_setup.Pool", no_memory)
    with pytest.raises(EngineStartError, match="no room for a pool of 1048576 bytes"):
        Engine(EngineConfig(model=str(base), pool_memory=1 << 20))


def test_a_block_too_small_for_an_adapters_row_is_refused(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match=r"--block-size 16: a block of 4096 bytes .* takes 16384"):
        Engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(base: Path) -> None:
    with pytest.raises(EngineStartError, match="no CUDA device"):
        Engine(EngineConfig(model=str(base), device="cuda"))


COMPILERS = "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers"
DECODE = """
import sys
from heddle import LLM, SamplingParams

with LLM(sys.argv[1], pool_memory=1 << 20, quantization="int8") as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert llm._engine._runner.graphs._graphs, "decode steps were recorded"
print(sorted(set(sys.argv[2:]) & set(sys.modules)))
"""


def test_an_engine_on_a_cpu_imports_no_compiler_that_it_does_not_use(base: Path) -> None:
    """They cost two seconds at the first decode step, and a third of the engine's memory."""
    command = [sys.executable, "-c", DECODE, str(base), *COMPILERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_a_pool_smaller_than_the_context_is_allowed(start: Start) -> None:
    llm = start(pool_memory=4 * 4096, adapters={})
    assert llm._engine.ready.max_model_len == 256
    assert llm._engine.ready.num_blocks == 4
    assert len(llm.generate(["abc"], GREEDY)[0].outputs[0].token_ids) == 8


def test_a_pool_in_words(start: Start) -> None:
    assert start(pool_memory="64KiB", adapters={}).config.pool_memory == 65536
    with pytest.raises(ValueError, match=r"LLM\(\): '64 parsecs' is not a size"):
        start(pool_memory="64 parsecs", adapters={})
