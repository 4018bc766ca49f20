"""Read a SentencePiece `tokenizer.model` into a `tokenizers` tokenizer.

The file is one protocol buffer (sentencepiece's `sentencepiece_model.proto`), of which a few fields are
needed, so its wire format is read here: fields of (number, wire type) with varints, fixed widths, and bytes
that may be messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError
from .sentencepiece_bpe import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, sentencepiece_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BPE = 2
"""`TrainerSpec.model_type`; 1, the default, is unigram."""


@dataclass(frozen=True)
class SentencePieceModel:
    """The tokenizer (it adds no special tokens to a text), and the names of its special tokens."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, `unk_token`, as far as the vocabulary has them."""


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The tokenizer in `path`, as LLaMA's first two generations ship it.

    Raises `CheckpointError` for a damaged file and for models of another kind than BPE without text
    normalisation.
    """
    from tokenizers import AddedToken

    try:
        pieces, trainer, normalizer = _read(path.read_bytes())
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no SentencePiece model: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not pieces:
        raise CheckpointError(f"{path} is no SentencePiece model: it has no pieces")
    if trainer.get(3) != BPE or normalizer.get(2) or normalizer.get(4, 1):
        raise CheckpointError(
            f"{path}: only SentencePiece models of kind BPE that leave the text as it is can be read from "
            "tokenizer.model; save the tokenizer with transformers, which writes tokenizer.json"
        )
    tokenizer = sentencepiece_bpe(pieces, add_prefix_space=bool(normalizer.get(3, 1)))
    for piece in pieces:
        if piece.type in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.type == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=False)])
    special = {}
    for name, field, default in (("unk_token", 40, 0), ("bos_token", 41, 1), ("eos_token", 42, 2)):
        index = int(trainer.get(field, default))
        if 0 <= index < len(pieces):
            special[name] = pieces[index].text
    return SentencePieceModel(tokenizer, special)


def _read(data: bytes) -> tuple[list[Piece], dict[int, int], dict[int, int]]:
    """The pieces; and TrainerSpec and NormalizerSpec by field number: integers, or the length of bytes."""
    pieces: list[Piece] = []
    specs: dict[int, dict[int, int]] = {2: {}, 3: {}}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif number in specs and isinstance(value, bytes):
            specs[number] = {
                field: _signed(content) if isinstance(content, int) else len(content)
                for field, content in _fields(value)
            }
    return pieces, specs[2], specs[3]


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: varints as numbers, everything else as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise IndexError(f"wire type {wire_type} at byte {position}")
        if position + length > len(data):
            raise IndexError(f"a field ends beyond the file, at byte {position}")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _signed(value: int) -> int:
    """Protocol buffers write a negative integer as its 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value
