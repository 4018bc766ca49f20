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

from ..quant.random_checkpoint import random_checkpoint

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
cache, most_tokens, max_model_len = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with recorded(run=False) as launches:
    engine = Engine(EngineConfig(
        model=sys.argv[1], backend="triton", pool_memory=1 << 20, kv_cache_dtype=cache, max_model_len=max_model_len,
        quantization=sys.argv[5],
    ))
    runner, pool, tables = engine._runner, engine._pool, engine._memory.tables
    launches.clear()
    steps = device.warm_up_rows(operations, torch.device("cuda"), most_tokens)
    assert max(rows for rows, _ in steps) <= most_tokens
    warm_up(runner, pool, tables, steps, max_model_len)
known = {key(launch) for launch in launches}
assert len(known) > 20, len(known)
some = next(launch for launch in launches if launch.name == "rope_and_write")
place = some.kernel.arg_names.index("block_stride")
changed = list(some.arguments)
changed[place] += 1
assert key(replace(some, arguments=tuple(changed))) not in known, "a key can be new"

found = set()
for _ in range(50):
    chunks, left, longest = [], random.randrange(1, most_tokens + 1), random.choice((1, 50, 50))
    while left and len(chunks) < 150:
        rows = random.choice((1, 1, 1, random.randrange(1, longest + 1)))
        rows = min(rows, left, max_model_len)
        start = random.randrange(max_model_len - rows + 1)
        chunks.append(chunk(len(chunks), start, rows, random.choice((0, 0, 1, 2))))
        left -= rows
    with recorded(run=False) as launches:
        runner.execute(StepPlan(chunks=tuple(chunks)))
    found |= {key(launch) for launch in launches}
    new = found - known
    assert not new, sorted(new)[0]
print(len(known), len(found))
"""


def lengthen(folder: Path) -> Path:
    """Room for contexts that attention splits."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def longer(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, longer."""
    folder = tmp_path_factory.mktemp("longer")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    return lengthen(folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 bit weights in act-order."""
    return lengthen(random_checkpoint(tmp_path_factory.mktemp("packed") / "gptq", "gptq"))


def check(
    base: Path,
    cache: str = "auto",
    most_tokens: int = 2048,
    max_model_len: int = 2048,
    quantization: str = "auto",
) -> None:
    """Mixes of prompts and decodes, 1 to `most_tokens` rows, none to two adapters a row."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings = [cache, str(most_tokens), str(max_model_len), quantization]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(base), *settings],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    warm, random_steps = map(int, done.stdout.split())
    assert warm >= random_steps > 10


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("form", ["none", "int8", "gptq"])
def test_50_random_steps_ask_for_no_build_that_the_warm_up_did_not(
    longer: Path, packed: Path, form: str, cache: str
) -> None:
    check(packed if form == "gptq" else longer, cache, quantization=form)


@pytest.mark.parametrize(
    ("most_tokens", "max_model_len"), [(17, 2048), (33, 2048), (65, 2048), (128, 2048), (300, 60), (65, 2)]
)
def test_the_same_where_steps_or_contexts_are_short(
    longer: Path, most_tokens: int, max_model_len: int
) -> None:
    """Several sequences or adapters, or rows that all sample, reach tiles that one prompt would not."""
    check(longer, most_tokens=most_tokens, max_model_len=max_model_len)
