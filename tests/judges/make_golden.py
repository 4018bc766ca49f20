"""Write the golden layers: small linears quantised, packed and computed by the real tools, seeded.

Each file holds, for one or several linears of one input: the tensors as the tool stores them
(`NAME.qweight`, ...), the weight they stand for in the tool's own arithmetic (`NAME.weight` [N, K], what its
forward gives for the identity), an input `x` [T, K] and the tool's output for it (`NAME.y` [T, N]). Metadata,
as JSON under `about`: `tool`, `layer` (the class that computed), `settings` as a checkpoint has them, `note`.

Every packed weight is also unpacked here in integers and float64, so that a tool that computes something else
than its format says does not become a judge.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import tools
import torch
from auto_gptq.quantization import GPTQ
from auto_gptq.utils.import_utils import dynamically_import_QuantLinear
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import AWQ_ORDER
from safetensors.torch import load, save

ROWS = 5
"""Of x."""
CALIBRATION = 512
"""Rows the tools see when they quantise."""

Tensors = dict[str, torch.Tensor]


def inputs(k: int, rows: int, seed: int) -> torch.Tensor:
    """[rows, K] whose channels differ in size by up to 30, in no order, as those of a real model do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 0.5, k)[torch.randperm(k, generator=generator)]
    mixed = torch.randn((rows, k), generator=generator) @ torch.randn((k, k), generator=generator) / k**0.5
    return (mixed + torch.randn((rows, k), generator=generator)) * sizes


def linear(n: int, k: int, *, bias: bool, seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    """Random weights; rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        sizes = torch.logspace(-2, -0.5, n).unsqueeze(1)
        layer.weight.copy_(torch.randn((n, k), generator=generator) * sizes)
        if bias:
            layer.bias.copy_(torch.randn(n, generator=generator))
    return layer.to(dtype)


def fields(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The integers in int32 words, from the lowest bits on, unfolded along `axis`."""
    parts = [words.view(np.uint32) >> shift & 2**bits - 1 for shift in range(0, 32, bits)]
    stacked = np.stack(parts, axis=axis + 1).astype(np.int64)
    shape = list(words.shape)
    shape[axis] *= len(parts)
    return stacked.reshape(shape)


def computed(layer: Any, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] as `layer` itself multiplies with it."""
    kept, layer.bias = layer.bias, None
    weight = layer(torch.eye(k, dtype=dtype)).T.contiguous()
    layer.bias = kept
    return weight


def gptq_layer(layer: torch.nn.Linear, x: torch.Tensor, settings: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """AutoGPTQ's packed layer, and the weight that its format says it has (float64 [N, K])."""
    n, k = layer.weight.shape
    bits, group_size, desc_act = settings["bits"], settings["group_size"], settings["desc_act"]
    quantizer = GPTQ(layer)
    quantizer.quantizer.configure(bits, perchannel=True, sym=settings["sym"], mse=False)
    quantizer.add_batch(x.to(layer.weight.dtype), None)
    scale, zero, g_idx = quantizer.fasterquant(
        group_size=group_size, actorder=desc_act, static_groups=settings.get("static_groups", False)
    )
    kind = dynamically_import_QuantLinear(
        use_triton=False, desc_act=desc_act, group_size=group_size, bits=bits,
        disable_exllama=False, disable_exllamav2=True,
    )  # fmt: skip
    packed = kind(bits, group_size, k, n, layer.bias is not None, weight_dtype=layer.weight.dtype)
    packed.pack(layer, scale, zero, g_idx)
    codes = fields(packed.qweight.numpy(), bits, 0)
    zeros = (fields(packed.qzeros.numpy(), bits, 1) + 1) % 2**bits
    index = packed.g_idx.numpy()
    weight = (codes - zeros[index]) * packed.scales.double().numpy()[index]
    return packed, torch.from_numpy(weight.T)


def gptq(name: str, members: dict[str, int], k: int, note: str = "", **how: Any) -> tuple[str, Tensors, dict]:
    """A file of AutoGPTQ's. `members`: out_features by name. `how`: settings, and what is done to weights."""
    bias, dtype = how.pop("bias", False), how.pop("dtype", torch.float32)
    own_orders, positive = how.pop("own_orders", False), how.pop("positive", False)
    v2 = how.get("checkpoint_format") == "gptq_v2"
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **how}
    seed = sum(name.encode())
    tensors: Tensors = {"x": inputs(k, ROWS, seed).to(dtype)}
    for i, (member, n) in enumerate(members.items()):
        layer = linear(n, k, bias=bias, seed=seed + i, dtype=dtype)
        if positive:
            layer.weight.data[::8] = layer.weight.data[::8].abs()
        seen = inputs(k, CALIBRATION, seed + 100 + (i if own_orders else 0))
        packed, expected = gptq_layer(layer, seen, settings)
        weight = computed(packed, k, dtype)
        agree(name, weight, expected)
        stored = {part: value for part, value in packed.state_dict().items() if value is not None}
        if v2:
            stored["qzeros"] = plus_one(stored["qzeros"], settings["bits"])
        tensors |= {f"{member}.{part}": value.contiguous() for part, value in stored.items()}
        tensors |= {f"{member}.weight": weight, f"{member}.y": packed(tensors["x"])}
    if v2:
        note += "AutoGPTQ 0.7.1 knows no gptq_v2: its zeros were rewritten, each field plus one."
    kind = f"{type(packed).__module__}.{type(packed).__name__} in plain torch"
    return name, tensors, {"tool": "auto-gptq 0.7.1", "layer": kind, "settings": settings, "note": note}


def plus_one(qzeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Each field of the words plus one."""
    found = (fields(qzeros.numpy(), bits, 1) + 1) % 2**bits
    words = sum(found[:, i :: 32 // bits] << bits * i for i in range(32 // bits))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def awq(name: str, members: dict[str, int], k: int, note: str = "", **how: Any) -> tuple[str, Tensors, dict]:
    """A file of AutoAWQ's; its layers compute in float16."""
    bias, ends, zero_point = how.pop("bias", False), how.pop("ends", False), how.pop("zero_point", True)
    group_size = how.pop("group_size", 32)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    settings["zero_point"] = zero_point
    seed = sum(name.encode())
    tensors: Tensors = {"x": inputs(k, ROWS, seed).half()}
    quantizer = tools.CopyingQuantizer.__new__(tools.CopyingQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = 4, group_size, zero_point
    for i, (member, n) in enumerate(members.items()):
        layer = linear(n, k, bias=bias, seed=seed + i, dtype=torch.float16)
        if ends:
            layer.weight.data[::4] = layer.weight.data[::4].abs()
            layer.weight.data[1::4] = -layer.weight.data[1::4].abs()
        layer.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(layer.weight.data)
        zeros = torch.full_like(scales, 8) if zeros is None else zeros
        packed = WQLinear_GEMM.from_linear(
            layer, 4, group_size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        weight = computed(packed, k, torch.float16)
        back = [AWQ_ORDER.index(j) for j in range(8)]
        codes, stored = (
            fields(words.numpy(), 4, 1).reshape(len(words), -1, 8)[:, :, back].reshape(len(words), -1)
            for words in (packed.qweight, packed.qzeros)
        )
        index = np.arange(k) // group_size
        expected = (codes - stored[index]) * packed.scales.double().numpy()[index]
        agree(name, weight, torch.from_numpy(expected.T))
        tensors |= {f"{member}.{part}": value.contiguous() for part, value in packed.state_dict().items()}
        tensors |= {f"{member}.weight": weight, f"{member}.y": packed(tensors["x"])}
    if not zero_point:
        note += "AutoAWQ 0.2.9 packs no gemm layer without zeros: its symmetric scales, with zeros of 8."
    kind = "awq.modules.linear.gemm.WQLinear_GEMM in plain torch"
    return name, tensors, {"tool": "autoawq 0.2.9", "layer": kind, "settings": settings, "note": note}


def int8(name: str, members: dict[str, int], k: int, note: str = "", **how: Any) -> tuple[str, Tensors, dict]:
    """A file of bitsandbytes'; `NAME.float` is the weight before it was quantised."""
    bias, dtype = how.pop("bias", False), how.pop("dtype", torch.float32)
    seed = sum(name.encode())
    tensors: Tensors = {"x": inputs(k, ROWS, seed)}
    for i, (member, n) in enumerate(members.items()):
        source = linear(n, k, bias=bias, seed=seed + i, dtype=dtype)
        if n % 2:
            source.weight.data[n // 2] = 0
        layer = bitsandbytes.nn.Linear8bitLt(k, n, bias=bias, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(
            source.weight.data.clone(), requires_grad=False, has_fp16_weights=False
        )
        layer.bias = source.bias
        layer = layer.to("cpu")
        stored = {part: value.detach().clone() for part, value in layer.state_dict().items()}
        weight = bitsandbytes.functional.int8_vectorwise_dequant(stored["weight"], stored["SCB"])
        agree(name, weight, stored["weight"].double() * stored["SCB"].double().unsqueeze(1) / 127)
        y = layer(tensors["x"]).detach()
        tensors |= {f"{member}.{part}": value.contiguous() for part, value in stored.items()}
        tensors |= {f"{member}.dequantised": weight, f"{member}.float": source.weight.detach()}
        tensors[f"{member}.y"] = y
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    note += "`weight` is the stored int8, `dequantised` what it stands for; y is LLM.int8()'s: its inputs are int8 too."
    kind = "bitsandbytes.nn.Linear8bitLt"
    tool = f"bitsandbytes {bitsandbytes.__version__}"
    return name, tensors, {"tool": tool, "layer": kind, "settings": settings, "note": note}


def agree(name: str, weight: torch.Tensor, expected: torch.Tensor) -> None:
    """The tool's weight is what its format says, rounded once to the tool's dtype (twice for INT8's scale)."""
    error = (weight.double() - expected).abs().max() / expected.abs().max()
    if error > 2 * torch.finfo(weight.dtype).eps:
        raise SystemExit(f"{name}: the tool computes something else than the format says (by {error:.1e})")


ONE = {"linear": 64}
QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
"""Grouped queries: k and v have half of q's outputs."""


def cases() -> list[tuple[str, Tensors, dict]]:
    half = torch.float16
    v2 = {"checkpoint_format": "gptq_v2"}
    return [
        gptq("gptq-4bit-g32-sym", {"linear": 32}, 64),
        gptq("gptq-4bit-g64-asym", {"linear": 96}, 128, group_size=64, sym=False),
        gptq("gptq-4bit-g128-sym-half", ONE, 128, group_size=128, dtype=half),
        gptq("gptq-4bit-row-sym-bias", ONE, 96, group_size=-1, bias=True),
        gptq("gptq-4bit-row-act-asym", ONE, 96, group_size=-1, desc_act=True, sym=False),
        gptq("gptq-4bit-g32-act-sym-half", ONE, 128, desc_act=True, dtype=half),
        gptq("gptq-4bit-g64-act-asym-bias", {"linear": 128}, 192, group_size=64, desc_act=True, sym=False, bias=True),
        gptq("gptq-4bit-g128-act-short-last-group", ONE, 192, group_size=128, desc_act=True, sym=False),
        gptq("gptq-4bit-g32-act-static-groups", ONE, 64, desc_act=True, static_groups=True),
        gptq("gptq-4bit-g32-asym-zeros-of-0", ONE, 64, sym=False, positive=True),
        gptq("gptq-4bit-g32-act-qkv", QKV, 64, desc_act=True),
        gptq("gptq-4bit-g32-act-qkv-own-orders", QKV, 64, desc_act=True, sym=False, own_orders=True),
        gptq("gptq-8bit-g32-sym-half", ONE, 64, bits=8, dtype=half),
        gptq("gptq-8bit-g128-asym", ONE, 128, bits=8, group_size=128, sym=False),
        gptq("gptq-8bit-row-asym-bias", ONE, 96, bits=8, group_size=-1, sym=False, bias=True),
        gptq("gptq-8bit-g64-act-sym", ONE, 128, bits=8, group_size=64, desc_act=True),
        gptq("gptq-v2-4bit-g32-act-asym", ONE, 64, desc_act=True, sym=False, **v2),
        gptq("gptq-v2-4bit-g64-sym-bias", ONE, 128, group_size=64, bias=True, **v2),
        gptq("gptq-v2-8bit-g64-asym", ONE, 64, bits=8, group_size=64, sym=False, **v2),
        awq("awq-g32", {"linear": 32}, 64),
        awq("awq-g64-bias", {"linear": 96}, 128, group_size=64, bias=True),
        awq("awq-g128", {"linear": 128}, 128, group_size=128),
        awq("awq-row", ONE, 96, group_size=96),
        awq("awq-g32-without-zero-points", ONE, 64, zero_point=False),
        awq("awq-g32-zeros-of-0-and-15", ONE, 64, ends=True),
        awq("awq-g32-qkv", QKV, 64),
        int8("int8-odd", {"linear": 33}, 65),
        int8("int8-half-bias", ONE, 96, dtype=half, bias=True),
        int8("int8-bfloat16-qkv", QKV, 64, dtype=torch.bfloat16),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, tensors, about in cases():
        data = save(tensors, {"about": json.dumps(about)})  # one entry: several are written in no fixed order
        path, state = folder / f"{name}.safetensors", "new"
        if path.is_file():
            old = path.read_bytes()
            same = old == data
            state = (
                "the same bytes"
                if same
                else f"CHANGED: {', '.join(differing(load(old), tensors)) or 'metadata'}"
            )
        path.write_bytes(data)
        total += len(data)
        print(f"{name}: {state}")
    print(f"{total / 1e6:.2f} MB in {folder}")


def differing(old: Tensors, new: Tensors) -> list[str]:
    return sorted(
        k for k in old.keys() | new.keys() if k not in old or k not in new or not old[k].equal(new[k])
    )


if __name__ == "__main__":
    main()
