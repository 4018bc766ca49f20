"""Find the first of several stop strings in a text that grows. Control code: no torch.

The result does not depend on how the text arrives: it is the match that begins first in the whole text (of
several beginning there, the shortest), as a search of the finished text would find it. So a match is not
final while another stop string that began before it may still be completed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """A stop string found: its place in the text, in characters, and which one it is."""

    start: int
    end: int
    stop: str


class StopMatcher:
    """Searches one text, at a constant cost per character and stop string (Knuth, Morris, Pratt)."""

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops`: none of them empty."""
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._length = 0
        self._finished = False
        self._best: Match | None = None
        self.match: Match | None = None
        """The final result, once there is one; nothing may be fed after that."""

    @property
    def safe_length(self) -> int:
        """So many characters from the beginning are certainly not part of the match, whatever follows."""
        if self.match is not None:
            return self.match.start
        if self._finished or not self._automata:
            return self._length
        starts = [self._length - automaton.state for automaton in self._automata]
        if self._best is not None:
            starts.append(self._best.start)
        return min(starts, default=self._length)

    def feed(self, text: str, counts: bool = True) -> None:
        """Append `text`. A match that ends in a text with `counts` false is passed over."""
        if not self._automata:
            self._length += len(text)
            return
        for character in text:
            self._length += 1
            for automaton in self._automata:
                if automaton.step(character) and counts:
                    self._consider(automaton.stop)
            if self._best is not None and self._is_final(self._best):
                self.match = self._best
                return

    def finish(self) -> None:
        """Nothing follows: a match found so far is final."""
        self.match = self.match or self._best
        self._finished = True

    def _consider(self, stop: str) -> None:
        start = self._length - len(stop)
        if self._best is None or start < self._best.start:
            self._best = Match(start, self._length, stop)

    def _is_final(self, best: Match) -> bool:
        return all(self._length - automaton.state >= best.start for automaton in self._automata)


class _Automaton:
    """How much of one stop string the text ends with.

    The failure table is built as far as the text has ever matched, so a long stop string costs nothing by
    itself.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        """Length of the longest proper beginning of `stop` that the text ends with."""
        self._failure: list[int] = []
        """Entry i: the longest proper beginning of `stop` that its first i + 1 characters end with."""

    def step(self, character: str) -> bool:
        """Go on by one character; true where the whole stop string ends here."""
        stop, state = self.stop, self.state
        while state and stop[state] != character:
            state = self._failure[state - 1]
        if stop[state] == character:
            state += 1
            if state > len(self._failure):
                self._extend()
        if state == len(stop):
            self.state = self._failure[state - 1]
            return True
        self.state = state
        return False

    def _extend(self) -> None:
        done = len(self._failure)
        length = self._failure[done - 1] if done else 0
        while length and self.stop[length] != self.stop[done]:
            length = self._failure[length - 1]
        if done and self.stop[length] == self.stop[done]:
            length += 1
        self._failure.append(length)
