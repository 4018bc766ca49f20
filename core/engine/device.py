"""Which device and number form an engine runs with, and how much memory its pool gets."""

from __future__ import annotations

import torch

from ...kernels.ops import Ops
from ..config import EngineConfig
from ..errors import EngineStartError
from ..model.config import ModelConfig
from .host_memory import available_memory
from .runner import LOGIT_ROWS

CPU_POOL_SHARE, CPU_POOL_LIMIT = 4, 4 << 30
"""On a CPU the pool takes a quarter of what is available, at most 4 GiB."""
CPU_STEP_TOKENS, CUDA_STEP_TOKENS = 256, 2048
"""Tokens in one step (on a CPU, of prompts): how long a running stream waits for somebody's long prompt. Prefill of
the demo base, INT8, on two AVX2 cores, in one step: 128 rows 258 ms, 256 rows 566 ms, 512 rows 1.28 s, 1024 rows
2.69 s: 2.0, 2.2, 2.5 and 2.6 ms a row, so larger steps gain nothing. CUDA's is vLLM's usual figure, not measured
here."""
CONTEXT_PART = 256
"""Tokens of a context for which attention keeps one partial result: a float32 vector a query head, and two numbers."""
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_device(config: EngineConfig) -> torch.device:
    """The device asked for; "auto" is CUDA where there is one. Raises `EngineStartError`."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineStartError("--device cuda: this machine has no CUDA device that torch can use")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Positions of one sequence: what is asked for, at most the model's own. Raises `EngineStartError`."""
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if not 1 <= config.max_model_len <= limit:
        raise EngineStartError(
            f"--max-model-len {config.max_model_len}: must lie between 1 and the model's own {limit}"
        )
    return config.max_model_len


def resolve_dtype(config: EngineConfig, device: torch.device, checkpoint_dtype: str | None) -> torch.dtype:
    """The dtype asked for; "auto" is float32 on a CPU (which emulates 16 bits) and the checkpoint's own on
    CUDA."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return DTYPES.get(checkpoint_dtype or "", torch.float16)


def pool_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """Bytes for the pool, once the weights are loaded. `step_bytes`: what one step's activations may take."""
    if config.pool_memory is not None:
        return config.pool_memory
    if device.type == "cpu":
        return min(available_memory() // CPU_POOL_SHARE, CPU_POOL_LIMIT)
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) - (total - free) - step_bytes


def step_tokens(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """The most tokens of one step, and the most of them that are prompts'.

    By default decodes take no room from the prompts on a CPU, where a step is short: four prompts of 64 tokens fit
    into every step, not only into the first."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens, config.max_num_batched_tokens
    if device.type == "cpu":
        return CPU_STEP_TOKENS + config.max_num_seqs, CPU_STEP_TOKENS
    return CUDA_STEP_TOKENS, CUDA_STEP_TOKENS


def step_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """A bound on what one step of `tokens` holds besides weights and pool: a layer's activations, attention's partial
    results for as many sequences of the longest context as there may be, and logits while sampling."""
    widths = sum(out_features for out_features, _ in model.linear_shapes.values()) + 4 * model.hidden_size
    activations = tokens * widths * (dtype.itemsize + 4)
    context = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    parts = -(-context // CONTEXT_PART) * model.num_heads * (model.head_dim + 2) * 4
    logits = max(config.max_num_seqs, LOGIT_ROWS) * model.vocab_size * 4 * 4
    return activations + min(config.max_num_seqs, tokens) * parts + logits


def warm_up_rows(operations: Ops, device: torch.device, tokens: int) -> list[tuple[int, int]]:
    """Steps that reach all that has to be compiled before serving, as rows, of which none has more than `tokens`, and
    adapters on each of them: where rows do not suffice, several adapters a row make the pairs of row and adapter."""
    if device.type == "cpu":  # where even Triton's kernels are interpreted
        return [(min(4, tokens), 1)]
    numbers = getattr(operations, "BUILT_FOR_ROWS", (4,))
    return [(min(number, tokens), -(-number // tokens)) for number in numbers]
