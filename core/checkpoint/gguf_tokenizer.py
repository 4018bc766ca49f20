"""Build `tokenizer.json` and `tokenizer_config.json` from the vocabulary a GGUF file carries.

Two kinds exist in the LLaMA family: byte-level BPE with its merges ("gpt2"), split before merging as
`tokenizer.ggml.pre` names it, and SentencePiece BPE ("llama"), whose merges follow from the pieces' scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError
from .sentencepiece_bpe import Piece, sentencepiece_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: special tokens, and whole tokens that are ordinary text."""

GPT2_SPLIT = None
"""Stands for the split that the byte-level pre-tokenizer brings itself."""
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "default": GPT2_SPLIT,
    "gpt-2": GPT2_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "tekken": TEKKEN_SPLIT,
}
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Every digit is cut off first, then GPT-2's split applies to what lies between."""
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""A word that is in the vocabulary is taken as it is, whether or not the merges lead there; and these
vocabularies put a begin token before a text, unless the file says otherwise.
"""


def write_tokenizer(path: Path, metadata: dict[str, Any], vocab_size: int, folder: Path) -> None:
    """Write the tokenizer of the GGUF file `path` (for messages) to `folder`.

    Raises `CheckpointError` for a kind that is not known exactly: a near miss would change every answer.
    """
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    except KeyError:
        raise CheckpointError(f"{path} holds no tokenizer") from None
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows"
        )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(path, metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(path, metadata)
    else:
        raise CheckpointError(f"{path}: tokenizer kind {kind!r} is not known (gpt2 and llama are)")
    add_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    _add_special_tokens(tokenizer, metadata, add_bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(metadata)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre not in SPLITS:
        raise CheckpointError(f"{path}: the tokenizer's way of splitting text, {pre!r}, is not known")
    elif (pattern := SPLITS[pre]) is GPT2_SPLIT:
        split = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre in WHOLE_WORDS)
    )
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    types = metadata.get("tokenizer.ggml.token_type", [])
    scores = metadata.get("tokenizer.ggml.scores", [])
    tokens = metadata["tokenizer.ggml.tokens"]
    if not len(types) == len(scores) == len(tokens):
        raise CheckpointError(f"{path}: tokens, scores and token types of the tokenizer differ in number")
    pieces = [Piece(*entry) for entry in zip(tokens, scores, types)]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece_bpe(pieces, add_prefix_space=prefix)


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], add_bos: bool) -> None:
    """`add_bos`: whether texts begin with the begin token where the file does not say."""
    from tokenizers import AddedToken, processors

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types):
        if token_type == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    ends = []
    for name, default in (("bos", add_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            ends.append((name, tokens[index], int(index)))
    if ends:
        before = [token for name, token, _ in ends if name == "bos"]
        after = [token for name, token, _ in ends if name == "eos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, index) for _, token, index in ends],
        )


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for gguf_name, name in names.items():
        index = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if index is not None:
            config[name] = metadata["tokenizer.ggml.tokens"][index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
