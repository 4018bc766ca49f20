"""A SentencePiece BPE vocabulary as a `tokenizers` tokenizer.

SentencePiece merges the adjacent pair whose joined piece has the best score; a `tokenizers` BPE model merges
the pair that stands first in a list. So the list is every way to cut a piece in two known pieces, by the
piece's score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"
"""SentencePiece writes a space as this character."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    type: int


def sentencepiece_bpe(pieces: list[Piece], *, add_prefix_space: bool) -> Tokenizer:
    """The tokenizer of `pieces`, without special tokens and without a begin-of-text token."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.type == UNKNOWN), None)
    model = models.BPE(
        vocab=vocab,
        merges=merges(pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(piece.type == BYTE for piece in pieces),
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), spaces] if add_prefix_space else [spaces]
    )
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if add_prefix_space else parts)
    return tokenizer


def merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece would merge them: best score first, then the longer left
    part.
    """
    usable = {piece.text for piece in pieces if piece.type in (NORMAL, USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for index, (text, score, kind) in enumerate(pieces):
        if kind != NORMAL:
            continue
        for cut in range(len(text) - 1, 0, -1):
            left, right = text[:cut], text[cut:]
            if left in usable and right in usable:
                found.append((-score, index, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
