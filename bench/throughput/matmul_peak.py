"""The machine's own measured peak: a large float32 product in torch, on so many threads. Prints GFLOP/s.

python -m heddle.bench.throughput.matmul_peak THREADS
"""

from __future__ import annotations

import sys
import time

import torch

SIDE, SECONDS = 2048, 3.0


def matmul_peak(threads: int) -> float:
    """The best of as many products of two square matrices as fit into SECONDS, in 10^9 operations a second."""
    torch.set_num_threads(threads)
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)
    fastest, ends = float("inf"), time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < ends:
        torch.mm(a, b, out=out)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * SIDE**3 / fastest / 1e9


if __name__ == "__main__":
    print(matmul_peak(int(sys.argv[1])))
