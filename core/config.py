"""The engine's settings, as plain data that travels to the engine process. Control code: no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

Quantization = Literal["auto", "none", "int8", "gptq", "awq"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is started with; the fields are the flags of `heddle serve` that concern it.

    `model` is always a local Hugging Face folder: hub names and `.gguf` files are turned into one before
    (`core.checkpoint.resolve`).
    """

    model: str
    quantization: Quantization = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "half", "bfloat16"] = "auto"
    max_model_len: int | None = None
    """None: the model's own `max_position_embeddings`."""
    block_size: int = 16
    """Tokens in one block."""
    pool_memory: int | None = None
    """Bytes of the block pool. None: on a CPU a quarter of what is available, at most 4 GiB; on CUDA what
    `gpu_memory_utilization` leaves after the weights."""
    gpu_memory_utilization: float = 0.9
    swap_space: float = 4.0
    """GiB of host memory: half for sequences swapped out under pressure, half for host copies of adapters."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Tokens in one step: what a long prompt can make others wait for. None: 256 on a CPU, 2048 on CUDA."""
    max_queued_requests: int = 4096
    scheduling_policy: Literal["fair", "fcfs"] = "fair"
    """`fair`: between tenants by the service each was given; `fcfs`: by arrival, whoever's it is."""
    enable_prefix_caching: bool = True
    max_lora_rank: int = 512
    enforce_eager: bool | None = None
    """False: decode steps are captured and replayed, on CUDA as graphs made at the start. None: on a CPU alone."""
    batch_invariant: bool | None = None
    """None: on wherever it is measured to cost under 5 %."""
    int8_activations: bool = False
    quantize_head: bool = False
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """auto: keys and values are held in the dtype of activations."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """How a sequence that gave way comes back; "auto": as is estimated cheaper. Others are for tests."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Which implementation of the operations runs; for tests and fault finding."""
    seed: int = 0
    """Seeds requests that bring none, together with a counter."""
    num_threads: int | None = None
    """CPU threads of the engine. None: every core the process may use."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Of the engine process's own log."""
    step_log: str | None = None
    """A file that receives one JSON line per step (rows, sequences, adapters, milliseconds)."""
    check_invariants: bool = False
    """Verify the pool's conservation after each step; poison free blocks before it. For tests."""
