"""Have AutoGPTQ, AutoAWQ and bitsandbytes load what `heddle quantize` writes, and compare what they read.

Runs in the project's environment and calls the judges' for the tools' part. Without checkpoints it makes a tiny
model, quantises it in every way, and checks those.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from export_weights import export
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
WAYS = {
    "int8": ["--method", "int8"],
    "gptq": ["--method", "gptq", "--group-size", "32"],
    "gptq-act": ["--method", "gptq", "--group-size", "32", "--desc-act"],
    "gptq-8bit-asym": ["--method", "gptq", "--bits", "8", "--group-size", "32", "--no-sym"],
    "gptq-row": ["--method", "gptq", "--group-size", "-1"],
    "awq": ["--method", "awq", "--group-size", "32"],
}


def tiny_model(folder: Path) -> None:
    """A random LLaMA with grouped queries and a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=255,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[255])
    fast.save_pretrained(folder)


def quantize(work: Path) -> list[Path]:
    """The tiny model in every way that `heddle quantize` knows."""
    tiny_model(work / "float")
    calibration = work / "calibration.txt"
    text = "\n".join(path.read_text() for path in sorted(HERE.glob("*.py")))
    calibration.write_text(text[:40_000])
    made = []
    for name, how in WAYS.items():
        command = [Path(sys.executable).with_name("heddle"), "quantize", work / "float", *how]
        if name != "int8":
            command += ["--calibration", calibration]
        subprocess.run([*command, "-o", work / name], check=True)
        made.append(work / name)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--judges", required=True, type=Path, help="the Python of the judges' environment")
    parser.add_argument(
        "--says", help="words that the continuation of 'The capital of France is' must contain"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for checkpoint in options.checkpoints or quantize(work):
            form = export(checkpoint, work / "weights.safetensors")
            python = sys.executable if form == "int8" else options.judges
            command = [python, HERE / "check_checkpoint.py", checkpoint, work / "weights.safetensors"]
            done = subprocess.run(
                [*command, *(["--says", options.says] if options.says else [])], check=False
            )
            if done.returncode:
                raise SystemExit(f"{checkpoint} is not what it should be in the tool it is meant for")


if __name__ == "__main__":
    main()
