"""Load a checkpoint in the tool it is meant for and compare: same weights as Heddle reads, and text that makes sense.

GPTQ and AWQ run in the judges' environment. INT8 runs in the project's own, whose transformers loads
bitsandbytes' form on a CPU; the judges' older one does so only with an extension of Intel's. Exits with a message
that names the first tensor that differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

PROMPT = "The capital of France is"
TOKENS = 8


def weight(module: torch.nn.Module) -> torch.Tensor | None:
    """[N, K] as the tool multiplies with it; None for a module that has none of its own."""
    if type(module).__name__ == "WQLinear_GEMM":
        from awq.utils.packing_utils import dequantize_gemm

        packed = module.qweight, module.qzeros, module.scales
        return dequantize_gemm(*packed, module.w_bit, module.group_size).T
    if hasattr(module, "qweight"):
        kept, module.bias = module.bias, None
        found = module(torch.eye(module.infeatures)).T
        module.bias = kept
        return found
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        return bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    found = getattr(module, "weight", None)
    return found if isinstance(found, torch.Tensor) else None


def load(method: str, folder: str) -> torch.nn.Module:
    """As the tool itself loads it; the tools print what they are."""
    if method == "bitsandbytes":
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    import tools

    loaded = (tools.gptq_load if method == "gptq" else tools.awq_load)(folder)
    return loaded.model


def compare(model: torch.nn.Module, ours: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many tensors of each class of modules were compared; SystemExit for one that differs.

    The tool's dtype decides: ours are rounded to it once.
    """
    counts: dict[str, int] = {}
    seen = set()
    for name, module in model.named_modules():
        theirs = weight(module)
        key = f"{name}.weight"
        if theirs is None or key not in ours:
            continue
        if not torch.equal(theirs, ours[key].to(theirs.dtype)):
            error = (theirs.float() - ours[key]).abs().max()
            raise SystemExit(f"{key} differs, by at most {error:.3g} of {ours[key].abs().max():.3g}")
        seen.add(key)
        kind = type(module).__name__
        counts[kind] = counts.get(kind, 0) + 1
    if missed := ours.keys() - seen:
        raise SystemExit(f"the tool's model lacks {', '.join(sorted(missed)[:4])}")
    return counts


def text(model: Any, folder: Path) -> str:
    """Greedy continuation of PROMPT."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = model(ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(1, keepdim=True)], dim=1)
    return str(tokenizer.decode(ids[0].tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("weights", type=Path, help="what export_weights.py wrote for it")
    parser.add_argument("--says", help="words that the continuation of a prompt must contain")
    options = parser.parse_args()
    config = json.loads((options.checkpoint / "config.json").read_text())
    settings = config.get("quantization_config") or json.loads(
        (options.checkpoint / "quantize_config.json").read_text()
    )
    method = settings.get("quant_method", "gptq")
    model = load(method, str(options.checkpoint))
    counts = compare(model, load_file(options.weights))
    print(f"{options.checkpoint}: loaded; equal weights: {counts}")
    with torch.inference_mode():
        logits = model(torch.arange(8).unsqueeze(0)).logits
    if not logits.isfinite().all():
        raise SystemExit("the tool's logits are not finite")
    if options.says:
        found = text(model, options.checkpoint)
        print(f"  it says: {found!r}")
        if options.says not in found:
            raise SystemExit(f"{options.says!r} was expected there")


if __name__ == "__main__":
    main()
