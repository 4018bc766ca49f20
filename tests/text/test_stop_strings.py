"""Stop strings: the match that begins first in the whole text, however the text arrives."""

from __future__ import annotations

from itertools import pairwise

from heddle.core.text.stop_strings import StopMatcher
from hypothesis import given, settings
from hypothesis import strategies as st


def first_match(text: str, stops: list[str]) -> int | None:
    """The oracle: where a search of the finished text finds the first of them."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def run(pieces: list[str], stops: list[str]) -> tuple[str, StopMatcher]:
    """What is handed out piece by piece, checked to be never more than what is safe."""
    matcher, text, sent = StopMatcher(stops), "", ""
    for piece in pieces:
        matcher.feed(piece)
        text += piece
        assert matcher.safe_length >= len(sent)
        sent = text[: matcher.safe_length]
        if matcher.match:
            return sent, matcher
    matcher.finish()
    return text[: matcher.safe_length], matcher


small = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(small, max_size=4),
    cuts=st.lists(st.integers(0, 30)),
)
def test_the_result_is_that_of_searching_the_whole_text(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    sent, matcher = run(pieces, stops)
    where = first_match(text, stops)
    assert sent == (text if where is None else text[:where])
    assert (matcher.match is None) == (where is None)
    if matcher.match:
        assert text[matcher.match.start : matcher.match.end] == matcher.match.stop


def test_a_near_miss_is_released_whole():
    matcher = StopMatcher(["DEFGHIJ"])
    matcher.feed("ABCDEFGHI")
    assert matcher.safe_length == 3
    matcher.feed("X")
    assert matcher.safe_length == 10
    assert matcher.match is None


def test_a_stop_string_that_began_earlier_is_waited_for():
    matcher = StopMatcher(["DEFGHIJ", "FG"])
    matcher.feed("ABCDEFG")
    assert matcher.match is None
    assert matcher.safe_length == 3
    matcher.feed("HIJ")
    assert matcher.match is not None
    assert matcher.match.stop == "DEFGHIJ"


def test_the_inner_stop_string_counts_when_the_outer_one_fails():
    for rest in ("HIX", ""):
        sent, matcher = run([*"ABCDEFG", *rest], ["DEFGHIJ", "FG"])
        assert sent == "ABCDE"
        assert matcher.match.stop == "FG"


def test_a_long_stop_string_needs_memory_only_for_what_has_matched():
    matcher = StopMatcher(["x" * 1_000_000])
    matcher.feed("xxxx")
    assert sum(len(automaton._failure) for automaton in matcher._automata) == 4


def test_a_match_that_does_not_count_is_passed_over():
    matcher = StopMatcher(["aa"])
    matcher.feed("aa", counts=False)
    assert matcher.match is None
    matcher.feed("a")
    assert matcher.match is not None
    assert (matcher.match.start, matcher.match.end) == (1, 3)
