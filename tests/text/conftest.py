"""Tokenizers of every kind, made here: byte-level BPE, SentencePiece with byte fallback, and others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heddle.core.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The end, said the fox.",
    "Hello world! ABCDEFGHIJ abc 123 Paris, Paris is the capital of France.",
    "größer, schön, übermütig; 世界 你好 世; emoji 😀😀 🎉",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(add_bos: bool = False) -> Backend:
    """Byte-level BPE as GPT-2 and Llama 3 have it; 😀 has no token of its own."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if add_bos:
        backend.post_processor = begin_with(backend, "<s>")
    return backend


def sentencepiece_like() -> Backend:
    """Pieces, `<0x00>` to `<0xFF>`, "▁" for a space: the layout of Llama 2's tokenizer.json."""
    words = [
        "▁",
        "▁Hello",
        "Hello",
        "▁world",
        "▁x",
        "x",
        "a",
        "b",
        "世",
        "!",
        "▁▁",
        "Pari",
        "s",
        "D",
        "E",
        "F",
        "G",
    ]
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + words:
        vocab[token] = len(vocab)
    backend = Backend(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = begin_with(backend, "<s>")
    return backend


def unigram() -> Backend:
    """Unigram pieces with the Metaspace decoder, as T5-like vocabularies have it."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁Hello", -3.0), ("▁world", -3.0)]
    backend = Backend(
        models.Unigram([*pieces, ("a", -4.0), ("▁x", -4.0), ("▁▁x", -4.5), ("世", -5.0)], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def words() -> Backend:
    """Whole words and no decoder at all: decoding puts a space between tokens."""
    vocab = {word: index for index, word in enumerate([*SPECIAL, "one", "two", "three", "�"])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def begin_with(backend: Backend, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, backend.token_to_id(token))]
    )


KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "byte-level-bos": lambda: byte_level(add_bos=True),
    "pieces": sentencepiece_like,
    "unigram": unigram,
    "words": words,
}


def write_folder(folder: Path, kind: str, **config: Any) -> Path:
    """A folder with a tokenizer; `config` adds to tokenizer_config.json, None takes away."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    content = {key: value for key, value in {**base, **config}.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """`model_folder(kind, **tokenizer_config)` writes a folder with a tokenizer of that kind."""
    return lambda kind, **config: write_folder(tmp_path / "model", kind, **config)


@pytest.fixture(scope="session")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("byte-level"), "byte-level"))


@pytest.fixture(scope="session")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("pieces"), "pieces"))


@pytest.fixture(scope="session")
def unigram_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("unigram"), "unigram"))


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("words"), "words"))


@pytest.fixture(scope="session", params=["byte_level", "piece", "unigram", "word"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{request.param}_tokenizer")
