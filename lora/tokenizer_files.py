"""What an adapter's folder says about text otherwise than the base does. No torch.

Policy: the base's tokenizer, special tokens and chat template always apply, to chats, completions and token counts
alike. Training tools save copies of them beside an adapter, so only what differs is worth a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .base import BaseModel
from .errors import AdapterInvalid

OTHER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Tokenizer and template files that are compared, and ignored."""
COMPARED = 24 << 20
"""Bytes of a file that is looked into; a longer one is only named."""
_SHOWN = 3
T = TypeVar("T")
_ID = re.compile(rb'(?<!\\)"\s*:\s*(\d{1,18})\s*[,}]')


class _Token(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    """Of tokenizer.json only this much is decoded, whatever its size."""

    added_tokens: list[_Token] = []
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)

    def last_id(self) -> int:
        """The highest id, -1 where there is none."""
        inside = max((int(found[1]) for found in _ID.finditer(memoryview(self.model.vocab))), default=-1)
        return max(inside, max((token.id for token in self.added_tokens), default=-1))


class _Config(msgspec.Struct):
    """Of tokenizer_config.json what decides on a prompt's text and its end."""

    chat_template: Any = None
    bos_token: Any = None
    eos_token: Any = None


def differences(folder: Path, base: BaseModel) -> list[str]:
    """Notes on what the adapter's files in `folder` would have changed.

    Raises AdapterInvalid where its tokenizer has more tokens than the base has rows.
    """
    home = None if base.folder is None else Path(base.folder)
    own = [name for name in OTHER_FILES if (folder / name).is_file() and not _same(folder, home, name)]
    if not own:
        return []
    notes = [*_tokens(folder, home, base)]
    if home is not None:
        notes += [*_template(folder, home), *_ends(folder, home)]
        own = [name for name in own if name.startswith("tokenizer.")]
    if not notes and own:
        notes.append(f"the base's tokenizer and chat template are used; ignored: {', '.join(own)}")
    return notes


def _same(folder: Path, home: Path | None, name: str) -> bool:
    if home is None:
        return False
    other = home / name
    if not other.is_file() or other.stat().st_size != (folder / name).stat().st_size:
        return False
    with (folder / name).open("rb") as own, other.open("rb") as theirs:
        while chunk := own.read(1 << 20):
            if chunk != theirs.read(1 << 20):
                return False
    return True


def _template(folder: Path, home: Path) -> Iterator[str]:
    where, own = _chat_template(folder)
    if own is None:
        return
    _, theirs = _chat_template(home)
    if theirs is None:
        yield f"its own chat template ({where}) is ignored; the base has none, so chats are refused"
    elif own != theirs:
        yield f"its own chat template ({where}) differs and is ignored: chats are written with the base's"


def _chat_template(folder: Path) -> tuple[str, object]:
    """The file that holds the folder's template, and the template; None where it has none."""
    text = _read(folder / "chat_template.jinja")
    if text is not None:
        return "chat_template.jinja", text.decode(errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        config = _decode(folder / name, _Config)
        if config is not None and config.chat_template is not None:
            return name, config.chat_template
    return "", None


def _tokens(folder: Path, home: Path | None, base: BaseModel) -> Iterator[str]:
    own = _decode(folder / "tokenizer.json", _Tokenizer)
    if own is None:
        return
    theirs = None if home is None else _decode(home / "tokenizer.json", _Tokenizer)
    theirs = theirs or _Tokenizer()
    last = own.last_id()
    if last >= base.vocab_size and last > theirs.last_id():
        raise AdapterInvalid(
            f"tokenizer.json has ids up to {last}, which takes {last + 1} rows, and the base has "
            f"{base.vocab_size}: a grown vocabulary is not served"
        )
    if home is None:
        return
    known = {token.content: token.id for token in theirs.added_tokens}
    strange = [token for token in own.added_tokens if known.get(token.content) != token.id]
    words = msgspec.json.decode(theirs.model.vocab) if strange else None
    if isinstance(words, dict):  # a base may have as a word what others add
        strange = [token for token in strange if words.get(token.content) != token.id]
    if strange:
        shown = ", ".join(f"{token.content[:40]!r} as {token.id}" for token in strange[:_SHOWN])
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        yield f"its own tokenizer adds {shown}{more}: the base's tokenizer is used, and does not know them so"


def _ends(folder: Path, home: Path) -> Iterator[str]:
    own, theirs = (_decode(place / "tokenizer_config.json", _Config) for place in (folder, home))
    if own is None or theirs is None:
        return
    for name in ("bos_token", "eos_token"):
        mine, base = _content(getattr(own, name)), _content(getattr(theirs, name))
        if mine is not None and mine != base:
            yield f"its own {name} {mine[:40]!r} is ignored: the base's is {base!r}"


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _decode(path: Path, kind: type[T]) -> T | None:
    """None for a file that is not there, too large, or not what it should be."""
    text = _read(path)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _read(path: Path) -> bytes | None:
    if not path.is_file() or path.stat().st_size > COMPARED:
        return None
    return path.read_bytes()
