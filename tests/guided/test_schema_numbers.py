"""What schemas say of numbers is decided as decimals: kept where it can be, else refused with what is wrong."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from heddle.core.text.grammar import LIMITS, Grammar, GrammarError, check_schema
from heddle.core.text.grammar_faults import reason
from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte")
NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}
Schema = dict[str, Any]


def matcher(schema: Schema) -> LLMatcher:
    """Raises `GrammarError` for what is refused."""
    made = LLMatcher(BYTES, Grammar.json(schema), log_level=0, limits=LIMITS)
    if made.is_error():
        raise GrammarError(reason(made.get_error()))
    return made


def accepted(made: LLMatcher, text: str) -> bool:
    one = made.deep_copy()
    return all(one.consume_token(token) for token in BYTES.tokenize_str(text)) and one.is_accepting()


def obeys(schema: Schema, value: Decimal) -> bool:
    """The standard's word on a number, by the decimals that the schema is written in."""
    words = {word: Decimal(repr(said)) for word, said in schema.items() if word != "type"}
    return (
        words.get("minimum", value) <= value <= words.get("maximum", value)
        and ("exclusiveMinimum" not in words or value > words["exclusiveMinimum"])
        and ("exclusiveMaximum" not in words or value < words["exclusiveMaximum"])
        and value % words.get("multipleOf", value or Decimal(1)) == 0
        and (schema["type"] == "number" or value % 1 == 0)
    )


def taken(made: LLMatcher, value: Decimal) -> bool:
    """Whether a number may be answered, in whatever way it is written: a bound or a step may ask for some zeros."""
    written = {f"{value:f}", f"{value.normalize():f}", *(f"{value:.{digits}f}" for digits in range(1, 5))}
    return any(accepted(made, text) for text in written if Decimal(text) == value)


EQUAL = [
    {**kind, "multipleOf": step, "minimum": value, "maximum": value}
    for kind, step, value in [
        *((NUMBER, 0.1, k / 10) for k in range(-9, 25)),
        *((NUMBER, 0.01, k / 100) for k in (7, 14, 28, 29, 55, 57, 58, 113, -7, -57)),
        *((NUMBER, 0.3, value) for value in (0.3, 0.9, 1.8, -2.1)),
        *((NUMBER, 0.2, value) for value in (0.6, 1.4, 0.4)),
        *((INTEGER, 3, value) for value in (3, 0, -6, 999)),
        *((INTEGER, 0.1, value) for value in (3, -7, 1)),
        (NUMBER, 0.1, 123456.3),
        (NUMBER, 0.07, 0.21),
        (NUMBER, 123.456, 246.912),
        (NUMBER, 0.001, 4.35),
    ]
]


@pytest.mark.parametrize("schema", EQUAL, ids=str)
def test_one_multiple_between_equal_bounds_is_what_is_answered(schema: Schema) -> None:
    made = matcher(schema)
    value, step = (Decimal(repr(schema[word])) for word in ("minimum", "multipleOf"))
    assert obeys(schema, value)
    assert accepted(made, f"{value:f}".removesuffix(".0")), "as people write it"
    for other in (index * step / 2 for index in range(-80, 81)):
        assert taken(made, other) == (other == value), other
    check_schema(schema)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_taken_is_what_the_decimals_say(seed: int) -> None:
    draws = Random(seed)
    scale = draws.choice([1, 10, 100])
    low = draws.randint(-25, 25)
    high = low + draws.choice([0, 1, 2, 3, 7])
    schema: Schema = dict(draws.choice([NUMBER, NUMBER, INTEGER]))
    schema[draws.choice(["minimum", "exclusiveMinimum"])] = low / scale
    schema[draws.choice(["maximum", "exclusiveMaximum"])] = high / scale
    if draws.random() < 0.8:
        schema["multipleOf"] = draws.choice([1, 3, 7, 12, 0.1, 0.2, 0.3, 0.7, 1.2, 0.01, 0.02, 0.03, 0.12])
    some = [Decimal(index) / 1000 for index in draws.sample(range(-26000, 26001), 200)]
    ends = [Decimal(end) / scale for end in (low, high)]
    values = {*some, *(end + Decimal(index) / 100 for end in ends for index in range(-30, 31))}
    try:
        made = matcher(schema)
    except GrammarError as error:
        refused = str(error)
    else:
        assert {value for value in values if taken(made, value)} == {v for v in values if obeys(schema, v)}
        return
    assert refused.startswith("nothing satisfies it: ")
    assert not [value for value in values if obeys(schema, value)]


@pytest.mark.parametrize(
    ("schema", "out", "inside"),
    [
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1", "1.0", "1.51"], ["1.01", "1.5", "1.000001"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0", "0.0", "0.5"], ["0.01", "0.49"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["0", "-0", "-0.0", "-0.51"], ["-0.01", "-0.5"]),
        ({"exclusiveMaximum": -2, "minimum": -2.25}, ["-2", "-2.0", "-2.26"], ["-2.01", "-2.25"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.1}, ["0", "0.0"], ["0.1", "0.5"]),
    ],
)
def test_a_whole_number_that_is_excluded_is_not_taken(
    schema: Schema, out: list[str], inside: list[str]
) -> None:
    for asked in (
        NUMBER | schema,
        {"allOf": [NUMBER, schema]},
        {**schema, "anyOf": [{"type": "null"}, NUMBER]},
    ):
        made = matcher(asked)
        assert [text for text in inside if not accepted(made, text)] == []
        assert [text for text in out if accepted(made, text)] == []


POINT_THREE = {"minimum": 0.3, "maximum": 0.3}
TENTHS = {"multipleOf": 0.1}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [TENTHS, POINT_THREE]},
        {"allOf": [{"allOf": [TENTHS]}, {"type": "number"}], **POINT_THREE},
        {"anyOf": [POINT_THREE, {"type": "null"}], **TENTHS},
        {"anyOf": [TENTHS, {"type": "null"}], **POINT_THREE},
        {"oneOf": [NUMBER | TENTHS, {"type": "null"}], **POINT_THREE},
        {"allOf": [{"anyOf": [NUMBER | TENTHS, {"type": "null"}]}, POINT_THREE]},
        {"const": 0.3, **TENTHS},
        {"enum": [0.3, 0.35, None], **TENTHS},
        {"allOf": [{"enum": [0.3, 0.35]}, TENTHS]},
        {"allOf": [{"multipleOf": 0.2}, {"multipleOf": 0.3}, {"minimum": 0.6, "maximum": 0.6}]},
        {"allOf": [{"multipleOf": 70000.1}, {"multipleOf": 0.7}], "minimum": 1, "maximum": 500000},
    ],
    ids=str,
)
def test_what_several_parts_say_of_one_number_counts_together(schema: Schema) -> None:
    """They say so as if it stood side by side."""
    parts = [schema, *schema.get("allOf", [])]
    steps = [Decimal(repr(part["multipleOf"])) for part in parts if "multipleOf" in part]
    made = matcher(schema)
    if len(steps) == 2 and steps[0] > 1:
        assert accepted(made, "490000.7")
        assert not accepted(made, "70000.1")
        return
    value = "0.6" if len(steps) == 2 else "0.3"
    assert accepted(made, value)
    for text in itertools.chain(("0.35", "0.2", "0.4", "0.29"), {"0.3", "0.6"} - {value}):
        assert not accepted(made, text), text


REFUSED: list[tuple[Schema, str]] = [
    ({**NUMBER, "minimum": 5, "maximum": 4}, "the schema's minimum 5 is above its maximum 4"),
    (
        {**NUMBER, "exclusiveMinimum": 0.3, "maximum": 0.3},
        "between the schema's exclusiveMinimum 0.3 and its maximum 0.3 there is no number",
    ),
    (
        {**INTEGER, "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        "there is no whole number within the schema's bounds",
    ),
    ({**INTEGER, "minimum": 3.2, "maximum": 3.7}, "there is no whole number within the schema's bounds"),
    (
        {**NUMBER, "multipleOf": 0.1, "minimum": 0.31, "maximum": 0.39},
        "there is no multiple of 0.1 within the schema's bounds",
    ),
    (
        {**NUMBER, "multipleOf": 0.1, "exclusiveMinimum": 0.2, "exclusiveMaximum": 0.3},
        "there is no multiple of 0.1 within the schema's bounds",
    ),
    ({**INTEGER, "multipleOf": 3, "minimum": 4, "maximum": 5}, "there is no multiple of 3 within the schema's bounds"),
    (
        {**INTEGER, "multipleOf": 1.1, "minimum": 1, "maximum": 10},
        "there is no multiple of 11 within the schema's bounds",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=str)
def test_what_no_number_satisfies_is_refused_with_the_reason(schema: Schema, why: str) -> None:
    for make in (matcher, check_schema):
        with pytest.raises(GrammarError) as refused:
            make(schema)
        assert str(refused.value) == f"nothing satisfies it: {why}"
    other = {"anyOf": [schema, {"type": "null"}]}
    assert accepted(matcher(other), "null")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {"multipleOf": 123.456},
            "'multipleOf' 123.456 is not supported: the grammar library cannot express it",
        ),
        (
            {"exclusiveMinimum": 0, "maximum": 5e-324},
            "bounds are not supported for numbers of so many digits",
        ),
        ({"multipleOf": 0.07}, "'multipleOf' 0.07 is not supported: the grammar library cannot express it"),
        (
            {"multipleOf": 10**12},
            "'multipleOf' 1e+12 is not supported: the grammar library cannot express it",
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": NUMBER | TENTHS}, **POINT_THREE},
            "numbers are not supported where they come from $ref or several of anyOf, oneOf, enum and const together",
        ),
        (
            {"anyOf": [NUMBER | TENTHS], "oneOf": [NUMBER | POINT_THREE]},
            "numbers are not supported where they come from $ref or several of anyOf, oneOf, enum and const together",
        ),
        (
            {
                "properties": {
                    "a": {"anyOf": [NUMBER, {"type": "null"}], **TENTHS},
                    "b": {"$ref": "#/properties/a/anyOf/0"},
                }
            },
            "numbers are not supported beside a $ref into one of its alternatives",
        ),
    ],
)
def test_what_the_library_cannot_decide_is_refused_saying_so(schema: Schema, why: str) -> None:
    with pytest.raises(GrammarError) as refused:
        matcher(schema)
    assert str(refused.value) == f"the schema's {why}"
    check_schema(schema)  # as a tool's parameters that nothing enforces it is fine


@pytest.mark.parametrize("step", [0, -1, -0.5])
def test_a_step_is_above_zero(step: float) -> None:
    for make in (matcher, check_schema):
        with pytest.raises(GrammarError) as refused:
            make({"properties": {"a": {"multipleOf": step}}})
        assert str(refused.value) == "the schema's keyword 'multipleOf' must be above 0"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"age": {"$ref": "#/$defs/age", "minimum": 3}}, "$defs": {"age": INTEGER | {"maximum": 9}}},
        {"items": {"anyOf": [NUMBER | {"minimum": 0}, {"type": "null"}]}},
        {"properties": {"a": True, "b": False, "c": {"minimum": "x"}, "d": {"enum": [1, True, "a"]}}},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": NUMBER | TENTHS}},
    ],
)  # fmt: skip
def test_what_needs_nothing_is_left_as_it_is(schema: Schema) -> None:
    text = Grammar.json(schema)
    assert json.dumps(schema)[1:-1] in text or json.dumps(schema)[1:-1] in json.dumps(json.loads(text))[1:-1]


def test_a_reference_into_an_alternative_is_served_beside_numbers_of_others() -> None:
    kind = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [kind, {"type": "null"}]},
            "b": {"$ref": "#/properties/a/anyOf/0"},
            "p": {"type": "integer", "minimum": 1, "exclusiveMinimum": 0},
        },
        "required": ["a", "b", "p"],
        "additionalProperties": False,
    }
    made = matcher(schema)
    assert accepted(made, '{"a": null, "b": {"x": "y"}, "p": 1}')
    assert not accepted(made, '{"a": null, "b": {"x": "y"}, "p": 0}')


@pytest.mark.parametrize("values", [{"enum": [1, 2, 3]}, {"const": 3}])
def test_listed_values_that_the_bounds_rule_out_are_refused_with_the_reason(values: Schema) -> None:
    with pytest.raises(GrammarError, match="nothing satisfies it") as refused:
        matcher({**values, "minimum": 7})
    assert "enum or const" in str(refused.value)
