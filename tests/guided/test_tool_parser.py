"""Tool calls in answers of every format, whole and in pieces; what is none stays text to the letter."""

from __future__ import annotations

import json

import pytest
from heddle.api.tools.formats import (
    FORMATS,
    Functions,
    Hermes,
    Llama,
    Mistral,
    MistralNamed,
    ToolFormat,
    format_in,
)
from heddle.api.tools.json_scanner import ValueScanner
from heddle.api.tools.parser import ToolParser, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import FUNCTIONS, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, NO_TOOLS, UNKNOWN

NAMES = frozenset({"f", "g"})
F, G = ("f", {"a": 1}), ("g", {})


def read(
    text: str, format: ToolFormat, size: int | None = None, many: bool = True, sure: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls, put together from the pieces that come of `size` characters at a time."""
    parser = ToolParser(format, NAMES, many=many, sure=sure)
    step = size or max(1, len(text))
    parts = [parser.feed(text[start : start + step]) for start in range(0, len(text), step)]
    parts.append(parser.finish())
    calls: list[list[str]] = []
    for piece in (piece for part in parts for piece in part.pieces):
        if piece.begins is not None:
            assert piece.index == len(calls)
            assert not piece.arguments, "the name comes first"
            calls.append([piece.begins.name, ""])
        calls[piece.index][1] += piece.arguments
    assert [(name, arguments) for name, arguments in calls] == [(c.name, c.arguments) for c in parser.calls]
    assert len({call.id for call in parser.calls}) == len(calls)
    return "".join(part.text for part in parts), [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("size", [None, 1, 2, 7])
@pytest.mark.parametrize(
    ("format", "answer", "text", "calls"),
    [
        (Hermes(), '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
        (Hermes(), '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
        (Hermes(), 'Wait.\n\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n', "Wait.", [G]),
        (
            Hermes(),
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "",
            [F, G],
        ),
        (
            Hermes(),
            '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
            "",
            [F, G],
        ),
        (Hermes(), '<tool_call>{"name": "g", "arguments": {}}</tool_call> and so on', " and so on", [G]),
        (Hermes(), '<tool_call>{"name": "g", "arguments": {}}', "", [G]),
        (Hermes(), '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", [G]),
        (
            Hermes(),
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}\\"{"}}</tool_call>',
            "",
            [("f", {"a": '</tool_call>}"{'})],
        ),
        (Llama(), '{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (Llama(), '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (
            Llama(),
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [F, G],
        ),
        (
            Mistral(),
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "",
            [F, G],
        ),
        (Mistral(), 'So: [TOOL_CALLS][{"name": "g", "arguments": {}, "id": "x"}]', "So:", [G]),
        (MistralNamed(), '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F]),
        (MistralNamed(), 'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "So:", [F, G]),
        (MistralNamed(), '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"a": 1}', "", [F]),
        (MistralNamed(), '[TOOL_CALLS] f [ARGS] {"a": 1} so', " so", [F]),
        (Functions(), '<function=f>{"a": 1}</function>', "", [F]),
        (Functions(), 'Hm. <function=f>{"a": 1}</function>\n<function=g>{}</function>', "Hm.", [F, G]),
        (Functions(), "<function=g>{}", "", [G]),
        (
            Functions(),
            '<function=f>{"a": "</function>}\\"{"}</function> end',
            " end",
            [("f", {"a": '</function>}"{'})],
        ),
    ],
)
def test_calls_are_found(format, answer, text, calls, size):
    said, found = read(answer, format, size)
    assert said == text
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (format, answer)
        for format, answers in {
            Hermes(): [
                "plain text, nothing else \n",
                "a <tool_call> that is none",
                "almost: <tool_cal",
                '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
                '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>\n',
                '<tool_call>{"name": "f"}</tool_call>',
                '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
                '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
                "<tool_call>[]</tool_call>",
                '  <tool_call>\n{"name": "f", "arguments": {"a": 1}',
                "<tool_call>",
                "",
                "<tool_call>" + '{"name": "f", "arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>",
            ],
            Llama(): [
                "plain text",
                '{"name": "Bob", "parameters": {}}',
                '{"answer": 42}',
                '{"name": "f", "parameters": {"a": 1',
                "<|python_tag|>print(1)",
                'As JSON: {"name": "f", "parameters": {}}',
                "  ",
            ],
            Mistral(): ["[TOOL_CALLS] f(1)", '[TOOL_CALLS] [{"name": "f", "arguments"', "[1, 2] [TOOL_"],
            MistralNamed(): [
                "[TOOL_CALLS] f(1)",
                '[TOOL_CALLS]unknown[ARGS]{"a": 1}',
                '[TOOL_CALLS]f[ARGS]{"a": 1',
                "[TOOL_CALLS]f[ARGS][1]",
                "[TOOL_CALLS]f[ARGS]",
                "[TOOL_CALLS]f[AR",
                "[TOOL_CALLS]" + "f" * 400,
                "[TOOL_CALLS]" + " " * 300 + "f[ARGS]{}",
                '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
            ],
            Functions(): [
                "<function=f(1)</function>",
                '<function=unknown>{"a": 1}</function>',
                "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
                '<function=f>{"a": }</function>',
                "if a <function=f and b> c",
                "<func",
            ],
        }.items()
        for answer in answers
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else value.name,
)
def test_what_is_no_call_stays_text_to_the_letter(format, answer, size):
    assert read(answer, format, size) == (answer, [])


def test_a_call_beside_one_that_does_not_parse_is_still_found():
    broken = '<tool_call>{"name": "f", "arguments": {</tool_call>'
    whole = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read(f"{whole} {broken}", Hermes()) == (f" {broken}", [("g", "{}")])


@pytest.mark.parametrize("size", [None, 1, 5])
def test_where_one_call_is_wanted_the_first_one_counts(size):
    one, two = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fg")
    assert read(one + two, Hermes(), size, many=False) == ("", [("f", "{}")])


SURE = {
    Hermes(): '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}\\""}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    Mistral(): '[TOOL_CALLS] [{"name": "f", "arguments": {"a": {"b": "}\\""}}}, {"name": "g", "arguments": {}}]',
    Llama(): '{"name": "f", "parameters": {"a": {"b": "}\\""}}}',
    MistralNamed(): '[TOOL_CALLS]f[ARGS]{"a": {"b": "}\\""}}[TOOL_CALLS]g[ARGS]{}',
    Functions(): '<function=f>{"a": {"b": "}\\""}}</function><function=g>{}</function>',
}


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("format", list(SURE), ids=lambda format: format.name)
def test_guided_calls_hand_out_their_arguments_as_they_come(format, size):
    answer = SURE[format]
    expected = [("f", '{"a": {"b": "}\\""}}'), ("g", "{}")][: 1 if format.name == "llama" else 2]
    assert read(answer, format, size, sure=True) == ("", expected)
    parser = ToolParser(format, NAMES, many=True, sure=True)
    parser.feed(answer[: answer.index('"b"')])
    assert parser.calls[0].arguments == '{"a": {', "long before the call is complete"


def test_a_guided_call_that_is_cut_short_keeps_what_there_was():
    answer = next(iter(SURE.values()))
    assert read(answer[: answer.index("}\\")], Hermes(), 3, sure=True) == ("", [("f", '{"a": {"b": "')])
    assert read(answer[:20], Hermes(), 3, sure=True) == (answer[:20], [])


@settings(deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                "[ARGS]",
                "[CALL_ID]",
                "<function=",
                "</function>",
                "f",
                ">",
                '{"name": "f", "arguments": {"a": "x"}}',
                '{"a": "x"}',
                '[{"name": "g", "parameters": {}}]',
                '{"name": "f"',
                "\n",
                " ",
                ";",
                "<tool",
                "text",
                '"',
                "{",
                "}",
            ]
        ),
        max_size=8,
    ),
    st.booleans(),
    st.integers(1, 9),
)
def test_a_stream_and_a_whole_answer_agree(format, parts, many, size):
    answer = "".join(parts)
    assert read(answer, format, size, many) == read(answer, format, None, many)


@settings(deadline=None, max_examples=50)
@given(
    st.recursive(st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner))
)
def test_the_scanner_finds_the_end_of_any_json(value):
    text = json.dumps([value])
    scanner = ValueScanner()
    ends = [scanner.feed(character) for character in text]
    assert ends == [None] * (len(text) - 1) + [1]
    assert ValueScanner().feed(text + "]} tail") == len(text)


def test_formats_are_recognised_by_their_templates():
    templates = (HERMES, MISTRAL, LLAMA, MISTRAL_NAMED, FUNCTIONS, UNKNOWN, NO_TOOLS)
    names = ["hermes", "mistral", "llama", "mistral named", "functions", None, None]
    assert [(one := format_in(template)) and one.name for template in templates] == names
    assert format_in("<tool_call><function=name><parameter=x>") is None, "another format with the same marker"
    assert format_in("<function=name><parameter=x>") is None


def test_ids_are_what_templates_take():
    assert len({Hermes().new_id() for _ in range(100)}) == 100
    assert all(len(one) == 9 and one.isalnum() for one in (Mistral().new_id() for _ in range(100)))
    text, calls = parse('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', Mistral(), NAMES)
    assert (text, calls[0].name, len(calls[0].id)) == ("", "f", 9)
    text, calls = parse("[TOOL_CALLS]f[ARGS]{}", MistralNamed(), NAMES)
    assert (text, calls[0].name, len(calls[0].id)) == ("", "f", 9)
