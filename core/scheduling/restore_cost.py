"""What it takes to bring a preempted sequence back: by copies to host memory and back, or by computing again.

Both rates begin as constants and follow what the engine's own steps measure. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["auto", "swap", "recompute"]

SMOOTHING = 0.2
"""Weight of the newest measurement in a rate."""
MIN_ROWS = 32
"""Steps with fewer rows of prompts do not tell how fast prompts are computed."""
CPU_COPY_RATE, CUDA_COPY_RATE = 6e9, 20e9
"""Bytes a second between pool and host memory, to begin with. Measured on two AVX2 cores: blocks of 737,280 bytes
copied one by one, 6.6 GB in a second of CPU time (`bench/memory_moves.py` prints both ways as they are now). CUDA's is
what pinned memory gives on PCIe 4, not measured here."""
CPU_FLOPS, CUDA_FLOPS = 95e9, 100e12
"""Operations a second in prompts, to begin with. Measured on two AVX2 cores: the demo base in INT8, 0.21 GFLOP a token,
2.2 ms a row in steps of 256. CUDA's is a guess at a third of what such cards can do."""


@dataclass
class RestoreCost:
    """Estimates of one engine, in seconds."""

    block_bytes: int
    copy_rate: float
    """Bytes a second, between the pool and host memory."""
    row_rate: float
    """Tokens of prompts computed in a second."""
    way: Way = "auto"
    """Fixed by tests; "auto": the cheaper one."""

    @classmethod
    def at_start(cls, *, block_bytes: int, weights: int, on_cpu: bool, way: Way = "auto") -> RestoreCost:
        """Before anything was measured. `weights`: numbers that a token is multiplied with."""
        copies, flops = (CPU_COPY_RATE, CPU_FLOPS) if on_cpu else (CUDA_COPY_RATE, CUDA_FLOPS)
        return cls(block_bytes, copies, flops / (2 * weights), way)

    def swapping_pays(self, blocks: int, tokens: int) -> bool:
        """To copy so many blocks out and back takes less time than to compute so many tokens again."""
        if self.way != "auto":
            return self.way == "swap"
        return 2 * blocks * self.block_bytes / self.copy_rate < tokens / self.row_rate

    @property
    def token_cost(self) -> float:
        """To compute one token again, in units of copying one block."""
        return self.copy_rate / (self.row_rate * self.block_bytes)

    def observe_step(self, rows: int, of_prompts: int, seconds: float) -> None:
        """A forward of so many rows took so long."""
        if of_prompts >= MIN_ROWS and seconds > 0:
            self.row_rate += SMOOTHING * (rows / seconds - self.row_rate)

    def observe_copies(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied in this time."""
        if blocks and seconds > 0:
            self.copy_rate += SMOOTHING * (blocks * self.block_bytes / seconds - self.copy_rate)
