"""What Triton would compile again for: nothing, once the engine has warmed up.

In a child, because kernels are interpreted here; there launches are listed instead of run, and no GPU is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import random, sys, torch
from dataclasses import replace
from heddle.core.config import EngineConfig
from heddle.core.engine import accelerator, device
from heddle.core.engine.engine import Engine
from heddle.core.engine.runner import Runner
from heddle.core.engine.warm_up import warm_up
from heddle.core.messages import AdapterUse
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.plan import Chunk, StepPlan
from heddle.core.scheduling.sequence import Sequence
from heddle.kernels import triton as operations
from heddle.kernels.triton.launch import Launch, recorded
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

backend, binders = CUDABackend(GPUTarget("cuda", 90, 32)), {}

def key(launch):
    # What JITFunction.run looks up its compiled kernels by.
    kernel = launch.kernel
    if launch.name not in binders:
        binders[launch.name] = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialisation, options = binders[launch.name](*launch.arguments, **launch.options)
    return launch.name, str(specialisation), str(options)

def chunk(number, start, length, adapters):
    sequence = Sequence(
        key=number, group=number, prompt_token_ids=[0] * (start + length), max_tokens=1, tenant="", arrival=0,
        params=SamplingParams(seed=0, temperature=random.choice((0.0, 0.7))), adapters=(AdapterUse("a"),) * adapters,
    )
    blocks = tuple(random.randrange(64) for _ in range(-(-(start + length) // 16)))
    return Chunk(sequence=sequence, start=start, token_ids=[0] * length, block_table=blocks,
                 adapter_slots=tuple(random.randrange(8) for _ in range(adapters)), samples=True)

random.seed(3)
quantization = sys.argv[2]
with recorded(run=False) as launches:
    engine = Engine(EngineConfig(
        model=sys.argv[1], backend="triton", pool_memory=1 << 20, quantization=quantization, kv_cache_dtype=sys.argv[3],
    ))
    runner, pool, tables = engine._runner, engine._pool, engine._memory.tables
    warm_up(runner, pool, tables, operations.BUILT_FOR_ROWS, engine.ready.max_model_len)
known = {key(launch) for launch in launches}
assert len(known) > 20, len(known)
some = next(launch for launch in launches if launch.name == "rope_and_write")
place = some.kernel.arg_names.index("block_stride")
changed = list(some.arguments)
changed[place] += 1
assert key(replace(some, arguments=tuple(changed))) not in known, "a key can be new"

found = set()
for _ in range(50):
    with recorded(run=False) as launches:
        chunks = [
            chunk(number, random.randrange(1500), random.choice((1, 1, 1, random.randrange(1, 50))),
                  random.choice((0, 0, 1, 2)))
            for number in range(random.randrange(1, 40))
        ]
        runner.execute(StepPlan(chunks=tuple(chunks)))
    found |= {key(launch) for launch in launches}
    new = found - known
    assert not new, sorted(new)[0]
print(len(known), len(found))
"""


@pytest.fixture(scope="module")
def longer(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with room for contexts that attention splits."""
    folder = tmp_path_factory.mktemp("longer")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def keys(base: Path, quantization: str, cache: str = "auto") -> tuple[int, int]:
    """How many builds the warm-up asks for, and how many of them 50 random steps do."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(base), quantization, cache],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    warm, random_steps = map(int, done.stdout.split())
    return warm, random_steps


def test_50_random_steps_ask_for_no_build_that_the_warm_up_did_not(longer: Path) -> None:
    """Mixes of prompts and decodes, 1 to about 400 rows, contexts to 1500 tokens, none to two adapters a row."""
    warm, random_steps = keys(longer, "none")
    assert warm >= random_steps > 20


def test_the_same_over_int8_weights(longer: Path) -> None:
    warm, random_steps = keys(longer, "int8")
    assert warm >= random_steps > 20
