"""A folder with a SentencePiece tokenizer.model alone: read exactly, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from heddle.core.checkpoint.errors import CheckpointError
from heddle.core.checkpoint.sentencepiece_model import read_sentencepiece
from heddle.core.text.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "hello world",
    "the theory of the other thing, there",
    "  two  spaces and\nlines ",
    "größer 世界 😀 unseen ж",
    "12345",
    "",
    " ",
]


@pytest.fixture
def folder(sentencepiece_model, tmp_path) -> Path:
    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    return tmp_path


def test_encodings_and_texts_equal_those_of_sentencepiece(folder, sentencepiece_model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == processor.vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    for text in TEXTS:
        expected = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(expected) == processor.decode(expected)


def test_the_flags_decide_what_stands_around_a_text(folder):
    plain = Tokenizer.load(folder).encode("hello")[1:]
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    assert Tokenizer.load(folder).encode("hello") == [*plain, 2]


def test_tokenizer_json_counts_first(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("changes", [{"model_type": "unigram"}, {"normalization_rule_name": "nmt_nfkc"}])
def test_models_that_change_the_text_or_are_no_bpe_are_refused(train_sentencepiece, tmp_path, changes):
    path = train_sentencepiece(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="only SentencePiece models of kind BPE"):
        read_sentencepiece(path)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\x0a\x01\xff", b"\x0b"]
)
def test_a_damaged_file_is_refused(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match="no SentencePiece model"):
        Tokenizer.load(tmp_path)
