"""Grammars that an answer must obey: written from schemas, patterns and choices, compiled by llguidance.

Control code: no torch. A grammar travels as text, in llguidance's own notation; whoever needs it compiles it.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from .grammar_faults import OTHERWISE, reason
from .number_bounds import NumberFault, Unsupported
from .schema_numbers import settled
from .schema_words import unenforced
from .tokenizer import Tokenizer

T = TypeVar("T")

MAX_SOURCE_BYTES = 64 << 10
"""Of a schema, a pattern, or all choices together."""
MAX_DEPTH = 100
"""Of the lists and objects of a schema, one within the other: llguidance reads not many more."""
MAX_CHOICES = 1024
TRIED_TOKENS = 32
"""How far a grammar is followed before it is believed."""
JSON_OPTIONS = {
    # Matched at most once wherever JSON allows space: one blank, or a line break and its indentation.
    "whitespace_pattern": r"[ ]|\n[ ]{0,32}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
    # Nothing is spelled two ways: a property written as \u0061 would not be held to what is said of "a".
    "json_allowed_escapes": '"\\\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}

LIMITS = LLParserLimits(
    step_lexer_fuel=25_000,  # a mask takes 3 ms at most; what people write needs less than half of it
    max_lexer_states=10_000,  # 1 to 2 kB each, a sequence
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Beyond them a grammar is refused, or its sequence ends with an error."""

PANIC = "PanicException"
"""What llguidance raises where it finds a fault of its own, by name: the class is not to be imported."""
TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} levels deep"

STACK_BYTES = 512 << 20
"""llguidance follows references by recursion, and the longest chain in `MAX_SOURCE_BYTES` needs about a tenth of
this. Address space: only what is touched takes memory."""


class GrammarError(ValueError):
    """Not a grammar, or one that nothing satisfies, or that is beyond the limits; the message says which."""


class Grammar:
    """Ways to write a grammar, for `SamplingParams(grammar=...)`. All raise `GrammarError`."""

    @staticmethod
    def json(schema: Mapping[str, Any] | str) -> str:
        """JSON that obeys a JSON schema (Draft 2020-12), given as an object or as its JSON text.

        A keyword that cannot be enforced is refused by name. The properties of an object come in the schema's
        order. Between the parts there is at most one blank, or a line break with up to 32 blanks.
        """
        if isinstance(schema, str):
            _bounded(schema)
            try:
                schema = msgspec.json.decode(schema)
            except RecursionError as error:
                raise GrammarError(TOO_DEEP) from error
            except msgspec.DecodeError as error:
                raise GrammarError("the schema's text is no JSON") from error
        if not isinstance(schema, Mapping):
            raise GrammarError("the schema must be an object")
        return LLMatcher.grammar_from_json_schema(_spaced_schema(schema))

    @staticmethod
    def json_object() -> str:
        """Any JSON object."""
        return Grammar.json({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> str:
        r"""A text that `pattern` matches from beginning to end.

        The syntax is that of Rust's `regex`, without anchors within, looking around and back references; `\d`
        means 0 to 9.
        """
        _bounded(pattern)
        if _backslashes_at_end(pattern) % 2:
            raise GrammarError("the pattern ends with a backslash that stands before nothing")
        return LLMatcher.grammar_from_regex(_with_ascii_digits(_without_anchors(pattern)))

    @staticmethod
    def choice(texts: Sequence[str]) -> str:
        """One of `texts`, as it stands."""
        if isinstance(texts, str) or not 1 <= len(texts) <= MAX_CHOICES:
            raise GrammarError(f"choices must be a list of 1 to {MAX_CHOICES} texts")
        _bounded("".join(texts))
        return "start: CHOICE\nCHOICE: " + " | ".join(map(lark_text, texts))


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise `GrammarError` for what is no JSON schema. What could not be enforced is passed over, and so is a schema
    that says of numbers what could not."""
    schema_text(schema)
    try:
        text = json.dumps(settled(schema), ensure_ascii=False)
    except Unsupported:
        return
    except NumberFault as error:
        raise GrammarError(str(error)) from error
    grammar = LLMatcher.grammar_from_json_schema(text, overrides={"lenient": True})
    wrong = _on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, limits=LIMITS))
    if wrong and not wrong.startswith("WARNING"):
        raise GrammarError(reason(wrong))


def lark_text(text: str) -> str:
    """`text` as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def lark_json(schema: Mapping[str, Any]) -> str:
    """Inside a Lark grammar: JSON that obeys `schema`, under the rules of `Grammar.json`."""
    return "%json " + _spaced_schema(schema)


class GrammarCompiler:
    """Of one model's vocabulary. Takes a fraction of a second to make; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: the model's. Raises `GrammarError` for a vocabulary whose tokens are not just joined."""
        if not tokenizer.joins_tokens:
            raise GrammarError("the tokens of this model are not simply joined, so no grammar can guide them")
        # Without an end token an answer ends where its grammar can only end: an id beyond the model's stands in.
        ends = list(eos_token_ids) or [vocab_size]
        size = max(vocab_size, *(end + 1 for end in ends))
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, size, ends)),
            n_vocab=size,
            eos_token=ends,
        )

    def compile(self, grammar: str) -> LLMatcher:
        """At its beginning, with the first mask computed; copy it for each sequence. Raises `GrammarError`."""
        return _on_deep_stack(lambda: self._compile(grammar))

    def try_out(self, grammar: str) -> None:
        """Compile it and follow it a little way along tokens that it allows. Raises `GrammarError`."""
        _on_deep_stack(lambda: self._walk(self._compile(grammar)))

    def _walk(self, matcher: LLMatcher) -> None:
        draws = random.Random(0)
        for _ in range(TRIED_TOKENS):
            if matcher.is_stopped():
                break
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if mask:
                beyond = mask >> draws.randrange(mask.bit_length())
                lowest = beyond & -beyond
                matcher.consume_token(lowest.bit_length() - 1 + mask.bit_length() - beyond.bit_length())
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and not any(mask):
                raise GrammarError("nothing satisfies it")
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
        return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        special = {token for token in range(size) if tokenizer.is_special(token)}.union(ends)
        self.special_token_ids = sorted(special)
        ordinary = (token for token in range(size) if token not in special and self.tokens[token])
        self._ids = {self.tokens[token]: token for token in ordinary}
        self._longest = max(map(len, self._ids), default=0)
        self._encode = tokenizer.text_encoder()

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would write a text that the grammar leaves no choice about."""
        data = text if isinstance(text, bytes) else text.encode()
        tokens = self._encode(data.decode())
        # A tokenizer may put a blank before it, or have no way to spell it.
        return tokens if b"".join(self.tokens[token] for token in tokens) == data else self._spell(data)

    def _spell(self, data: bytes) -> list[int]:
        """The longest token first; up to a byte that there is no token for."""
        tokens: list[int] = []
        place = 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[data[place:end]])
            place = end
        return tokens


def _spaced_schema(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, with how its JSON is to be spaced."""
    if (fault := unenforced(schema)) is not None:
        raise GrammarError(fault)
    schema_text(schema)
    try:
        schema = settled(schema)
    except NumberFault as error:
        raise GrammarError(str(error)) from error
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def schema_text(schema: Mapping[str, Any]) -> str:
    """As JSON. Raises `GrammarError` for what is none, too large or too deep."""
    if _is_deeper(schema, MAX_DEPTH):
        raise GrammarError(TOO_DEEP)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    _bounded(text)
    return text


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie within each other for more levels than these."""
    waiting = [(value, 1)]
    while waiting:
        one, level = waiting.pop()
        if isinstance(one, Mapping | list):
            if level > levels:
                return True
            held = one.values() if isinstance(one, Mapping) else one
            waiting += [(inner, level + 1) for inner in held]
    return False


def _bounded(source: str) -> None:
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise GrammarError("it holds half of a surrogate pair, which is no character") from error
    if size > MAX_SOURCE_BYTES:
        raise GrammarError(f"it has {size} bytes, and at most {MAX_SOURCE_BYTES} are taken")


def _without_anchors(pattern: str) -> str:
    """The whole answer is matched anyway, so `^` at the beginning and `$` at the end say nothing new."""
    if "|" in pattern:
        return pattern  # they may belong to one alternative only
    pattern = pattern.removeprefix("^")
    escaped = _backslashes_at_end(pattern[:-1]) % 2 == 1
    return pattern[:-1] if pattern.endswith("$") and not escaped else pattern


def _with_ascii_digits(pattern: str) -> str:
    r"""`\d` and `\D` spelled out: to llguidance they are of all scripts, but in schemas."""
    parts, classes, place = [], 0, 0
    while place < len(pattern):
        part = pattern[place : place + 2] if pattern[place] == "\\" else pattern[place]
        if part == "[":
            classes += 1
            opening = re.compile(r"\[\^?\]?").match(pattern, place)  # a bracket that comes first is a member
            part = opening[0] if opening else part
        elif part == "]" and classes:
            classes -= 1
        place += len(part)
        if part == r"\d":
            part = "0-9" if classes else "[0-9]"
        elif part == r"\D":
            part = "[^0-9]"
        parts.append(part)
    return "".join(parts)


def _backslashes_at_end(text: str) -> int:
    return len(text) - len(text.rstrip("\\"))


_starting = threading.Lock()


def _on_deep_stack(function: Callable[[], T]) -> T:
    """Call it in a thread of its own with `STACK_BYTES` of stack."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _starting:  # the size is the process's setting for threads that start
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors and type(errors[0]).__name__ == PANIC:
        raise GrammarError(OTHERWISE) from errors[0]
    if errors:
        raise errors[0]
    return results[0]
