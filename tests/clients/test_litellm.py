"""litellm, unchanged, reads the answers of transformers and PEFT off the demo server."""

from __future__ import annotations

import pytest

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def test_litellm_reads_what_transformers_says(demo_url, judge, run_client):
    found = run_client("run_litellm.py", demo_url)
    tokens, _ = judge.of(None).greedy(judge.ids_of_text("The capital of France is"), 12)
    assert found["text"] == judge.text(tokens)
    tokens, logprobs = judge.of(None).greedy(judge.ids_of_chat(QUESTION), 12)
    assert found["chat"] == found["vllm"] == judge.text(tokens)
    assert found["usage"] == len(tokens)
    assert found["logprobs"] == pytest.approx(logprobs, abs=1e-3)
    tokens, _ = judge.of("pirate").greedy(judge.ids_of_chat(QUESTION), 12)
    assert found["pirate"] == judge.text(tokens)
    assert found["pirate usage"] == [len(tokens)]
    assert "nobody" in found["refusal"]
