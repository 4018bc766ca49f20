"""Random weights in each number form, a random model of them, random adapters in a pool, choices of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...core.model.llama import DOWN, GATE_UP, OUT, QKV, Layer, LlamaModel, Projection
from ...core.model.rope import cos_sin_table
from ...kernels.ops import AdapterTables, Choices, Ops
from ...kernels.packed_weight import PackedWeight
from ...kernels.pool import ROW_ALIGN, Pool, PoolLayout
from ...lora.base import MODULES
from ...quant.base import LinearMethod, Target
from ...quant.int8 import Int8Linear
from ...quant.none import FloatLinear
from ...quant.packed import PackedLinear
from .bases import GROUPS, Base, Sizes

HALF = torch.float16
INT8_SPREAD, W4_SPREAD = 73.6, 4.61
"""Standard deviations of codes drawn evenly from -127 to 127, and from -8 to 7."""
KV_DTYPES = {"fp16": HALF, "INT8": torch.int8}


def draw(form: str, n: int, k: int, group_size: int, device: torch.device) -> Callable[[Ops], LinearMethod]:
    """A random weight [n, k] that keeps the size of what it is multiplied with, for whichever operations."""
    spread = k**-0.5

    def target(ops: Ops) -> Target:
        return Target(ops=ops, dtype=HALF, device=device)

    if form == "fp16":
        weight = torch.empty((n, k), dtype=HALF, device=device).normal_(std=spread)
        return lambda ops: FloatLinear(weight, None, target(ops))
    if form == "INT8":
        integers = torch.empty((n, k), dtype=torch.int8, device=device).random_(-127, 128)
        largest = torch.full((n,), 127 * spread / INT8_SPREAD, device=device)
        return lambda ops: Int8Linear(integers, largest, None, target(ops))
    assert form == "W4"
    groups = -(-k // group_size)
    packed = PackedWeight(
        codes=torch.empty((n, k // 2), dtype=torch.uint8, device=device).random_(0, 256),
        scales=torch.full((n, groups), spread / W4_SPREAD, dtype=HALF, device=device),
        zeros=torch.full((n, groups), 8, dtype=torch.uint8, device=device),
        order=None,
        bits=4,
        group_size=group_size,
    )
    return lambda ops: PackedLinear(packed, None, target(ops))


def random_model(base: Base, form: str, sizes: Sizes, ops: Ops, device: torch.device) -> LlamaModel:
    """A whole model. The same seed gives the same weights for other operations too."""
    config = base.config

    def norm() -> torch.Tensor:
        return torch.ones(config.hidden_size, dtype=HALF, device=device)

    def projection(group: str, modules: tuple[int, ...]) -> Projection:
        linear = draw(form, *base.shape(group), sizes.group_size, device)(ops)
        return Projection(linear, modules, base.widths(group))

    def table() -> FloatLinear:
        weight = torch.empty((config.vocab_size, config.hidden_size), dtype=HALF, device=device)
        return FloatLinear(weight.normal_(std=config.hidden_size**-0.5), None, Target(ops, HALF, device))

    layers = [
        Layer(
            input_norm=norm(),
            qkv=projection("qkv", QKV),
            out=projection("out", OUT),
            mlp_norm=norm(),
            gate_up=projection("gate_up", GATE_UP),
            down=projection("down", DOWN),
        )
        for _ in range(config.num_layers)
    ]
    cos, sin = cos_sin_table(config.rope, config.head_dim, sizes.max_model_len)
    return LlamaModel(
        config, ops=ops, dtype=HALF, device=device, embedding=table(), layers=layers, norm=norm(), head=table(),
        cos_sin=(cos.to(device), sin.to(device)), quantization=form, quantization_reason="random", notes=(),
    )  # fmt: skip


def layout(base: Base, sizes: Sizes, layers: int, kv_form: str = "fp16") -> PoolLayout:
    config = base.config
    return PoolLayout(layers, config.num_kv_heads, config.head_dim, sizes.block_size, KV_DTYPES[kv_form])


def fill(pool: Pool) -> None:
    """Random keys and values; what is read as an adapter is small beside what it is multiplied with."""
    if pool.layout.quantised:
        pool.elements(torch.int8).random_(-127, 128)
        for layer in range(pool.layout.num_layers):
            for scales in pool.kv_scales(layer):
                scales.fill_(1 / INT8_SPREAD)
    else:
        pool.elements(pool.layout.kv_dtype).normal_()


def adapter_tables(
    base: Base, ranks: Sequence[int], layers: int, groups: Sequence[str], device: torch.device
) -> tuple[AdapterTables, int]:
    """One slot for each of the adapters, which lie one after another from the pool's first byte on; and the bytes that
    they take. Their scales make deltas of values around 1 small."""
    shape = (len(ranks), layers, len(MODULES))
    of_modules, first_row = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    scales = np.zeros(shape, np.float32)
    lengths: list[int] = []
    for slot, rank in enumerate(ranks):
        for layer in range(layers):
            for group in groups:
                k = base.shape(group)[1]
                for module, width in zip(GROUPS[group], base.widths(group)):
                    place = slot, layer, MODULES.index(module)
                    of_modules[place], first_row[place] = rank, len(lengths)
                    scales[place] = 0.1 * (k * rank) ** -0.5
                    lengths += [k] * rank + [width] * rank
    units = -(-np.array(lengths, np.int64) * HALF.itemsize // ROW_ALIGN)
    places = np.concatenate([np.zeros(1, np.int64), np.cumsum(units)])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    tables = AdapterTables(
        ranks=put(of_modules),
        first_row=put(first_row),
        scales=put(scales),
        rows=put(places[:-1].astype(np.int32)),
        dtype=HALF,
    )
    return tables, int(places[-1]) * ROW_ALIGN


def choices(rows: int, device: torch.device, *, draws: bool) -> Choices:
    """Greedy, or draws at temperature 0.8 from the 50 best that hold 0.95."""

    def each(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return Choices(
        temperatures=each(0.8 if draws else 0.0, torch.float32),
        top_ks=each(50, torch.int32),
        top_ps=each(0.95, torch.float64),
        min_ps=each(0.0, torch.float32),
        points=torch.rand(rows, dtype=torch.float64, device=device),
        draws=draws,
    )
