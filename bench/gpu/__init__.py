"""How fast the Triton kernels are on this machine's GPU: every operation, and whole decode steps. Under 8 minutes.

    make bench-gpu [ARGS="--models Llama-3-8B"]        python -m heddle.bench.gpu --floors  (arithmetic alone, no GPU)

**Operations** run at the shapes of Llama-2-7B and Llama-3-8B with random values in float16, one layer's call at a time.
Each call is captured in a CUDA graph and replayed between two events, after a write and a read that leave the
second-level cache without anything of the call's; the figure is the median. A replay's own start, a few microseconds,
is in it. Beside it stands what torch (cuBLAS for products, the fused attention over dense keys and values) takes for
the same result, timed in the same way. Every output is compared with `kernels/reference.py` first.

**Steps** are decodes of a random model of that size as the engine makes them: the captured forward is replayed, then
the head and the choice of tokens follow, greedy ones, and once without adapters drawn ones. They are timed in a row,
without the engine's own work on the host.

**Floors** are arithmetic (`costs.py`): the bytes that have to be read and written at least, each once. Of an operation:
weights, keys and values, adapters and activations. Of a step: weights, keys and values, adapters; its activations may
stay in the second-level cache. Rates are floors over times, so a kernel that reads twice shows half of what it moves.
They stand beside the copy bandwidth and the matrix product rate that this device reaches at the start of the same run.
"""
