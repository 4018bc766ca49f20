"""One sequence's text as its tokens arrive, cut before a stop string. Control code: no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from ..sampling_params import SamplingParams
from .stop_strings import Match, StopMatcher
from .tokenizer import Tokenizer


class TokenText(NamedTuple):
    """Where one token stands in a text."""

    text: str
    """The characters it completes. A character belongs to the token that holds its last byte."""
    offset: int
    """Characters of the text before it."""


class TextDelta(msgspec.Struct, frozen=True):
    """What one `Detokenizer.add` made certain."""

    text: str
    """To be sent now."""
    stopped: str | None
    """The stop string that was found: the answer ends before it, and the engine has to be told."""
    tokens_used: int
    """Output tokens handed out so far, this delta's included: the first ones, whose text is out. At the end
    all of them, or with a stop string those up to the one that completes it; later ones are no part of the
    answer.
    """


class Detokenizer:
    """Turns one sequence's tokens into text that can be sent at once.

    The text is decode(prompt + output) without decode(prompt), special tokens left out, up to the first stop
    string. That is the one that begins first in the output (the prompt is not searched). Text that may turn
    out to be part of a stop string is held back. In one delta or in many, the text is the same. An answer
    that ends within a character ends in U+FFFD for it, as decoding all of its tokens does.

    A stop string counts only where the token that completes it comes after the first `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """`eos_token_ids`: the tokens besides `params.stop_token_ids` that may end the answer. `kept`: special
        tokens that are text in it."""
        self._decoder = tokenizer.text_decoder(prompt_token_ids, kept)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._end_token_ids = eos_token_ids.union(params.stop_token_ids)
        self._ended = False
        # One entry for each token whose text is known, sent or not; ends count characters from the text's
        # beginning.
        self._pieces: list[str] = []
        self._ends: list[int] = []
        self._length = 0
        self._sent: list[str] = []
        self._sent_length = 0
        self._unsent = ""
        self._tokens_used = 0

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._sent)

    def add(self, token_ids: Sequence[int], finished: bool, drop_last: bool = False) -> TextDelta:
        """Take new tokens; once `finished` or stopped there are no more.

        `drop_last`: the last one is an end or stop token that ended the answer; it counts as used but is no
        text.
        """
        assert not self._ended, "the answer has ended"
        if drop_last:
            assert token_ids[-1] in self._end_token_ids, f"{token_ids[-1]} ends no answer"
        for token_id in token_ids[:-1] if drop_last else token_ids:
            self._take(self._decoder.push(token_id))
            if self._match is not None:
                break
        else:
            if finished:
                self._finish(drop_last)
        return self._hand_out(finished)

    def token_texts(self, start: int = 0, stop: int | None = None) -> list[TokenText]:
        """Text and offset of the output tokens `start` to `stop` (up to the last `tokens_used`), for
        log-probabilities.

        Together they are `text`: what a token has beyond the beginning of a stop string is left out.
        """
        stop = self._tokens_used if stop is None else min(stop, self._tokens_used)
        result = []
        for index in range(start, stop):
            offset = min(self._ends[index] - len(self._pieces[index]), self._sent_length)
            result.append(TokenText(self._pieces[index][: self._sent_length - offset], offset))
        return result

    @property
    def _match(self) -> Match | None:
        return None if self._matcher is None else self._matcher.match

    def _take(self, pieces: list[str]) -> None:
        for piece in pieces:
            if self._match is not None:
                return
            self._pieces.append(piece)
            self._length += len(piece)
            self._ends.append(self._length)
            self._unsent += piece
            if self._matcher is not None:
                self._matcher.feed(piece, counts=len(self._pieces) > self._min_tokens)

    def _finish(self, drop_last: bool) -> None:
        self._take(self._decoder.flush())
        if self._matcher is not None:
            self._matcher.finish()
        if drop_last and self._match is None:
            self._take([""])

    def _hand_out(self, finished: bool) -> TextDelta:
        match = self._match
        certain = self._length if self._matcher is None else self._matcher.safe_length
        text = self._unsent[: certain - self._sent_length]
        self._unsent = self._unsent[len(text) :]
        self._sent_length += len(text)
        if text:
            self._sent.append(text)
        if match is not None:
            self._tokens_used = bisect_left(self._ends, match.end) + 1
        elif self._unsent:
            self._tokens_used = bisect_right(self._ends, self._sent_length, lo=self._tokens_used)
        else:
            self._tokens_used = len(self._ends)
        self._ended = finished or match is not None
        return TextDelta(text, None if match is None else match.stop, self._tokens_used)


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[TokenText]:
    """Text and offset of each token of a whole text, such as a prompt that is echoed."""
    decoder = tokenizer.text_decoder([])
    pieces = [piece for token_id in token_ids for piece in decoder.push(token_id)] + decoder.flush()
    ends = accumulate(map(len, pieces))
    return [TokenText(piece, end - len(piece)) for piece, end in zip(pieces, ends)]
