"""Quantise a model with AutoGPTQ or AutoAWQ, on given samples of token ids: what `heddle quantize` is compared with."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import tools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["gptq", "awq"])
    parser.add_argument("model", type=Path, help="a float LLaMA in a Hugging Face folder")
    parser.add_argument("samples", type=Path, help="JSON: a list of equally long lists of token ids")
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="use only one sample in so many")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--no-desc-act", action="store_true", help="gptq: in order of position")
    options = parser.parse_args()
    samples = json.loads(options.samples.read_text())[:: options.every]
    begun = time.monotonic()
    if options.method == "gptq":
        tools.gptq_quantize(
            str(options.model),
            samples,
            str(options.out),
            bits=4,
            group_size=options.group_size,
            desc_act=not options.no_desc_act,
            sym=True,
        )
    else:
        settings = {"zero_point": True, "q_group_size": options.group_size, "w_bit": 4, "version": "GEMM"}
        tools.awq_quantize(str(options.model), samples, str(options.out), **settings)
    for path in options.model.glob("*token*.json"):
        shutil.copy(path, options.out / path.name)
    print(f"{options.out}: {len(samples)} samples of {len(samples[0])}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
