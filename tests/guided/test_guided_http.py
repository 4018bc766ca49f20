"""The fields that say what an answer must be: all of OpenAI's and vLLM's, one at a time, within written limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heddle.core.text.grammar import MAX_CHOICES, MAX_SOURCE_BYTES, Grammar

from .conftest import refusal

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": FORMAT}, Grammar.json(PERSON)),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            Grammar.json_object(),
        ),
        ({"guided_json": PERSON}, Grammar.json(PERSON)),
        ({"guided_json": json.dumps(PERSON)}, Grammar.json(PERSON)),
        ({"guided_json": {}}, Grammar.json({})),
        ({"guided_regex": "a+b"}, Grammar.regex("a+b")),
        ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"structured_outputs": {"json": PERSON}}, Grammar.json(PERSON)),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, Grammar.json(PERSON)),
        ({"structured_outputs": {"regex": "a+b", "json": None}}, Grammar.regex("a+b")),
        ({"structured_outputs": {"choice": ["x"], "disable_fallback": True}}, Grammar.choice(["x"])),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar.regex("a")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_field_becomes_a_grammar_of_all_its_sequences(server, fields, grammar):
    for answer in (server.complete(n=2, **fields), server.chat(n=2, **fields)):
        assert answer.status_code == 200, answer.text
    assert [command.params.grammar for command in server.engine.commands] == [grammar] * 4


DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}

BROKEN: list[tuple[dict[str, Any], str]] = [
    # several at once
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    # nothing, or what is not served
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"unknown": 1}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": 1}}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    # wrong kinds
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": "false"}, "guided_json"),
    ({"guided_json": '{"a":' * 20_000}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    # beyond the limits
    ({"guided_choice": ["x"] * (MAX_CHOICES + 1)}, "guided_choice"),
    ({"guided_choice": ["x" * MAX_SOURCE_BYTES, "y"]}, "guided_choice"),
    ({"guided_regex": "a" * (MAX_SOURCE_BYTES + 1)}, "guided_regex"),
    ({"guided_json": {"description": "x" * MAX_SOURCE_BYTES}}, "guided_json"),
    ({"guided_json": DEEP}, "guided_json"),
    # not what it should be
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a{2,1}"}, "guided_regex"),
    ({"guided_regex": r"(a)\1"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex"),
    ({"guided_json": {"type": "strng"}}, "guided_json"),
    ({"guided_json": {"$ref": "https://example.org/schema.json"}}, "guided_json"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json"),
    ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": {"type": "object", "required": ["a"], "properties": {"a": False}}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), BROKEN, ids=lambda value: str(value)[:70])
def test_what_cannot_be_obeyed_is_refused_by_name(server, fields, param):
    message = refusal(server.complete(**fields), param)
    assert len(message) < 500
    assert not server.engine.commands
    assert server.complete(guided_regex="a").status_code == 200


def test_fields_that_exclude_each_other_are_both_named(server):
    message = refusal(server.complete(guided_regex="a", guided_choice=["a"]), "guided_choice")
    assert "guided_regex" in message


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependencies": {"a": ["b"]}},
        {"propertyNames": {"pattern": "a"}},
        {"unevaluatedProperties": False},
        {"$dynamicRef": "#x"},
        {"items": [{}], "additionalItems": False},
        {"extends": {}},
        {"x-guidance": {"lenient": True}},
        {"minimum": 1, "exclusiveMinimum": True},
    ],
    ids=lambda schema: list(schema)[-1],
)
def test_keywords_that_cannot_be_enforced_are_refused_by_name(server, schema):
    nested = {"type": "object", "properties": {"extends": {"anyOf": [{"type": "null"}, schema]}}}
    word = {"then": "if"}.get(list(schema)[-1], list(schema)[-1])
    for asked in (schema, nested):
        assert word in refusal(server.complete(guided_json=asked), "guided_json")


@pytest.mark.parametrize(
    "cases", [[{"type": "number"}, {"type": "integer"}], [{"const": 1}, {"const": 2}]], ids=str
)
def test_cases_that_are_not_plainly_apart_are_refused_with_what_the_caller_can_do(server, cases):
    nested = {"type": "object", "properties": {"a": {"oneOf": cases}}}
    for schema in ({"oneOf": cases}, nested):
        message = refusal(server.complete(guided_json=schema), "guided_json")
        assert "'oneOf'" in message
        assert "'anyOf'" in message
        assert "coerce" not in message, "an option that no caller can set"
    # what the message says is obeyed is taken
    kinds = [{"required": ["k"], "type": "object", "properties": {"k": {"const": kind}}} for kind in "ab"]
    apart = ([{"type": "string"}, {"type": "integer"}], [{"enum": ["a"]}, {"enum": ["b", 1]}], kinds)
    for good in apart:
        assert server.complete(guided_json={"oneOf": good}).status_code == 200, good
    assert server.complete(guided_json={"anyOf": cases}).status_code == 200


def test_a_format_that_cannot_be_enforced_is_refused_by_name(server):
    assert "iri" in refusal(server.complete(guided_json={"type": "string", "format": "iri"}), "guided_json")


def test_the_engines_refusal_of_a_grammar_names_the_field(server):
    from heddle.core.messages import EngineError

    server.engine.refusal = EngineError("invalid_request", "the grammar cannot be followed", "grammar")
    refusal(server.complete(guided_regex="a+"), "guided_regex")
    refusal(server.chat(response_format={"type": "json_object"}), "response_format")
