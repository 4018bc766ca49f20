"""AWQ's mathematics: scales that protect the features activations are large in, ranges worth clipping, 4 bit codes.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration",
arXiv 2306.00978; grids and constants are those of AutoAWQ 0.2.9, so that both choose alike. Groups are
`group_size` neighbouring inputs of one output; K must be a multiple of it. G = K / group_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TOP = 15
"""The largest code of 4 bits."""

SMALLEST_RANGE = 1e-5
"""Of a group, so that one of zeros has a scale."""

SHRINK_STEPS, SHRINK_GRID = 10, 20
"""A group's range is tried at 20/20, 19/20, ... 11/20 of its own."""

SWEEPS = 3
"""How often each group's range is chosen anew beside the others': a fourth time changes errors by 0.2 %."""

CHUNK = 1 << 22
"""Differences squared at a time, which bounds their memory to some 16 MiB each."""


def quantize(weight: torch.Tensor, *, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to the nearest of 16 evenly spaced values from each group's least to its largest.

    float [N, K] -> codes uint8 [N, K], scales float32 [N, G], zeros uint8 [N, G]; a code stands for
    (code - zero) * scale. Scales are exact in float16, the dtype files store them in: what is rounded here is
    what is read back. Zero is always within the range, also of a group whose values are all of one sign.
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    scales = _spacing(groups).half().float()
    codes, zeros = _nearest(groups, scales)
    return codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What `quantize`'s result stands for: float32 [N, K]."""
    groups = codes.unflatten(1, (scales.shape[1], -1)).float()
    return ((groups - zeros.unsqueeze(2).float()) * scales.unsqueeze(2)).flatten(1)


def search_scale(
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    run: Callable[[list[torch.Tensor]], torch.Tensor],
    *,
    group_size: int,
    grid: int = 20,
) -> torch.Tensor:
    """The scale [K] of input features, out of `grid`, that costs a module's output least.

    `weights`: float32 [N_i, K] each, of the linears that take the same input x float32 [T, K]. `run` gives the
    module's output, of any shape, on the unscaled input with other weights in their places; candidates are
    Q(W * s) / s. For r = 0, 1/grid, 2/grid, ...: s = mean|x|^r / mean|w|^(1-r), where |w| counts relative to the
    largest of its group; then s is divided by the geometric mean of its largest and smallest.
    """
    size = x.abs().mean(dim=0, dtype=torch.float32)
    weight_size = _relative_size(weights, group_size)
    target = run(list(weights))
    best, least = torch.ones_like(size), float("inf")
    for step in range(grid):
        scale = _candidate(size, weight_size, step / grid)
        error = mean_square(run([_rounded(weight, scale, group_size) for weight in weights]), target)
        if error < least:
            best, least = scale, error
    return best


def search_clip(weight: torch.Tensor, x: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """The largest absolute value to keep of each group, by what rounding then costs the linear's output.

    weight float32 [N, K] and its input x float32 [T, K], both scaled already -> float32 [N, G]. Unlike in AutoAWQ,
    which looks at each group alone, a group's errors are added to those of the others, which they may make up
    for or make worse: starting from no clipping, each group in turn takes the limit that is best beside what the
    others have. With d = w - Q(clip(w)) the error |x d|^2 is d H d, H = x' x.

    Not for q and k: their errors meet in a product, where they do not add up.
    """
    products = x.float().T @ x.float()
    found = torch.empty(len(weight), weight.shape[1] // group_size)
    step = max(1, CHUNK // weight.shape[1])
    for first in range(0, len(weight), step):
        found[first : first + step] = _clip_rows(weight[first : first + step].float(), products, group_size)
    return found


def clip(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """[N, K] with each group held within plus and minus `largest` [N, G]."""
    limits = largest.unsqueeze(2)
    return weight.unflatten(1, (largest.shape[1], -1)).clamp(-limits, limits).flatten(1)


def mean_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the difference of two tensors of one shape, summed in float64."""
    total = 0.0
    for left, right in zip(found.reshape(-1).split(CHUNK), expected.reshape(-1).split(CHUNK)):
        total += float((left - right).square().sum(dtype=torch.float64))
    return total / expected.numel()


def _relative_size(weights: Sequence[torch.Tensor], group_size: int) -> torch.Tensor:
    """[K]: the mean over all outputs of |w| as a share of its group's largest."""
    groups = torch.cat(list(weights)).abs().unflatten(1, (-1, group_size))
    return (groups / (groups.amax(dim=2, keepdim=True) + 1e-6)).mean(dim=0).flatten()


def _candidate(size: torch.Tensor, weight_size: torch.Tensor, ratio: float) -> torch.Tensor:
    scale = (size.pow(ratio) / (weight_size.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(scale.isfinite(), scale, 1.0)


def _rounded(weight: torch.Tensor, scale: torch.Tensor, group_size: int) -> torch.Tensor:
    """Q(W * s) / s, with the groups' own scales as they are before float16: as AutoAWQ searches."""
    groups = (weight * scale).unflatten(1, (-1, group_size))
    spacing = _spacing(groups)
    codes, zeros = _nearest(groups, spacing)
    return ((codes - zeros.unsqueeze(2)) * spacing.unsqueeze(2)).flatten(1) / scale


def _spacing(groups: torch.Tensor) -> torch.Tensor:
    """[N, G, group] -> [N, G]: a fifteenth of each group's range."""
    least, largest = groups.amin(dim=2).clamp(max=0.0), groups.amax(dim=2).clamp(min=0.0)
    return (largest - least).clamp(min=SMALLEST_RANGE) / TOP


def _nearest(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, G, group] and zeros [N, G], in float32."""
    least = groups.amin(dim=2).clamp(max=0.0)
    zeros = torch.round(-least / scales).clamp(0, TOP)
    codes = torch.round(groups / scales.unsqueeze(2)) + zeros.unsqueeze(2)
    return codes.clamp(0, TOP), zeros


def _clip_rows(weight: torch.Tensor, products: torch.Tensor, group_size: int) -> torch.Tensor:
    lost = weight - dequantize(*quantize(weight, group_size=group_size))
    full = weight.unflatten(1, (-1, group_size)).abs().amax(dim=2)
    best = full.clone()
    for group in list(range(full.shape[1])) * SWEEPS:
        columns = slice(group * group_size, (group + 1) * group_size)
        own, part = products[columns, columns], weight[:, columns]
        others = (
            lost @ products[:, columns] - lost[:, columns] @ own
        )  # [N, group]: what the other groups do here
        least = torch.full((len(weight),), torch.inf)
        for step in range(SHRINK_STEPS):
            largest = full[:, group] * (1 - step / SHRINK_GRID)
            off = part - dequantize(*quantize(clip(part, largest.unsqueeze(1)), group_size=group_size))
            error = ((off @ own + 2 * others) * off).sum(dim=1)
            better = error < least
            least = torch.where(better, error, least)
            best[:, group] = torch.where(better, largest, best[:, group])
            lost[:, columns] = torch.where(better.unsqueeze(1), off, lost[:, columns])
    return best
