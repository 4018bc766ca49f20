"""What a request's sampling settings refuse, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from heddle.core.sampling_params import ParamError, SamplingParams

NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 9}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), NUMBERS, ids=str)
def test_a_number_out_of_bounds_is_refused_when_it_is_made(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValueError, match=param) as refusal:
        SamplingParams(**fields)
    assert isinstance(refusal.value, ParamError)
    assert refusal.value.param == param
    with pytest.raises(ParamError):
        msgspec.structs.replace(SamplingParams(), **fields)


def test_what_may_be_long_is_gone_through_once() -> None:
    for fields, param in (
        ({"stop": ("",)}, "stop"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"stop_token_ids": (7,)}, "stop_token_ids"),
    ):
        made = SamplingParams(**fields)  # type: ignore[arg-type]
        with pytest.raises(ParamError) as refusal:
            made.validate(vocab_size=7)
        assert refusal.value.param == param


@pytest.mark.parametrize(
    ("given", "stop"), [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ()), ((), ()), ([], ())]
)
def test_a_stop_text_is_not_taken_apart(given: Any, stop: tuple[str, ...]) -> None:
    params = SamplingParams(stop=given, stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (stop, ())
    assert SamplingParams(stop_token_ids=[5, 6]).stop_token_ids == (5, 6)  # type: ignore[arg-type]
