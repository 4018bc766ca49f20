"""Finds where a JSON value ends in a text that arrives in pieces, looking at each character once."""

from __future__ import annotations

import re

_MARKS = re.compile(r'["\\{}\[\]]')


class ValueScanner:
    """Of one object or list. It counts brackets outside of strings; whether the value is JSON is for who reads
    it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Go on with `text`; the place in it behind the value's last bracket, or None where that is yet to
        come."""
        position = 0
        if self._escaped and text:
            position, self._escaped = 1, False
        while (found := _MARKS.search(text, position)) is not None:
            mark, position = found[0], found.end()
            if self._quoted:
                if mark == "\\":
                    self._escaped = position == len(text)
                    position += 1
                elif mark == '"':
                    self._quoted = False
            elif mark == '"':
                self._quoted = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return None
