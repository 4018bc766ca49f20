"""Prompts: random words of about so many tokens, or the lines of a JSONL file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .plan import Messages, Text

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education foot boy age policy music process sense "
    "nation plan college interest death experience effect use class control field development role effort rate "
    "heart drug show leader light voice wife police mind price report decision son view relation town road arm "
    "difference value building action season society tax director position player record paper space ground form "
    "event official matter center couple site project activity star table need court American oil situation cost "
    "industry figure street image phone data picture practice piece land product doctor wall patient worker news "
    "test movie north love step support technology"
)
WORDS = _COMMON.split()
"""Common English words: with the space before it nearly each is one token of the usual vocabularies."""


class DatasetError(ValueError):
    """The file is no data set; the message names the line."""


@dataclass(frozen=True)
class WordCount:
    """Tokens as a line over words: what a server counted of two probes."""

    offset: float = 0.0
    slope: float = 1.0

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> WordCount:
        """Of two (words, tokens)."""
        (words, tokens), (more_words, more_tokens) = first, second
        slope = (more_tokens - tokens) / (more_words - words)
        if slope <= 0:
            return cls()
        return cls(tokens - slope * words, slope)

    def words(self, tokens: int) -> int:
        """How many words make `tokens`; at least one."""
        return max(1, round((tokens - self.offset) / self.slope))


def words(count: int, draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def as_prompt(text: str, chat: bool) -> str | Messages:
    return [{"role": "user", "content": text}] if chat else text


def random_texts(count: int, max_tokens: int, chat: bool) -> Callable[[random.Random], Iterator[Text]]:
    """Endless prompts of `count` words that no two share a beginning, so that no prefix cache helps by accident."""
    return lambda draw: (Text(as_prompt(words(count, draw), chat), max_tokens) for _ in itertools.count())


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None
    adapter: str | None = None


def dataset(path: Path, max_tokens: int, chat: bool) -> Callable[[random.Random], Iterator[Text]]:
    """The file's lines in order, round and round.

    Each is an object with `prompt` or `messages`, and where it likes `max_tokens` (or `output_tokens`) and
    `adapter`. Raises `DatasetError`, OSError.
    """
    texts = [
        _text(line, number, path, max_tokens, chat)
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if line.strip()
    ]
    if not texts:
        raise DatasetError(f"{path} has no lines")
    return lambda draw: itertools.cycle(texts)


def _text(data: bytes, number: int, path: Path, max_tokens: int, chat: bool) -> Text:
    try:
        line = msgspec.json.decode(data, type=_Line)
    except msgspec.MsgspecError as error:
        raise DatasetError(f"{path}, line {number}: {error}") from error
    if (line.prompt is None) == (line.messages is None):
        raise DatasetError(f"{path}, line {number}: give either prompt or messages")
    if line.messages is not None and not chat:
        raise DatasetError(f"{path}, line {number}: messages need --endpoint chat")
    given = line.max_tokens if line.max_tokens is not None else line.output_tokens
    prompt = line.messages if line.messages is not None else as_prompt(line.prompt or "", chat)
    return Text(prompt, max_tokens if given is None else given, line.adapter)
