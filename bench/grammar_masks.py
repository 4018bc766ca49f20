"""What guiding costs on the demo base's vocabulary: compiling, and one mask a token, by grammar.

`python bench/grammar_masks.py`; single-threaded, a few seconds. The model is not needed: the tokens are those of an
answer that obeys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from heddle.core.checkpoint.demo import demo_base
from heddle.core.engine.grammars import Guide
from heddle.core.engine.sampler import SampleRow, _mask
from heddle.core.model.config import ModelConfig
from heddle.core.sampling_params import SamplingParams
from heddle.core.text.grammar import Grammar, GrammarCompiler
from heddle.core.text.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ADA = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematics", "poetry, and then some"]}'
MANY = {
    "anyOf": [
        {"type": "object", "properties": {"k": {"const": f"v{i}"}}, "required": ["k"]} for i in range(300)
    ]
}
CASES: dict[str, tuple[Callable[[], str], str]] = {
    "schema of three fields": (lambda: Grammar.json(PERSON), ADA),
    "any JSON object": (Grammar.json_object, ADA),
    "one of 300 schemas": (lambda: Grammar.json(MANY), '{"k": "v217"}'),
    "pattern": (
        lambda: Grammar.regex(r"[A-Z][a-z]+ [A-Z][a-z]+, \d{4}-\d{2}-\d{2}"),
        "Ada Lovelace, 1815-12-10",
    ),
    "1024 choices": (
        lambda: Grammar.choice([f"choice number {i} of many" for i in range(1024)]),
        "choice number 77 of many",
    ),
}
ROUNDS = 5


def main() -> None:
    folder = demo_base()
    config, tokenizer = ModelConfig.load(folder), Tokenizer.load(folder)
    began = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
    print(
        f"vocabulary of {config.vocab_size} tokens made ready in {(time.perf_counter() - began) * 1e3:.0f} ms"
    )
    print(f"{'grammar':24} {'compile ms':>10} {'mask us':>8} {'worst':>7} {'take us':>8} {'apply us':>9}")
    logits = np.random.default_rng(0).standard_normal(config.vocab_size).astype(np.float32)
    for name, (write, answer) in CASES.items():
        began = time.perf_counter()
        start = compiler.compile(write())
        compiled = time.perf_counter() - began
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        masks, takes, applied = [], [], []
        for _ in range(ROUNDS):
            guide = Guide(start, config.vocab_size)
            for index, token in enumerate(tokens):
                row = SampleRow(SamplingParams(temperature=0.0), 0, [], [], frozenset())
                began = time.perf_counter()
                allowed = guide.allowed(tokens[:index])
                masks.append(time.perf_counter() - began)
                assert allowed[token], json.dumps(answer)
                row = SampleRow(row.params, 0, [], [], frozenset(), allowed)
                copy = logits.copy()
                began = time.perf_counter()
                _mask(copy, row)
                applied.append(time.perf_counter() - began)
                began = time.perf_counter()
                guide.take(token)
                takes.append(time.perf_counter() - began)
        print(
            f"{name:24} {compiled * 1e3:10.1f} {np.mean(masks) * 1e6:8.0f} {np.max(masks) * 1e6:7.0f} "
            f"{np.mean(takes) * 1e6:8.0f} {np.mean(applied) * 1e6:9.0f}"
        )


if __name__ == "__main__":
    main()
