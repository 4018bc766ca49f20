"""Runs in the clients' environment: lm-eval's `local-completions` on two small tasks against a server.

`run_lm_eval.py URL MODEL TOKENIZER_FOLDER` prints JSON: by task, each sample's arguments and what the server made of
them. Nothing of lm-eval is changed; it asks for `echo` with `logprobs`, and for texts until a stop.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval

QUESTIONS = [
    {"text": "The capital of France is", "choices": [" Paris", " London", " a horse"], "label": 0},
    {"text": "Two plus two is", "choices": [" four", " seven hundred", " green"], "label": 0},
    {"text": "Ice is frozen", "choices": [" water", " fire", " Wednesday, as everyone knows"], "label": 0},
    {"text": "Grüße aus 東京: the sun rises in the", "choices": [" east", " 西", " basement"], "label": 0},
]


def tasks(data: str) -> list[dict[str, Any]]:
    """One task that compares log-likelihoods, one that generates."""
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    return [
        {
            **common,
            "task": "likelihood",
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        {
            **common,
            "task": "generation",
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "temperature": 0.0},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def main(url: str, model: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": model,
                "base_url": f"{url}/v1/completions",
                "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface",
                "num_concurrent": 2,
                "batch_size": 2,
            },
            tasks=tasks(str(data)),
            log_samples=True,
            bootstrap_iters=0,
        )
    samples = {
        task: [
            {"arguments": sample["arguments"], "resps": sample["resps"], "target": sample["target"]}
            for sample in found
        ]
        for task, found in result["samples"].items()
    }
    print("RESULT " + json.dumps({"samples": samples, "scores": result["results"]}, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
