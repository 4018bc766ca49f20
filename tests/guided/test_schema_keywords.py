"""Every keyword of JSON schemas is obeyed, an annotation, or refused by its name: none is passed over in silence."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import jsonschema_specifications
import pytest
from heddle.core.text.grammar import Grammar, GrammarCompiler, GrammarError, check_schema
from heddle.core.text.grammar_faults import reason
from heddle.core.text.tokenizer import Tokenizer

from .conftest import Walk, accepts

NULL, BOOL = {"type": "null"}, {"type": "boolean"}
OBJECT, ARRAY, STRING = {"type": "object"}, {"type": "array"}, {"type": "string"}
HIDDEN = '{"\\u0061": 1}'
"""The property "a", spelled as JSON allows too."""

OBEYED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    # keyword: a schema with it, texts that obey it, texts that do not
    "type": ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "true", "[]", "{}"]),
    "enum": ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2", "true"]),
    "const": ({"const": {"a": [1]}}, ['{"a": [1]}'], ['{"a": [2]}', "{}"]),
    "minLength": ({**STRING, "minLength": 2}, ['"ab"', '"\\n\\t"', '"世界"'], ['"a"', '""', '"世"']),
    "maxLength": ({**STRING, "maxLength": 2}, ['"ab"', '"世界"', '""'], ['"abc"', '"世界世"']),
    "pattern": ({**STRING, "pattern": "b[0-9]", "maxLength": 6}, ['"ab1c"', '"b0"'], ['"ab"', '"b"', '""']),
    "format": ({**STRING, "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"x"', '"1.2.3"']),
    "minimum": ({"type": "number", "minimum": -1.5}, ["-1.5", "0", "7"], ["-1.6", "-2", "-10"]),
    "maximum": ({"type": "integer", "maximum": 12}, ["12", "-5"], ["13", "100", "1e2"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3", "-9"]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, ["2.9"], ["3", "3.0", "4"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["14", "0", "-7"], ["13", "15"]),
    "minItems": ({**ARRAY, "minItems": 2}, ["[1, 2]", "[1, 2, 3]"], ["[1]", "[]"]),
    "maxItems": ({**ARRAY, "maxItems": 1}, ["[1]", "[]"], ["[1, 2]"]),
    "items": ({**ARRAY, "items": NULL}, ["[]", "[null, null]"], ["[1]", "[null, 1]"]),
    "prefixItems": (
        {**ARRAY, "prefixItems": [NULL, BOOL]},
        ["[null, true, 1]", "[null]"],
        ["[1]", "[null, 1]"],
    ),
    "properties": (
        {**OBJECT, "properties": {"a": NULL}},
        ['{"a": null, "b": 1}', "{}"],
        ['{"a": 1}', HIDDEN],
    ),
    "required": (
        {**OBJECT, "properties": {"a": NULL}, "required": ["a", "b"]},
        ['{"a": null, "b": 1}'],
        ["{}", '{"a": null}'],
    ),
    "additionalProperties": (
        {**OBJECT, "properties": {"a": NULL}, "additionalProperties": BOOL},
        ['{"a": null, "b": true}', '{"b": false}'],
        ['{"b": 1}', '{"a": true}', '{"a": null, "a": true}', '{"\\u0061": true}'],
    ),
    "patternProperties": (
        {**OBJECT, "patternProperties": {"^a": NULL}, "additionalProperties": BOOL},
        ['{"ab": null, "b": true}'],
        ['{"ab": true}', '{"b": null}', '{"\\u0061": true}'],
    ),
    "minProperties": (
        {**OBJECT, "required": ["a"], "minProperties": 2},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1}', '{"a": 1, "a": 2}', '{"a": 1, "\\u0061": 2}'],
    ),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 1}']),
    "anyOf": ({"anyOf": [NULL, {"type": "integer", "minimum": 5}]}, ["null", "5"], ["4", "true"]),
    "oneOf": ({"oneOf": [NULL, {"type": "string", "maxLength": 1}]}, ["null", '"a"'], ['"ab"', "1"]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
    "$ref": ({"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": STRING}}, ['"a"'], ['"ab"', "1"]),
    "$anchor": ({"$ref": "#s", "$defs": {"s": {"$anchor": "s", **NULL}}}, ["null"], ["1"]),
    "$id": ({"$ref": "http://x/s", "$defs": {"s": {"$id": "http://x/s", **NULL}}}, ["null"], ["1"]),
    "$defs": (
        {"$ref": "#/$defs/a", "$defs": {"a": {**ARRAY, "items": {"$ref": "#/$defs/a"}}}},
        ["[[], [[]]]"],
        ["[1]"],
    ),
}
OLDER = {
    "definitions": ({"$ref": "#/definitions/n", "definitions": {"n": NULL}}, ["null"], ["1"]),
    "items as a list": ({**ARRAY, "items": [NULL, BOOL]}, ["[null, true, 1]"], ["[true]", "[null, 1]"]),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "not": {}, "if": {}, "then": {}, "else": {}, "contains": {}, "minContains": 1, "maxContains": 1,
    "uniqueItems": True, "propertyNames": {}, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {}},
    "unevaluatedItems": False, "unevaluatedProperties": False, "$dynamicRef": "#", "$dynamicAnchor": "x",
    # of older drafts
    "dependencies": {"a": ["b"]}, "additionalItems": False, "extends": {}, "disallow": "string", "divisibleBy": 2,
    "$recursiveRef": "#", "$recursiveAnchor": True,
}  # fmt: skip
ANNOTATIONS: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "$vocabulary": {}, "$comment": "x", "title": "x",
    "description": "x", "default": 1, "deprecated": True, "readOnly": True, "writeOnly": True, "examples": [1],
    "contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {"type": "null"},
}  # fmt: skip
"""The standard has it that they say nothing of what is valid."""


def test_no_keyword_of_the_standard_is_missing_here() -> None:
    base = "https://json-schema.org/draft/2020-12/"
    rooms = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
    known = {
        word
        for room in rooms
        for word in jsonschema_specifications.REGISTRY[f"{base}meta/{room}"].contents["properties"]
    }
    told = [*OBEYED, *REFUSED, *ANNOTATIONS]
    assert known <= set(told)
    assert len(set(told)) == len(told), "each is one of the three"


@pytest.mark.parametrize("keyword", [*OBEYED, *OLDER])
def test_a_keyword_is_obeyed_to_the_letter(
    compiler: GrammarCompiler, tokenizer: Tokenizer, walk: Walk, keyword: str
) -> None:
    schema, good, bad = (OBEYED | OLDER)[keyword]
    draft = jsonschema.Draft7Validator if keyword == "items as a list" else jsonschema.Draft202012Validator
    judge = draft(schema, format_checker=draft.FORMAT_CHECKER)
    for text in good:
        judge.validate(json.loads(text))
        assert accepts(compiler, tokenizer, Grammar.json(schema), text), text
    for text in bad:
        assert not judge.is_valid(json.loads(text)), "the standard's word on it"
        assert not accepts(compiler, tokenizer, Grammar.json(schema), text), text
    texts = [text for seed in range(8) if (text := walk(Grammar.json(schema), seed)) is not None]
    assert texts
    for text in texts:
        judge.validate(json.loads(text))


def refusal(compiler: GrammarCompiler, schema: dict[str, Any]) -> str:
    with pytest.raises(GrammarError) as refused:
        compiler.compile(Grammar.json(schema))
    return str(refused.value)


LARGE = [2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**63 + 1, 10**40, 1e30, 123456789.12345679, 0.1 + 0.2]


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "multipleOf"])
def test_a_number_that_would_become_another_is_refused(
    compiler: GrammarCompiler, keyword: str, number: float
) -> None:
    value = [1, {"a": number}] if keyword == "enum" else number
    for schema in ({keyword: value}, {"properties": {"x": {"type": "number", keyword: value}}}):
        message = f"the schema's keyword {keyword!r} is not supported for numbers of so many digits"
        assert refusal(compiler, schema) == message


@pytest.mark.parametrize(
    "number", [0, True, -1, 2**53, -(2**53), 1.5, 0.1, 123456789.123456, 1e-9, 9007199254740991]
)
def test_other_numbers_are_kept(walk: Walk, number: float) -> None:
    (text,) = {walk(Grammar.json({"const": number}), seed) for seed in range(3)}
    assert text is not None
    assert json.loads(text) == number


def test_the_largest_integer_of_64_bits_is_a_bound(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar.json({"type": "integer", "maximum": 2**63 - 1})
    assert accepts(compiler, tokenizer, grammar, str(2**63 - 1))
    assert not accepts(compiler, tokenizer, grammar, str(2**63))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("const", "a\0b"),
        ("enum", ["a", ["\0"]]),
        ("pattern", "^a\0$"),
        ("pattern", r"^a\x00$"),
        ("pattern", r"\u{0}"),
    ],
)
def test_nul_in_a_text_is_refused(compiler: GrammarCompiler, keyword: str, value: Any) -> None:
    message = f"the schema's keyword {keyword!r} is not supported for texts with NUL"
    assert refusal(compiler, {keyword: value}) == message


def test_a_backslash_before_a_zero_is_no_nul(walk: Walk) -> None:
    assert walk(Grammar.json({"type": "string", "pattern": r"^a\\0$"}), 0) == json.dumps("a\\0")


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_cannot_be_obeyed_is_refused_by_its_name(
    compiler: GrammarCompiler, keyword: str
) -> None:
    schema = {keyword: REFUSED[keyword]}
    for asked in (schema, {"properties": {"x": {"anyOf": [NULL, schema]}}}):
        assert refusal(compiler, asked) == f"the schema's keyword {keyword!r} is not supported"


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_an_annotation_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer, keyword: str) -> None:
    grammar = Grammar.json({"type": "integer", keyword: ANNOTATIONS[keyword]})
    assert accepts(compiler, tokenizer, grammar, "12")
    assert not accepts(compiler, tokenizer, grammar, '"x"')


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"minProperties": 1}, True),
        ({"minProperties": 2}, False),
        ({"required": ["a", "b"], "minProperties": 3}, True),
        ({"required": ["a", "b", "b"], "minProperties": 4}, False),
        ({"required": ["a"], "minProperties": 3, "additionalProperties": NULL}, False),
        ({"patternProperties": {"^a": NULL}, "additionalProperties": False, "minProperties": 2}, False),
    ],
)
def test_so_many_properties_are_asked_for_only_where_none_can_be_the_same_twice(
    compiler: GrammarCompiler, walk: Walk, schema: dict[str, Any], good: bool
) -> None:
    schema = {"type": "object", **schema}
    if not good:
        assert "'minProperties'" in refusal(compiler, schema)
        return
    texts = [text for seed in range(60) if (text := walk(Grammar.json(schema), seed)) is not None]
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('"\\n\\t\\r\\b\\f\\"\\\\"', True),
        ('"é世😀/"', True),
        ('"\\u00e9"', False),
        ('"\\u0061"', False),
        ('"\\/"', False),
        ('"\\u0001"', False),
    ],
)
def test_no_character_is_spelled_two_ways(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, good: bool
) -> None:
    assert accepts(compiler, tokenizer, Grammar.json({"type": "string"}), text) == good


# ------------------------------------------------------------------ the words of refusals

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"format": "iri"}, "the schema's format 'iri' is not supported"),
    ({"type": ""}, "the schema's type '' is none of JSON's"),
    ({"type": "strng"}, "the schema's type 'strng' is none of JSON's"),
    ({"type": 1}, "the schema's keyword 'type' must be a text or a list of texts"),
    ({"enum": 1}, "the schema's keyword 'enum' must be a list"),
    ({"properties": 1}, "the schema's keyword 'properties' must be an object"),
    ({"required": 1}, "the schema's keyword 'required' must be a list, not 1"),
    ({**STRING, "minLength": "x"}, "the schema's keyword 'minLength' must be a whole number, 0 or more, not \"x\""),
    ({"type": "number", "minimum": "x"}, "the schema's keyword 'minimum' must be a number, not \"x\""),
    ({**STRING, "pattern": 1}, "the schema's keyword 'pattern' must be a text, not 1"),
    ({**ARRAY, "items": 1}, "each schema must be an object, true or false"),
    ({"type": "number", "multipleOf": 0}, "the schema's keyword 'multipleOf' must be above 0"),
    ({"$ref": 1}, "the schema's keyword '$ref' must be a text"),
    ({"$ref": "#/x"}, "the schema refers to '/x', which is not in it"),
    ({"$ref": "https://example.org/x"}, "the schema refers to 'https://example.org/x', which is not in it"),
    ({"$schema": "x", **NULL}, "the schema refers to 'x', which is not in it"),
    ({"$id": "::::", **NULL}, "the schema's '::::' is no reference"),
    ({"$ref": "#"}, "nothing satisfies it"),
    ({**STRING, "pattern": "("}, "the pattern is wrong: unclosed group"),
    ({**STRING, "const": 1}, "nothing satisfies it"),
    (
        {"enum": []},
        "nothing satisfies it: no value of the schema's enum or const, or no alternative, is allowed",
    ),
    ({**ARRAY, "minItems": 3, "maxItems": 2}, "nothing satisfies it: the schema's minItems 3 is above its maxItems 2"),
    (
        {**OBJECT, "required": ["a"], "additionalProperties": False},
        "nothing satisfies it: the required property 'a' can have no value",
    ),
    (
        {**OBJECT, "patternProperties": {"^a": {}, "b$": NULL}},
        "a name may match the schema's patternProperties '^a' and 'b$' both, which is not supported",
    ),
    (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "maxProperties": 1},
        "the schema's keywords 'minProperties' and 'maxProperties' are supported only where all its properties are "
        "required",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), FAULTS, ids=lambda value: str(value)[:60])
def test_what_is_wrong_with_a_schema_is_said_in_the_callers_terms(
    compiler: GrammarCompiler, schema: dict[str, Any], words: str
) -> None:
    assert refusal(compiler, schema) == words


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "the pattern is wrong: unclosed group"),
        ("a{2,1}", "the pattern is wrong: invalid repetition count range, the start must be <= the end"),
        (
            "(?=a)b",
            "the pattern is wrong: look-around, including look-ahead and look-behind, is not supported",
        ),
        (r"(a)\1", "the pattern is wrong: backreferences are not supported"),
        (r"\bfoo", "a pattern has ^, $ or \\b at its ends alone, and looks around nowhere"),
        ("a^b", "a pattern has ^, $ or \\b at its ends alone, and looks around nowhere"),
        (r"[^\s\S]", "nothing satisfies it"),
        ("\\", "the pattern ends with a backslash that stands before nothing"),
        ("a\\\\\\", "the pattern ends with a backslash that stands before nothing"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_said_in_the_callers_terms(
    compiler: GrammarCompiler, pattern: str, words: str
) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.compile(Grammar.regex(pattern))
    assert str(refused.value) == words


@pytest.mark.parametrize("word", ["anyOf", "allOf", "const", "enum", "examples"])
@pytest.mark.parametrize("depth", [102, 130, 400, 1200, 6000])
def test_a_schema_that_is_too_deep_is_said_to_be(word: str, depth: int) -> None:
    words = "the schema is nested more than 100 levels deep"
    schema: Any = {}
    for _ in range(depth // 2):
        schema = {word: [schema]}
    for make in (Grammar.json, check_schema):
        with pytest.raises(GrammarError) as refused:
            make(schema)
        assert str(refused.value) == words
    opening = json.dumps({word: [0]}).partition("0")[0]
    with pytest.raises(GrammarError) as refused:
        Grammar.json(opening * (depth // 2) + "{}" + "]}" * (depth // 2))
    assert str(refused.value) == words


def test_a_schema_as_deep_as_people_write_them_is_followed(compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(45):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    check_schema(schema)
    compiler.compile(Grammar.json(schema))


@pytest.mark.parametrize("text", ["x", "{", '"', '{"a": NaN}', '{"a": 1e999}', "[1] 2"])
def test_a_text_that_is_no_json_is_said_to_be_none(text: str) -> None:
    with pytest.raises(GrammarError) as refused:
        Grammar.json(text)
    assert str(refused.value) == "the schema's text is no JSON"


def test_a_fault_of_the_library_itself_is_a_refusal(compiler: GrammarCompiler) -> None:
    """It cuts long values in its messages, whether within a character or not."""
    schema = {"type": "string", "minLength": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 300}
    for make in (check_schema, lambda schema: compiler.compile(Grammar.json(schema))):
        with pytest.raises(GrammarError):
            make(schema)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("initial lexer configuration (grammar) too big (limit: 9)", "it is too complex to be followed"),
        ("LexerTooComplex\nfuel exhausted", "it is too complex to be followed"),
        ("thread panicked at parser/src/json/schema.rs:7", "no grammar can be made of it"),
        ("", "nothing satisfies it"),
    ],
)  # fmt: skip
def test_words_of_the_librarys_own_parts_reach_nobody(message: str, words: str) -> None:
    assert reason(message) == words
