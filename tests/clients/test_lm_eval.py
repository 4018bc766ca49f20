"""lm-eval's `local-completions`, unchanged, finds the log-likelihoods and the texts of transformers."""

from __future__ import annotations

import pytest

from .conftest import NAME


@pytest.mark.parametrize("model", [NAME, "pirate"])
def test_lm_eval_scores_as_transformers_does(demo_url, demo_base, judge, run_client, model):
    adapter = None if model == NAME else model
    judge_of = judge.of(adapter)
    found = run_client("run_lm_eval.py", demo_url, model, str(demo_base))
    seen = 0
    for sample in found["samples"]["likelihood"]:
        for (context, continuation), ((answer,),) in zip(sample["arguments"], zip(sample["resps"])):
            logprob, greedy = answer
            whole = judge.ids_of_text(context + continuation)
            length = len(judge.ids_of_text(context))
            expected, is_greedy = judge_of.likelihood(whole[:length], whole[length:])
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
            assert str(greedy) == str(is_greedy)
            seen += 1
    assert seen == 12
    for sample in found["samples"]["generation"]:
        context = sample["arguments"][0][0]
        tokens, _ = judge_of.greedy(judge.ids_of_text(context), 12)
        text = judge.text(tokens)
        end = min((text.index(stop) for stop in ("\n", ".") if stop in text), default=len(text))
        assert sample["resps"][0][0] == text[:end]
