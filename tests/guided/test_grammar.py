"""Grammars by themselves: what they let through, how they are spaced, and which vocabularies they guide."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import jsonschema
import numpy as np
import pytest
from heddle.core.engine.grammars import Guide
from heddle.core.text.grammar import Grammar, GrammarCompiler, GrammarError
from heddle.core.text.tokenizer import Tokenizer

from .conftest import END_IDS, VOCAB, Walk, accepts

SCHEMAS: dict[str, dict[str, Any]] = {
    "strings": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 12},
    "numbers": {"type": "number", "exclusiveMinimum": -2.5, "maximum": 17},
    "integers": {"type": "integer", "minimum": -3, "exclusiveMaximum": 1000, "multipleOf": 7},
    "enum": {"enum": ["a", 1, None, True, {"x": [1, 2]}, "größe 😀"]},
    "const": {"const": {"deep": ["a", {"b": 1.5}]}},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": 1}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "further": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": {"enum": [1, 2]},
        "maxProperties": 3,
        "required": ["a"],
    },
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 5, "maximum": 9}]},
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"k": {"const": "a"}},
                "required": ["k"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"k": {"const": "b"}},
                "required": ["k"],
                "additionalProperties": False,
            },
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "recursion": {
        "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 2}},
        "$ref": "#/$defs/list",
    },
    "types": {"type": ["null", "boolean"]},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_schema_lets_through_is_valid(walk: Walk, name: str) -> None:
    schema = SCHEMAS[name]
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = [text for seed in range(30) if (text := walk(Grammar.json(schema), seed)) is not None]
    assert len(texts) >= 15
    for text in texts:
        checker.validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strings", '"größ"'),
        ("numbers", "-1.25"),
        ("integers", "994"),
        ("enum", '{"x": [1, 2]}'),
        ("array", "[1, 2,3]"),
        ("object", '{"b": "x", "c": null}'),
        ("further", '{"a": true, "other": 2}'),
        ("one of", '{\n  "k": "b"\n}'),
        ("recursion", "[[[], []], [[[]]]]"),
    ],
)
def test_valid_json_is_let_through(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, value: str
) -> None:
    assert accepts(compiler, tokenizer, Grammar.json(SCHEMAS[name]), value)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a":1}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": [\n    1,\n    2\n  ]\n}', True),
        ('{ "a" : 1 }', True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ('{"a":\t1}', False),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
        ('{"a": 1}\n', False),
        ('{"a":\n' + " " * 32 + "1}", True),
        ('{"a":\n' + " " * 33 + "1}", False),
        ("[1]", False),
    ],
)
def test_space_between_the_parts_of_json_is_bounded(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, good: bool
) -> None:
    assert accepts(compiler, tokenizer, Grammar.json_object(), text) == good


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{2,4}",
        r"^ab+$",
        "a|bc|",
        "(?i)yes|no",
        r"[^a-z ]{1,3}",
        r"\p{Lu}{2}",
        "a?b{2}c*d",
        r"x\$",
        "^a|b$",
        r"a/b\.c",
    ],
)
def test_whatever_a_pattern_lets_through_matches_it(walk: Walk, pattern: str) -> None:
    texts = [text for seed in range(20) if (text := walk(Grammar.regex(pattern), seed)) is not None]
    assert texts
    for text in texts:
        if pattern == r"\p{Lu}{2}":  # which Python's own `re` does not know
            assert [unicodedata.category(character) for character in text] == ["Lu", "Lu"]
        else:
            assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "pattern", [r"\d{3}", r"[\d]{3}", r"[^\D]{3}", r"[a\d]{3}", r"[\]\d]{3}", r"[]\d]{3}", r"(\d|x){3}"]
)
def test_a_digit_is_one_of_ten(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = Grammar.regex(pattern)
    assert accepts(compiler, tokenizer, grammar, "123")
    assert not accepts(compiler, tokenizer, grammar, "\u0661\u0662\u0663"), "of other scripts"


@pytest.mark.parametrize("pattern", [r"\D{3}", r"[\D]{3}", r"[^\d]{3}"])
def test_whatever_else_is_no_digit(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = Grammar.regex(pattern)
    assert accepts(compiler, tokenizer, grammar, "\u0661ab")
    assert not accepts(compiler, tokenizer, grammar, "1ab")


def test_an_escaped_backslash_before_a_d_is_no_digit(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    assert accepts(compiler, tokenizer, Grammar.regex(r"\\d"), "\\d")


def test_texts_never_hold_special_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    guide = Guide(compiler.compile(Grammar.regex("(.|\n)*")), VOCAB)
    allowed = set(np.flatnonzero(guide.allowed([])).tolist())
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
    assert allowed & special == set(END_IDS)
    assert max(allowed) < tokenizer.vocab_size, "rows that are no token"


def test_a_vocabulary_that_is_not_joined_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(GrammarError, match="not simply joined"):
        GrammarCompiler(Tokenizer(backend, {}, None), 2, [1])


def test_a_model_without_an_end_token_ends_where_its_grammar_can_only_end(tokenizer: Tokenizer) -> None:
    guide = Guide(GrammarCompiler(tokenizer, VOCAB, []).compile(Grammar.choice(["ab"])), VOCAB)
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    for index, token in enumerate(tokens):
        assert guide.allowed(tokens[:index])[token]
        assert guide.take(token) == (index + 1 == len(tokens))


def test_a_guide_finds_its_place_from_any_number_of_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    start = compiler.compile(Grammar.json(SCHEMAS["object"]))
    tokens = tokenizer.encode('{"a": true, "b": "y"}', add_special_tokens=False)
    step_by_step = Guide(start, VOCAB)
    for count in range(len(tokens)):
        expected = step_by_step.allowed(tokens[:count])
        assert (Guide(start, VOCAB).allowed(tokens[:count]) == expected).all()
        step_by_step.take(tokens[count])
