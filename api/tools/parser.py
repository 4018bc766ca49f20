"""Tells tool calls from text in an answer that grows; in one piece or in many, the result is the same."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from .formats import ToolFormat
from .json_scanner import ValueScanner

_HEAD = re.compile(r'[\[,\s]*\{\s*"name":\s*"([^"\\]+)",\s*"(?:arguments|parameters)":\s*(?=\{)')
"""A call up to its arguments, as a grammar has it written."""
_BLANK = re.compile(r"\s")
LONGEST_HEAD = 256
"""Characters between an opener and the mark behind a name; where there are more, they are none."""


@dataclass
class Call:
    """One call so far."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class CallPiece:
    """What is new of a call: its beginning, or more of its arguments."""

    index: int
    begins: Call | None
    arguments: str


@dataclass
class Parsed:
    """What has become certain."""

    text: str = ""
    pieces: list[CallPiece] = field(default_factory=list)

    def add(self, later: Parsed) -> None:
        self.text += later.text
        self.pieces += later.pieces


class ToolParser:
    """Of one answer.

    A call counts when all of it is there and can be read: until then it is held back, and what turns out to be
    none is text, to the letter. Only space around calls is dropped. Where a grammar sees to it that every call
    can be read (`sure`), its arguments are handed out as they come, and an answer that is cut short leaves them
    cut short.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, many: bool, sure: bool) -> None:
        """`names`: of the functions that may be called. `many`: more than one call may be made."""
        self.calls: list[Call] = []
        self._format = format
        self._names = names
        self._many = many
        self._sure = sure
        self._held = ""  # not decided yet
        self._before = ""  # in front of it; text after all where no call follows
        self._space = ""  # at the end of the text; dropped where a call follows
        self._state = self._in_text if format.opener else self._at_value
        self._name: str | None = None  # where it does not stand in the value
        self._scanner = ValueScanner()
        self._scanned = 0
        self._parsed = Parsed()

    @property
    def full(self) -> bool:
        """The one call that may be made has been, and nothing else keeps the model from going on."""
        return bool(self.calls) and not self._many and not self._sure

    def feed(self, text: str) -> Parsed:
        self._held += text
        self._parsed = Parsed()
        while self._held and not self.full and self._state():
            pass
        return self._parsed

    def finish(self) -> Parsed:
        """The answer is over."""
        parsed = self._parsed = Parsed()
        if self.full:
            return parsed
        rest = self._held.strip()
        if self._state in (self._at_name, self._at_value, self._in_value, self._at_head):
            self._no_call(len(self._held))
        elif self._state == self._in_text or (
            self._state == self._after_call and not self._format.closer.startswith(rest)
        ):
            self._say(self._held)
        self._held = ""
        if not self.calls:
            parsed.text += self._space
        return parsed

    # ---------------------------------------------------------------- states: true where there is more to do

    def _in_text(self) -> bool:
        opener, held = self._format.opener, self._held
        place = held.find(opener) if opener else -1
        if place >= 0:
            self._say(held[:place])
            self._before, self._held = opener, held[place + len(opener) :]
            self._state = self._at_name if self._format.named else self._at_value
            return True
        kept = _overlap(held, opener)
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]
        return False

    def _at_name(self) -> bool:
        """Behind the opener, where a name and the mark behind it must follow."""
        named, held = self._format.named, self._held
        head, mark, _ = held.partition(named)
        name = (head if mark else head[: len(head) - _overlap(head, named)]).strip()
        possible = len(head) <= LONGEST_HEAD and not _BLANK.search(name)
        if possible and not mark:
            return False
        if self._format.call_id:
            name = name.partition(self._format.call_id)[0]
        if not possible or name not in self._names:
            return self._no_call(0)
        self._name = name
        self._skip(len(head) + len(mark))
        self._state = self._at_value
        return True

    def _at_value(self) -> bool:
        """Where a JSON value must begin for a call to follow."""
        body, prefix = self._held.lstrip(), self._format.prefix
        if not body:
            return False
        if prefix and prefix not in self._before:
            if body.startswith(prefix):
                self._skip(self._held.index(prefix) + len(prefix))
                return True
            if prefix.startswith(body):
                return False
        if body[0] not in "{[":
            return self._no_call(0)
        self._skip(len(self._held) - len(body))
        self._scanner, self._scanned = ValueScanner(), 0
        if not self._sure:
            self._state = self._in_value
        elif self._name is None:
            self._state = self._at_head
        else:
            self._begin(self._name)
            self._state = self._in_arguments
        return True

    def _in_value(self) -> bool:
        end = self._scanner.feed(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return False
        end += self._scanned
        calls = self._format.read(self._held[:end], self._names, self._name)
        if calls is None:
            return self._no_call(end)
        for name, arguments in calls if self._many else calls[:1]:
            self._begin(name)
            self._add(arguments)
        self._held = self._held[end:]
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        body, closer, separator = self._held.lstrip(), self._format.closer, self._format.separator
        if any(mark != body and mark.startswith(body) for mark in (closer, separator)):
            return False
        self._state = self._in_text
        if closer and body.startswith(closer):
            self._held = body[len(closer) :]
        elif separator and body.startswith(separator):
            self._skip(self._held.index(separator) + len(separator))
            self._state = self._at_value
        return True

    # of a call that a grammar has written

    def _at_head(self) -> bool:
        head = _HEAD.match(self._held)
        if head is None:
            return False
        self._begin(head[1])
        self._held = self._held[head.end() :]
        self._scanner = ValueScanner()
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        end = self._scanner.feed(self._held)
        piece = self._held[:end]
        self._add(piece)
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self._state = self._at_end if self._name is None else self._after_call
        return True

    def _at_end(self) -> bool:
        """Behind the arguments: the end of the call's object, and in a list the next one or the end."""
        body = self._held.lstrip()
        if not body:
            return False
        if body[0] == ",":
            self._state = self._at_head
        elif body[0] in "}]":
            self._held = body[1:]
        else:
            self._state = self._after_call
        return True

    # ---------------------------------------------------------------- what comes of it

    def _say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._parsed.text += said
        self._space = text[len(said) :]

    def _skip(self, length: int) -> None:
        self._before += self._held[:length]
        self._held = self._held[length:]

    def _no_call(self, length: int) -> bool:
        """What stands before, and so much of what is held, is text."""
        self._say(self._before + self._held[:length])
        self._before, self._held = "", self._held[length:]
        self._state = self._in_text
        return True

    def _begin(self, name: str) -> None:
        self._before = self._space = ""
        self.calls.append(Call(self._format.new_id(), name))
        self._parsed.pieces.append(CallPiece(len(self.calls) - 1, self.calls[-1], ""))

    def _add(self, arguments: str) -> None:
        self.calls[-1].arguments += arguments
        self._parsed.pieces.append(CallPiece(len(self.calls) - 1, None, arguments))


def parse(
    text: str, format: ToolFormat, names: Collection[str], *, many: bool = True
) -> tuple[str, list[Call]]:
    """Text and calls of a whole answer that no grammar has guided."""
    parser = ToolParser(format, names, many=many, sure=False)
    said = parser.feed(text).text
    return said + parser.finish().text, parser.calls


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
