"""The process that tries grammars out: it survives, or is replaced, and nobody waits for another's hostile ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from heddle.api.generation import grammar_checker
from heddle.api.generation.grammar_checker import GrammarChecker
from heddle.core.text.check_grammars import Item
from heddle.core.text.grammar import Grammar

from .conftest import END_IDS, VOCAB

GOOD = Item("grammar", Grammar.regex("[a-z]{3}"))
BAD = Item("grammar", Grammar.regex("("))
ENDLESS = Item("grammar", Grammar.json({"type": "integer", "multipleOf": 62615533}))
"""Some 62 million states of a lexer, which no limit of the library keeps from being built."""


@pytest.fixture
async def checker(tokenizer_folder: Path) -> AsyncIterator[GrammarChecker]:
    one = GrammarChecker(tokenizer_folder, VOCAB, END_IDS)
    yield one
    await one.close()


async def test_good_and_bad_ones_are_told_apart(checker: GrammarChecker) -> None:
    schema = Item("schema", '{"type": "object", "properties": {"a": {"uniqueItems": true}}}')
    assert await checker.check([GOOD, schema], "a") is None
    verdict = await checker.check([GOOD, schema, BAD], "a")
    assert verdict is not None
    assert (verdict.index, "unclosed" in verdict.reason) == (2, True)
    wrong = await checker.check([Item("schema", '{"type": "strng"}')], "a")
    assert wrong is not None


async def test_one_that_never_ends_is_given_up_and_the_next_is_checked(checker: GrammarChecker) -> None:
    await checker.check([GOOD], "a")
    before = checker._process
    assert before is not None
    began = time.monotonic()
    verdict = await checker.check([ENDLESS], "a")
    assert verdict is not None
    assert "longer than" in verdict.reason
    assert time.monotonic() - began < grammar_checker.PATIENCE + 30
    assert before.popen.returncode is not None, "it was killed"
    assert await checker.check([BAD], "a") is not None
    assert await checker.check([GOOD], "a") is None


async def test_a_process_that_dies_costs_one_request_alone(checker: GrammarChecker) -> None:
    await checker.check([GOOD], "a")
    assert checker._process is not None
    checker._process.popen.kill()
    checker._process.popen.wait()
    assert await checker.check([Item("grammar", Grammar.regex("[a-z]{4}"))], "a") is not None
    assert await checker.check([Item("grammar", Grammar.regex("[a-z]{4}"))], "a") is None


async def test_what_is_known_to_be_good_waits_for_nobody(checker: GrammarChecker) -> None:
    await checker.check([GOOD], "a")
    hostile = asyncio.create_task(checker.check([ENDLESS], "a"))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert await checker.check([GOOD], "b") is None
    assert time.monotonic() - began < grammar_checker.PATIENCE / 3
    assert await hostile is not None


async def test_a_tenants_hostile_ones_come_one_at_a_time(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "PATIENCE", 1.0)
    await checker.check([GOOD], "b")
    hostile = [asyncio.create_task(checker.check([ENDLESS], "a")) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert await checker.check([Item("grammar", Grammar.regex("[a-z]{5}"))], "b") is None
    assert sum(task.done() for task in hostile) <= 2, "the other tenant waited for one of them"
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_who_leaves_does_not_spoil_the_next_answer(checker: GrammarChecker) -> None:
    await checker.check([GOOD], "a")
    for number in range(20):
        leaving = asyncio.create_task(checker.check([BAD], "a"))
        await asyncio.sleep(0.001 * (number % 4))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await checker.check([Item("grammar", Grammar.regex(f"x{number}"))], "a") is None
        assert await checker.check([BAD], "a") is not None
    assert not checker._turns
    assert not checker._waiting
