"""Tokens to text, one at a time, with the same result as decoding them all at once. Control code: no torch.

For tokens t1, t2, … after a prompt p the text is decode(p + t) without decode(p), as the `tokenizers` package
decodes with special tokens left out. A decoder takes tokens with `push` and hands out one piece of text a
token, in order, as soon as no later token can change it; `flush` ends the text. Every token is handled once,
so n tokens cost O(n).

Three kinds of vocabulary need three ways of knowing when a piece is final:

| class | vocabulary | a piece waits |
|---|---|---|
| ByteLevelDecoder | byte-level BPE: tokens are bytes | for one token, where it ends within a character |
| PieceDecoder | SentencePiece: tokens are text or one byte | where it is a byte, until the run of them ends |
| WindowDecoder | any other | while the text ends in a replacement character, for a few tokens |

In a run of byte tokens that is no UTF-8 as a whole, `tokenizers` turns every byte into a replacement
character. That is why a PieceDecoder waits for the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
HELD_TOKENS = 8
"""A WindowDecoder's patience: no character has more byte tokens."""
SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""The first bytes of characters after which not every continuation is allowed."""
CONTEXT_TOKENS = 4
"""Tokens that a WindowDecoder decodes again in front of new ones, for the space between them."""


class TextDecoder(Protocol):
    """One sequence's text as it grows; not shared between threads."""

    def push(self, token_id: int) -> list[str]:
        """The pieces that have become final, in their tokens' order; "" for a token that adds nothing."""

    def flush(self) -> list[str]:
        """The pieces of all tokens still waiting. The text ends: an unfinished character becomes U+FFFD."""


class ByteLevelDecoder:
    """Tokens are bytes of UTF-8; what is no UTF-8 becomes U+FFFD, one for each longest faulty beginning."""

    def __init__(self, token_bytes: Callable[[int], bytes], prompt: Sequence[int]) -> None:
        """`token_bytes`: b"" for tokens that are left out of texts."""
        self._token_bytes = token_bytes
        tail = b""
        for token_id in reversed(prompt):
            tail = token_bytes(token_id) + tail
            if len(tail) >= 3:  # a character begun but not ended has at most three bytes
                break
        self._begun = tail[len(tail) - _unfinished(tail[-3:]) :]
        self._begun_in_prompt = bool(self._begun)
        self._waiting: list[str] = []  # the piece of a token that ends within a character

    def push(self, token_id: int) -> list[str]:
        data = self._begun + self._token_bytes(token_id)
        if not self._begun and data.isascii():  # nearly always
            return [data.decode()]
        whole = len(data) - _unfinished(data[-3:])
        self._begun = data[whole:]
        pieces = [*self._waiting, self._text(data[:whole])]
        self._waiting = [pieces.pop()] if self._begun else []
        return pieces

    def flush(self) -> list[str]:
        rest, self._begun = self._text(self._begun), b""
        pieces, self._waiting = [piece + rest for piece in self._waiting], []
        return pieces

    def _text(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        if text and self._begun_in_prompt:
            self._begun_in_prompt = False
            # The prompt's text already shows the character it leaves unfinished as one replacement.
            return text.removeprefix(REPLACEMENT)
        return text


@dataclass(frozen=True)
class PieceRules:
    """How a SentencePiece vocabulary becomes text."""

    replacements: tuple[tuple[str, str], ...]
    """(pattern, text) applied to every piece in order, such as ("▁", " ")."""
    byte_fallback: bool
    strip_char: str = ""
    """Stripped from the beginning of the whole text (prompt included), `strip_count` times at most."""
    strip_count: int = 0

    def piece(self, token: str) -> str | bytes:
        """The text of a token, or its byte."""
        for pattern, text in self.replacements:
            token = token.replace(pattern, text)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token
        return token


class PieceDecoder:
    """Tokens are text, or single bytes whose runs are UTF-8."""

    def __init__(
        self, rules: PieceRules, piece: Callable[[int], str | bytes | None], prompt: Sequence[int]
    ) -> None:
        """`piece`: None for tokens that are left out of texts."""
        self._piece = piece
        self._strip = (rules.strip_char, rules.strip_count)
        for token_id in prompt:
            value = piece(token_id)
            if value and self._stripped(value if isinstance(value, str) else value.decode(errors="replace")):
                break
        run: list[bytes] = []
        for token_id in reversed(prompt):
            value = piece(token_id)
            if isinstance(value, str):
                break
            run.append(value or b"")
        self._run = bytearray(b"".join(reversed(run)))
        self._prompt_run = len(self._run)
        self._waiting: list[int] = []  # for each waiting token the length of the run after it

    def push(self, token_id: int) -> list[str]:
        value = self._piece(token_id)
        if isinstance(value, str):
            return [*self.flush(), self._stripped(value)]
        if value is None and not self._waiting:
            return [""]
        self._run += value or b""
        self._waiting.append(len(self._run))
        return []

    def flush(self) -> list[str]:
        ends, self._waiting = self._waiting, []
        run, self._run = bytes(self._run), bytearray()
        start, self._prompt_run = self._prompt_run, 0
        pieces = []
        if not _is_utf8(run):
            for end in ends:
                pieces.append(self._stripped(REPLACEMENT * (end - start)))
                start = end
            return pieces
        start -= _unfinished(run[max(0, start - 3) : start])  # begun in the prompt, shown with what ends it
        for end in ends:
            whole = end - _unfinished(run[max(0, end - 3) : end])
            pieces.append(self._stripped(run[start:whole].decode()))
            start = whole
        return pieces

    def _stripped(self, text: str) -> str:
        char, count = self._strip
        if count and text:
            while count and text.startswith(char):
                text, count = text[len(char) :], count - 1
            self._strip = (char, 0 if text else count)
        return text


class WindowDecoder:
    """Any vocabulary: new tokens are decoded behind a few earlier ones, whose text is then taken off."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool], prompt: Sequence[int]
    ) -> None:
        """`is_text`: false for tokens that are left out of texts."""
        self._decode = decode
        self._is_text = is_text
        self._context: list[int] = []
        for token_id in reversed(prompt):
            if is_text(token_id):
                self._context.insert(0, token_id)
                if len(self._context) == CONTEXT_TOKENS:
                    break
        self._held: list[int] = []

    def push(self, token_id: int) -> list[str]:
        if not self._is_text(token_id) and not self._held:
            return [""]
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < HELD_TOKENS:
            return []
        return self._take(text)

    def flush(self) -> list[str]:
        return self._take(self._new_text()) if self._held else []

    def _new_text(self) -> str:
        known = self._decode(self._context)
        text = self._decode(self._context + self._held)
        return text[len(known) :] if text.startswith(known) else self._decode(self._held)

    def _take(self, text: str) -> list[str]:
        pieces = [""] * (len(self._held) - 1) + [text]
        self._context = [*self._context, *filter(self._is_text, self._held)][-CONTEXT_TOKENS:]
        self._held = []
        return pieces


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unfinished(data: bytes) -> int:
    """How many of the last bytes (at most three are given) begin a character of UTF-8 that may still be
    completed (Unicode's table of well-formed byte sequences).
    """
    for length in range(1, len(data) + 1):
        lead = data[-length]
        if lead < 0x80:
            return 0
        if lead < 0xC0:
            continue
        needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if length >= needed or not 0xC2 <= lead <= 0xF4:
            return 0
        low, high = SECOND_BYTES.get(lead, (0x80, 0xBF))
        return length if length == 1 or low <= data[1 - length] <= high else 0
    return 0


def piece_rules(decoder: dict[str, Any] | None) -> PieceRules | None:
    """The rules of a `tokenizers` decoder (its JSON) where it is SentencePiece's usual one, else None."""
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback"
    if byte_fallback:
        steps.pop(0)
    if not steps or steps.pop(0)["type"] != "Fuse":
        return None
    if not steps:
        return PieceRules(tuple(replacements), byte_fallback)
    step = steps.pop(0)
    if step["type"] != "Strip" or step["stop"] or steps:
        return None
    return PieceRules(tuple(replacements), byte_fallback, step["content"], step["start"])


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether a `tokenizers` decoder (its JSON) is that of byte-level BPE."""
    if decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder is not None and decoder["type"] == "ByteLevel"
