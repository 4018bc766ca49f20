"""One layer quantised: its weights measured on calibration samples, rounded, and the next layer's inputs made.

The order of things is that of the tools: AutoGPTQ 0.7.1 (true_sequential) and AutoAWQ 0.2.9 for LLaMA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...quant.quantize import awq, gptq
from ...quant.quantize.rounding import Rounded, in_order
from .float_layer import BATCH, FloatLayer, LayerMath, over_samples

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

UNCLIPPED = ("q_proj", "k_proj")
"""Their errors meet in a product, where they cannot be told apart group by group."""

Run = Callable[[list[torch.Tensor]], torch.Tensor]
"""A module's output with other weights."""


def gptq_layer(
    layer: FloatLayer, math: LayerMath, hidden: torch.Tensor, settings: gptq.Settings
) -> tuple[dict[str, Rounded], torch.Tensor]:
    """Round every linear with GPTQ; each sees the outputs of those before it as rounded, earlier layers' too.

    hidden float32 [S, T, hidden] -> the rounded weights by module name, and the next layer's hidden. The
    layer's weights become the rounded ones. Linears of one input share its Hessian and are rounded as one.
    """
    rounded: dict[str, Rounded] = {}

    def take(modules: Sequence[str], x: torch.Tensor) -> None:
        hessian = gptq.Hessian(x.shape[-1])
        for part in x.split(BATCH):
            hessian.add(part)
        weight = torch.cat([layer.weights[module] for module in modules])
        whole = gptq.quantize(weight, hessian.value(), settings)
        row = 0
        for module in modules:
            rows = len(layer.weights[module])
            rounded[module] = whole.rows(row, row + rows)
            layer.weights[module] = rounded[module].values()
            row += rows

    x = math.norm(hidden, layer.input_norm)
    take(QKV, x)
    x = over_samples(lambda part: math.attention(layer, part), x)
    take(("o_proj",), x)
    hidden = hidden + over_samples(lambda part: layer.linear("o_proj", part), x)
    x = math.norm(hidden, layer.mlp_norm)
    take(GATE_UP, x)
    x = over_samples(lambda part: math.gated(layer, part), x)
    take(("down_proj",), x)
    return rounded, hidden + over_samples(lambda part: layer.linear("down_proj", part), x)


@dataclass
class _Inputs:
    """What a layer's linears get: float32 [S, T, K] each."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def awq_layer(
    layer: FloatLayer,
    math: LayerMath,
    hidden: torch.Tensor,
    group_size: int,
    norm_dtypes: Sequence[torch.dtype],
) -> tuple[dict[str, Rounded], torch.Tensor]:
    """Scale, clip and round every linear with AWQ; all is measured on the float model.

    hidden float32 [S, T, hidden] -> the rounded weights by module name, and the next layer's hidden, which is
    the float layer's. Afterwards the layer's norms (exact in `norm_dtypes`) and biases are those that belong to
    the rounded weights.
    """
    inputs, output = _forward(layer, math, hidden)
    _scale(layer, math, inputs, group_size, norm_dtypes)
    by_module = dict.fromkeys(QKV, inputs.qkv) | dict.fromkeys(GATE_UP, inputs.gate_up)
    by_module |= {"o_proj": inputs.out, "down_proj": inputs.down}
    rounded = {}
    for module, weight in layer.weights.items():
        size = _size(weight, group_size)
        if module not in UNCLIPPED:
            weight = awq.clip(
                weight, awq.search_clip(weight, by_module[module].flatten(0, 1), group_size=size)
            )
        codes, scales, zeros = awq.quantize(weight, group_size=size)
        rounded[module] = Rounded(codes, scales, zeros, in_order(weight.shape[1], size))
    return rounded, output


def _forward(layer: FloatLayer, math: LayerMath, hidden: torch.Tensor) -> tuple[_Inputs, torch.Tensor]:
    """The inputs of the linears, and the layer's output."""
    qkv = math.norm(hidden, layer.input_norm)
    out = over_samples(lambda part: math.attention(layer, part), qkv)
    hidden = hidden + over_samples(lambda part: layer.linear("o_proj", part), out)
    gate_up = math.norm(hidden, layer.mlp_norm)
    down = over_samples(lambda part: math.gated(layer, part), gate_up)
    return _Inputs(qkv, out, gate_up, down), hidden + over_samples(
        lambda part: layer.linear("down_proj", part), down
    )


def _scale(
    layer: FloatLayer, math: LayerMath, inputs: _Inputs, group_size: int, norm_dtypes: Sequence[torch.dtype]
) -> None:
    """Find scales for all four inputs on the weights as they are, then change weights, norms and `inputs`.

    On all samples: on half of them, in half the time, at least three of the demo base's 30 layers get other scales
    for q, k and v, by which q and k lose up to 9 % more.
    """
    weights = layer.weights

    def search(modules: tuple[str, ...], x: torch.Tensor, run: Run) -> torch.Tensor:
        own = [weights[module] for module in modules]
        return awq.search_scale(own, x.flatten(0, 1), run, group_size=_size(own[0], group_size))

    def attention(candidates: list[torch.Tensor]) -> torch.Tensor:
        own = dict(zip(QKV, candidates))
        return over_samples(lambda x: layer.linear("o_proj", math.attention(layer, x, own)), inputs.qkv)

    def mlp(candidates: list[torch.Tensor]) -> torch.Tensor:
        own = dict(zip(GATE_UP, candidates))
        return over_samples(lambda x: layer.linear("down_proj", math.gated(layer, x, own)), inputs.gate_up)

    qkv = search(QKV, inputs.qkv, attention)
    gate_up = search(GATE_UP, inputs.gate_up, mlp)
    down = search(("down_proj",), inputs.down, _same_squares(inputs.down))
    out = None
    if (
        weights["v_proj"].shape == weights["o_proj"].shape
    ):  # else v's outputs are shared by heads of o's input
        out = search(("o_proj",), inputs.out, _same_squares(inputs.out))

    layer.input_norm, qkv = _divided(layer.input_norm, qkv, norm_dtypes[0])
    layer.mlp_norm, gate_up = _divided(layer.mlp_norm, gate_up, norm_dtypes[1])
    for before, scale in (("v_proj", out), ("up_proj", down)):
        if scale is not None:
            weights[before] /= scale.unsqueeze(1)
            bias = layer.biases[before]
            layer.biases[before] = None if bias is None else bias / scale
    for modules, x, scale in (
        (QKV, inputs.qkv, qkv),
        (("o_proj",), inputs.out, out),
        (GATE_UP, inputs.gate_up, gate_up),
        (("down_proj",), inputs.down, down),
    ):
        if scale is not None:
            x /= scale
            for module in modules:
                weights[module] *= scale


def _same_squares(x: torch.Tensor) -> Run:
    """Of one linear, outputs whose squares have the sum of those on x [S, T, K], from at most K rows.

    R of x = QR: R^T R = x^T x, so |R w|^2 = |x w|^2 for every w.
    """
    factor = torch.linalg.qr(x.flatten(0, 1), mode="r").R
    return lambda candidates: factor @ candidates[0].t()


def _divided(
    norm: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's weight divided by `scale` and rounded to `dtype`, and the scale which that then amounts to.

    Weights multiplied by the latter make up for the division exactly, whatever was rounded.
    """
    divided = (norm / scale).to(dtype).float()
    return divided, torch.where(divided == 0, scale, norm / divided)


def _size(weight: torch.Tensor, group_size: int) -> int:
    return weight.shape[1] if group_size == -1 else group_size
