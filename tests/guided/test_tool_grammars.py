"""The grammars of tool calls: in every model's own format, with arguments that obey, and nothing let through that
its parser could not read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heddle.api.tools.formats import Functions, Hermes, Llama, Mistral, MistralNamed, ToolFormat
from heddle.api.tools.parser import ToolParser
from heddle.core.engine.grammars import Guide
from heddle.core.text.grammar import GrammarCompiler, GrammarError, lark_json, lark_text
from heddle.core.text.tokenizer import Tokenizer

from .conftest import END_IDS, TIME, VOCAB, WEATHER

FUNCTIONS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, TIME)
}
FORMATS = [Hermes(), Mistral(), Llama(), MistralNamed(), Functions()]
ONE_BY_ONE = ("hermes", "mistral named", "functions")
"""Each call is marked by itself, so another may always follow."""
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, END_IDS)


def written(format: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """As a model of this format writes them."""
    if format.named:
        pieces = ((name, json.dumps(arguments)) for name, arguments in calls)
        return "".join(f"{format.opener}{one}{format.named}{given}{format.closer}" for one, given in pieces)
    objects = [json.dumps({"name": name, format.arguments: arguments}) for name, arguments in calls]
    if format.name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if format.name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    (only,) = objects
    return only


PARIS = ("get_weather", {"city": "Paris", "unit": "celsius"})
NOON = ("get_time", {"zone": -3})


class Judge:
    """Whether a text is let through, and whether it is complete then."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str) -> None:
        self._start, self._tokenizer = compiler.compile(grammar), tokenizer

    def __call__(self, text: str) -> str:
        guide, tokens = Guide(self._start, VOCAB), self._tokenizer.encode(text, add_special_tokens=False)
        for index, token in enumerate(tokens):
            if not guide.allowed(tokens[:index])[token]:
                return "refused"
            if guide.take(token):
                return "complete" if index + 1 == len(tokens) else "refused"
        return "may end" if guide.allowed(tokens)[END_IDS].any() else "open"


@pytest.fixture
def judge(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Any:
    return lambda grammar: Judge(compiler, tokenizer, grammar)


def spell(tokenizer: Tokenizer) -> Any:
    def spelled(marker: str) -> str:
        token = tokenizer.special_id(marker)
        return lark_text(marker) if token is None else f"<[{token}]>"

    return spelled


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_forced_calls_are_calls_and_nothing_else(
    judge: Any, tokenizer: Tokenizer, format: ToolFormat
) -> None:
    for many in (True, False):
        verdict = judge(format.must_call(FUNCTIONS, many, spell(tokenizer)))
        ends = "may end" if many and format.name in ONE_BY_ONE else "complete"
        assert verdict(written(format, PARIS)) == ends
        assert verdict(written(format, NOON)) == ends
        if format.name != "llama":
            assert verdict(written(format, PARIS, NOON)) == (ends if many else "refused")
        for wrong in (
            ("get_time", {"zone": 99}),
            ("get_time", {}),
            ("get_weather", {"city": "Paris", "unit": "kelvin"}),
            ("get_weather", {"city": "Paris", "unit": "celsius", "more": 1}),
            ("get_weather", {"city": "x" * 13, "unit": "celsius"}),
            ("get_nothing", {}),
        ):
            assert verdict(written(format, wrong)) == "refused"
        assert verdict("text") == "refused"
        assert verdict(written(format, PARIS) + " and text") == "refused"
        assert verdict(written(format, PARIS).split("Paris")[0]) == "open"
        assert verdict(written(format, PARIS).replace('": "', '":   "')) == "refused", "no endless blanks"


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_where_calls_are_free_their_arguments_are_not(
    judge: Any, tokenizer: Tokenizer, format: ToolFormat
) -> None:
    for many in (True, False):
        verdict = judge(format.may_call(FUNCTIONS, many, spell(tokenizer)))
        for text in ("any text\nof lines", "", "Numbers: 1, 2"):
            assert verdict(text) == "may end"
        assert verdict(written(format, NOON)) in ("may end", "complete")
        assert verdict(written(format, ("get_time", {"zone": 99}))) == "refused"
        assert verdict(written(format, ("get_nothing", {}))) == "refused"
        if format.name == "llama":
            continue
        assert verdict("Let me see. " + written(format, PARIS)) in ("may end", "complete")
        if format.name in ONE_BY_ONE:
            assert verdict(written(format, PARIS, NOON)) == ("may end" if many else "refused")
            assert verdict(written(format, PARIS) + " text") == ("may end" if many else "refused")
            assert verdict(f"{written(format, PARIS)} text {written(format, ('f', {}))}") == "refused"


@pytest.mark.parametrize(
    "format", [Hermes(), Mistral(), MistralNamed(), Functions()], ids=lambda format: format.name
)
def test_an_answer_that_obeys_or_a_call(judge: Any, tokenizer: Tokenizer, format: ToolFormat) -> None:
    verdict = judge(format.answer_or_call(lark_json(ANSWER), FUNCTIONS, True, spell(tokenizer)))
    assert verdict('{"ok": true}') == "complete"
    assert verdict(written(format, PARIS)) in ("may end", "complete")
    assert verdict('{"ok": 1}') == "refused"
    assert verdict("text") == "refused"


def test_json_that_could_be_either_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="JSON without a mark"):
        Llama().answer_or_call(lark_json(ANSWER), FUNCTIONS, True, spell(tokenizer))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_let_through_the_parser_reads(
    compiler: GrammarCompiler, tokenizer: Tokenizer, format: ToolFormat, seed: int
) -> None:
    import random

    import jsonschema
    import numpy as np

    guide = Guide(compiler.compile(format.must_call(FUNCTIONS, True, spell(tokenizer))), VOCAB)
    draws, tokens, done = random.Random(seed), [], False
    while not done and len(tokens) < 400:
        allowed = np.flatnonzero(guide.allowed(tokens)).tolist()
        token = draws.choice([t for t in allowed if t in END_IDS] or allowed)
        if token in END_IDS:
            break
        tokens.append(token)
        done = guide.take(token)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    parser = ToolParser(format, FUNCTIONS, many=True, sure=True)
    said = "".join(parser.feed(character).text for character in text) + parser.finish().text
    assert not said
    assert parser.calls
    for call in parser.calls:
        jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
