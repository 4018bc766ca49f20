"""The text that quantisation measures activations on, cut into pieces of tokens. No torch."""

from __future__ import annotations

from pathlib import Path

from ..model.json_file import ModelError
from ..text.tokenizer import Tokenizer

PACKAGED = Path(__file__).with_name("calibration.txt")
"""Our own text (`calibration_text.py` says how it was made)."""

FEWEST_TOKENS = 1024
"""Below this, what is measured says little about any other text."""


def read_text(path: Path | None = None) -> str:
    """The text in `path`, the packaged one by default; ModelError where it cannot be read or is empty."""
    path = PACKAGED if path is None else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration text {path}: cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ModelError(f"calibration text {path} is empty")
    return text


def pieces(text: str, tokenizer: Tokenizer, samples: int, length: int) -> list[list[int]]:
    """At most `samples` pieces of `length` tokens, spread evenly over the text.

    Each begins with the begin token where the tokenizer puts one before a text. ModelError for a text too short
    to say anything: less than `FEWEST_TOKENS`, or than the pieces asked for if these are fewer tokens yet.
    """
    tokens = tokenizer.encode(text)
    begin = tokens[:1] if tokens[:1] == [tokenizer.bos_token_id] else []
    body, step = tokens[len(begin) :], length - len(begin)
    needed = min(FEWEST_TOKENS, samples * length)
    if len(body) < max(needed, step):
        raise ModelError(
            f"the calibration text is too short: {len(body)} tokens, and at least {max(needed, step)} are needed"
        )
    whole = len(body) // step
    count = min(samples, whole)
    starts = [index * whole // count * step for index in range(count)]
    return [begin + body[start : start + step] for start in starts]
