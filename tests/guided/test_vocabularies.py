"""Guided answers over the kinds of vocabulary there are: byte-level, with pieces, and what holds no bytes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from heddle.core.engine.grammars import Guide
from heddle.core.sampling_params import SamplingParams
from heddle.core.text.detokenizer import Detokenizer
from heddle.core.text.grammar import Grammar, GrammarCompiler
from heddle.core.text.tokenizer import Tokenizer

from ..text.conftest import write_folder

TEXTS = [
    "Hello",
    " Hello",
    "<s>",
    "</s>",
    "größer",
    "世界 😀",
    'a "b" \\',
    "▁",
    "\n",
    "<0x41>",
    "  two  blanks ",
]


@pytest.mark.parametrize("kind", ["byte-level", "byte-level-bos", "pieces"])
@pytest.mark.parametrize("seed", range(3))
def test_what_the_grammar_spells_is_what_the_text_says(tmp_path: Path, kind: str, seed: int) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model", kind))
    ends = [2]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 7, ends)
    prompt = tokenizer.encode("Hello world")
    for grammar, pattern in [(Grammar.choice([text]), re.escape(text)) for text in TEXTS] + [
        (Grammar.regex("[a-z]{3}[^a-z]{2}"), "[a-z]{3}[^a-z]{2}")
    ]:
        guide, draws = Guide(compiler.compile(grammar), tokenizer.vocab_size + 7), random.Random(seed)
        detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(), frozenset(ends))
        tokens: list[int] = []
        text, done = "", False
        while not done:
            token = int(draws.choice(np.flatnonzero(guide.allowed(tokens)).tolist()))
            assert token < tokenizer.vocab_size
            assert token not in ends, "these can only end at once"
            tokens.append(token)
            done = guide.take(token)
            text += detokenizer.add([token], done).text
        assert re.fullmatch(pattern, text, re.DOTALL), (text, tokens)
