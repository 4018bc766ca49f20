"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...core.messages import TokenLogprobs
from ...core.text.tokenizer import Tokenizer
from ..protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from ..protocol.completions import CompletionLogprobs

FLOOR = -9999.0
"""Stands for what is smaller, minus infinity included: JSON has no word for it."""


class Entry(msgspec.Struct, frozen=True):
    """One token of a prompt or an answer."""

    token_id: int
    offset: int
    """Characters of the choice's text before it."""
    logprobs: TokenLogprobs | None
    """None for a prompt's first token, which nothing predicts."""


def for_completion(entries: Sequence[Entry], tokenizer: Tokenizer) -> CompletionLogprobs:
    """`top_logprobs` holds the most likely tokens and the chosen one, also where it is not among them."""
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        token = tokenizer.token_text(entry.token_id)
        result.text_offset.append(entry.offset)
        result.tokens.append(token)
        if entry.logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        chosen = _finite(entry.logprobs.logprob)
        top: dict[str, float] = {}
        for token_id, logprob in entry.logprobs.top:
            top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
        top.setdefault(token, chosen)
        result.token_logprobs.append(chosen)
        result.top_logprobs.append(_written(top))
    return result


def for_chat(entries: Sequence[Entry], tokenizer: Tokenizer) -> ChatLogprobs:
    content = []
    for entry in entries:
        assert entry.logprobs is not None, "chat has no log-probabilities of prompts"
        top = [TopLogprob(*_token(id, logprob, tokenizer)) for id, logprob in entry.logprobs.top]
        token = TokenLogprob(*_token(entry.token_id, entry.logprobs.logprob, tokenizer), top)
        content.append(_written(token))
    return ChatLogprobs(content)


def prompt_offsets(text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each prompt token begins in `text`, in characters; one that is no part of it (bos) where it
    stands.
    """
    data = text.encode()
    offsets = []
    place = characters = 0  # bytes walked over, and characters that end in them
    for token_id in token_ids:
        offsets.append(characters)
        piece = tokenizer.token_bytes(token_id)
        if not data.startswith(piece, place):
            piece = piece.removeprefix(b" ")  # SentencePiece puts a space before a text that has none
            if not data.startswith(piece, place):
                continue
        # A character ends at a byte whose next one does not continue it.
        for end in range(place + 1, place + len(piece) + 1):
            characters += end == len(data) or data[end] & 0xC0 != 0x80
        place += len(piece)
    return offsets


def _written(value: object) -> Any:
    """In JSON, token by token: all of a long answer's, put into JSON in one go, would hold up the event loop."""
    return msgspec.Raw(msgspec.json.encode(value))


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token_id), _finite(logprob), list(tokenizer.token_bytes(token_id))


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # NaN too becomes the floor
