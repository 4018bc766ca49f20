"""A model that speaks noise, guided: everything it says obeys, whatever else is asked, and nobody else notices."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from heddle import LLM, Grammar, SamplingParams
from heddle.core.errors import EngineFailure

from .conftest import END_IDS

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["poetry", "mathematics", "größe"]}, "maxItems": 3},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "legs": {"type": "boolean"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
}
PATTERNS = [
    r"[a-f]{2,6}-\d{3}",
    r"(yes|no|perhaps)( (yes|no|perhaps)){2}",
    r"[^a-zA-Z\d]{3}[α-ω]{1,4}",
    r"^ab?c$",
]
PROMPT = "The quick brown fox"
BLOCK = 4096
"""Bytes of a block of this base."""


@pytest.fixture(scope="session")
def start(base: Path) -> Iterator[Callable[..., LLM]]:
    started = []

    def llm(**settings: Any) -> LLM:
        defaults = {"pool_memory": 2 << 20, "check_invariants": True, "num_threads": 1}
        started.append(LLM(base, **(defaults | settings)))
        return started[-1]

    yield llm
    for one in started:
        one.close()


@pytest.fixture(scope="session")
def llm(start: Callable[..., LLM]) -> LLM:
    return start()


def guided(grammar: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "max_tokens": 300, "seed": 1, **params})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_obeys_its_schema(llm: LLM, temperature: float) -> None:
    prompts = [PROMPT, "{", "世界", "A much longer prompt than the others, of several blocks, so it seems."]
    (texts,) = [llm.generate(prompts, guided(Grammar.json(PERSON), temperature=temperature, n=4))]
    seen = set()
    for request in texts:
        for output in request.outputs:
            assert output.finish_reason == "stop"
            assert output.token_ids[-1] not in END_IDS, "it ends with its last brace"
            jsonschema.validate(json.loads(output.text), PERSON)
            seen.add(output.text)
    assert len(seen) > 1 if temperature else len(seen) >= 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_its_pattern(llm: LLM, pattern: str) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.regex(pattern), n=4))
    for output in request.outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), output.text


def test_one_of_the_choices_is_made(llm: LLM) -> None:
    choices = ["yes", "no", "yes, but", 'a "quoted" \\ thing', "größer 😀", "a\nline", "<s>", "/x/"]
    (request,) = llm.generate([PROMPT], guided(Grammar.choice(choices), n=32))
    said = {output.text for output in request.outputs}
    assert said <= set(choices)
    assert len(said) > 2
    for choice in choices:
        (request,) = llm.generate([PROMPT], guided(Grammar.choice([choice])))
        assert request.outputs[0].text == choice
        assert request.outputs[0].finish_reason == "stop"


def test_an_empty_choice_is_an_empty_answer(llm: LLM) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.choice([""])))
    assert (request.outputs[0].text, request.outputs[0].finish_reason) == ("", "stop")
    assert len(request.outputs[0].token_ids) == 1


def test_any_object_is_an_object_without_endless_blanks(llm: LLM) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.json_object(), n=16, logit_bias=_blanks(llm)))
    complete = [output for output in request.outputs if output.finish_reason == "stop"]
    for output in complete:
        assert isinstance(json.loads(output.text), dict)
    for output in request.outputs:
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', output.text)
        assert re.fullmatch(r"(\S|(?<=\S) (?=\S)|(?<=\S)\n {0,32}(?=\S)|\s+$)*", outside), outside


def _blanks(llm: LLM) -> dict[int, float]:
    """A bias that makes the model say nothing but space wherever it may."""
    tokenizer = llm.tokenizer
    return {
        token: 100.0
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token) and not tokenizer.token_bytes(token).strip()
    }


def test_max_tokens_cuts_an_answer_short(llm: LLM) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.json(PERSON), max_tokens=5))
    (output,) = request.outputs
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)
    (whole,) = llm.generate([PROMPT], guided(Grammar.json(PERSON)))
    assert whole.outputs[0].token_ids[:5] == output.token_ids
    exact = len(whole.outputs[0].token_ids)
    (request,) = llm.generate([PROMPT], guided(Grammar.json(PERSON), max_tokens=exact))
    assert request.outputs[0].finish_reason == "stop", "complete at the last token is complete"


def test_an_end_token_ends_only_what_is_complete(llm: LLM) -> None:
    bias = dict.fromkeys(END_IDS, 100.0)
    (request,) = llm.generate([PROMPT], guided(Grammar.regex("[ab]{5,}"), logit_bias=bias))
    (output,) = request.outputs
    assert re.fullmatch("[ab]{5,}", output.text)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in END_IDS


def test_min_tokens_and_ignore_eos_keep_an_answer_going_as_long_as_its_grammar_does(llm: LLM) -> None:
    bias = dict.fromkeys(END_IDS, 100.0)
    for params in ({"min_tokens": 30}, {"ignore_eos": True}):
        (request,) = llm.generate(
            [PROMPT], guided(Grammar.regex("[ab]+"), logit_bias=bias, max_tokens=40, **params)
        )
        (output,) = request.outputs
        assert re.fullmatch("[ab]+", output.text)
        if "min_tokens" in params:
            assert len(output.token_ids) == 31
            assert output.finish_reason == "stop"
        else:
            assert (output.finish_reason, len(output.token_ids)) == ("length", 40)
        (request,) = llm.generate([PROMPT], guided(Grammar.regex("ab"), max_tokens=40, **params))
        assert (request.outputs[0].text, request.outputs[0].finish_reason) == ("ab", "stop")
    (request,) = llm.generate([PROMPT], guided(Grammar.choice(["a", "ab"]), min_tokens=20, ignore_eos=True))
    assert request.outputs[0].text in ("a", "ab")
    assert request.outputs[0].finish_reason == "stop"


def test_bias_and_penalties_choose_among_what_is_allowed(llm: LLM) -> None:
    for params in (
        {"logit_bias": dict.fromkeys(range(5, 40), 100.0)},
        {"repetition_penalty": 5.0},
        {"frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"top_k": 1},
        {"top_k": 400, "top_p": 0.3, "min_p": 0.2},
    ):
        (request,) = llm.generate([PROMPT], guided(Grammar.regex("[0-9]{4} [a-z]{4}"), n=3, **params))
        assert all(re.fullmatch("[0-9]{4} [a-z]{4}", output.text) for output in request.outputs)
    yes = llm.tokenizer.encode("yes", add_special_tokens=False)[0]
    (request,) = llm.generate(
        [PROMPT], guided(Grammar.choice(["yes", "no"]), n=8, logit_bias={yes: 100.0}, temperature=1.0)
    )
    assert {output.text for output in request.outputs} == {"yes"}


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.regex("[0-9]{6}"), logprobs=3, temperature=0.0))
    (output,) = request.outputs
    tokens = request.prompt_token_ids + output.token_ids
    (logits,) = llm.logits([tokens])
    expected = logits.double().log_softmax(-1)
    for index, entry in enumerate(output.logprobs or []):
        row = expected[len(request.prompt_token_ids) + index - 1]
        assert entry.logprob == pytest.approx(float(row[output.token_ids[index]]), abs=1e-4)
        assert entry.top[0][1] == pytest.approx(float(row.max()), abs=1e-4)
    assert any(entry.rank > 1 for entry in output.logprobs or []), "the model wanted something else"


def test_a_stop_string_still_stops(llm: LLM) -> None:
    (request,) = llm.generate([PROMPT], guided(Grammar.regex("[0-9]{3};[0-9]{50}"), stop=(";",)))
    (output,) = request.outputs
    assert re.fullmatch("[0-9]{3}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", ";")


def test_unguided_neighbours_say_the_same_to_the_bit(llm: LLM) -> None:
    prompts = [PROMPT, "A", "世界 and more", "The end"]
    free = [
        SamplingParams(max_tokens=40, temperature=t, seed=s, logprobs=2)
        for t, s in ((0, 1), (1, 2), (0.5, 3), (1, 4))
    ]
    alone = llm.generate(prompts, free)
    mixed_prompts = [text for prompt in prompts for text in (prompt, prompt)]
    mixed = [one for params in free for one in (params, guided(Grammar.json(PERSON), n=2))]
    together = llm.generate(mixed_prompts, mixed)
    for before, after in zip(alone, together[::2]):
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.outputs[0].logprobs == before.outputs[0].logprobs
    for request in together[1::2]:
        for output in request.outputs:
            jsonschema.validate(json.loads(output.text), PERSON)


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_preempted_sequence_goes_on_in_its_grammar(start: Callable[..., LLM], llm: LLM, way: str) -> None:
    params = guided(Grammar.regex("([a-z]{3} ){30}[a-z]"), n=6, temperature=1.0, max_tokens=130)
    (roomy,) = llm.generate([PROMPT], params)
    small = start(pool_memory=11 * BLOCK, preemption=way)
    (tight,) = small.generate([PROMPT], params)
    assert small._engine._scheduler.stats()["preemptions"] > 0
    assert [output.token_ids for output in tight.outputs] == [output.token_ids for output in roomy.outputs]


def test_a_grammar_beyond_the_limits_of_a_step_ends_its_own_request_alone(llm: LLM) -> None:
    hostile = Grammar.regex("(.{0,1000}[a-z]){0,100}x")
    with pytest.raises(EngineFailure) as failure:
        llm.generate([PROMPT], guided(hostile))
    assert (failure.value.error.code, failure.value.error.param) == ("invalid_request", "grammar")
    (request,) = llm.generate([PROMPT], guided(Grammar.regex("[a-z]{3}")))
    assert re.fullmatch("[a-z]{3}", request.outputs[0].text)
    assert not llm._engine._grammars.guides, "nothing is left of either"


def test_a_wrong_grammar_is_the_requests_own_fault(llm: LLM) -> None:
    for grammar in ("start: nowhere", "", "{", Grammar.regex(r"[^\s\S]")):
        with pytest.raises(EngineFailure) as failure:
            llm.generate([PROMPT], SamplingParams(grammar=grammar))
        assert failure.value.error.code == "invalid_request"


def test_a_mask_costs_little(llm: LLM) -> None:
    """A bound on this machine at its busiest, far above what is measured on an idle one."""
    from heddle.core.engine.grammars import Guide
    from heddle.core.text.grammar import GrammarCompiler

    compiler = GrammarCompiler(llm.tokenizer, 520, END_IDS)
    guide = Guide(compiler.compile(Grammar.json(PERSON)), 520)
    tokens = llm.tokenizer.encode('{"name": "Ada", "age": 36, "tags": []', add_special_tokens=False)
    began = time.perf_counter()
    for count in range(len(tokens)):
        assert guide.allowed(tokens[:count])[tokens[count]]
    assert (time.perf_counter() - began) / len(tokens) < 0.01
