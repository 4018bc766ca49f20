"""Tiny float models with a byte tokenizer, ready to be quantised, and what quantised files stand for, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ..model.conftest import Bench, close, load, oracle, save_tiny
from .packers import AWQ_ORDER

TEXT = "".join(chr(32 + (i * i + i // 7) % 95) for i in range(1500))

TOKENS = [(i * 37) % 258 for i in range(21)]


def save_float(folder: Path, kind: str = "Llama", *, begin: bool = False, **changes: Any) -> Any:
    """A model of 258 tokens (256 bytes, <s>, </s>) with its tokenizer; `begin`: that puts <s> before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)
    return save_tiny(folder, kind, vocab_size=258, bos_token_id=0, eos_token_id=1, **changes)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all shards."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def down_words(words: torch.Tensor, bits: int) -> np.ndarray:
    """int32 [R, C] -> [R * 32 / bits, C]: field i of a word is the i-th of its rows."""
    found = words.numpy().view(np.uint32)
    parts = [(found >> np.uint32(bits * place)) & np.uint32(2**bits - 1) for place in range(32 // bits)]
    return np.stack(parts, axis=1).reshape(-1, found.shape[1]).astype(np.int64)


def along_words(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 [R, C] -> [R, C * 32 / bits]: field i of a word is the i-th, or order[i]-th, of its columns."""
    found, per_word = words.numpy().view(np.uint32), 32 // bits
    codes = np.zeros((found.shape[0], found.shape[1] * per_word), np.int64)
    for place in range(per_word):
        column = order[place] if order else place
        codes[:, column::per_word] = (found >> np.uint32(bits * place)) & np.uint32(2**bits - 1)
    return codes


def gptq_weight(tensors: dict[str, torch.Tensor], name: str, bits: int) -> torch.Tensor:
    """(code - (stored zero + 1)) * scale, transposed: float32 [N, K]. As AutoGPTQ reads it: without a modulo."""
    codes, zeros = down_words(tensors[f"{name}.qweight"], bits), along_words(tensors[f"{name}.qzeros"], bits)
    index = tensors[f"{name}.g_idx"].numpy()
    scales = tensors[f"{name}.scales"].numpy().astype(np.float32)
    return torch.from_numpy(((codes - (zeros + 1)[index]).astype(np.float32) * scales[index]).T.copy())


def awq_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """(code - zero) * scale, transposed: float32 [N, K]."""
    codes = along_words(tensors[f"{name}.qweight"], 4, AWQ_ORDER)
    zeros = along_words(tensors[f"{name}.qzeros"], 4, AWQ_ORDER)
    scales = tensors[f"{name}.scales"].numpy().astype(np.float32)
    group = np.arange(len(codes)) // (len(codes) // len(scales))
    return torch.from_numpy(((codes - zeros[group]).astype(np.float32) * scales[group]).T.copy())


def int8_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """weight * SCB / 127: float32 [N, K]."""
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.SCB"].unsqueeze(1) / 127


def put_back(reference: Any, folder: Path, method: str, bits: int = 4) -> Any:
    """transformers' model with what the files in `folder` stand for in its place."""
    tensors = read_tensors(folder)
    with torch.no_grad():
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                if method == "gptq":
                    weight = gptq_weight(tensors, name, bits)
                elif method == "awq":
                    weight = awq_weight(tensors, name)
                else:
                    weight = int8_weight(tensors, name)
                module.weight.copy_(weight)
                if module.bias is not None:
                    module.bias.copy_(tensors[f"{name}.bias"])
            elif name.endswith("norm"):
                module.weight.copy_(tensors[f"{name}.weight"])
    return reference


def serves(folder: Path, reference: Any, tolerance: float = 1e-5) -> None:
    """Prefill in two chunks and a decode give transformers' logits."""
    bench = Bench(load(folder))
    steps = [bench.step({"a": part})["a"] for part in (TOKENS[:9], TOKENS[9:-1], TOKENS[-1:])]
    close(torch.cat(steps), oracle(reference, TOKENS), tolerance)
