"""The prefix cache on real memory: what is found, copied and shared answers as what is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from heddle import LLM, SamplingParams

Start = Callable[..., LLM]
SCORED = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)


def prompt(length: int, step: int = 17) -> list[int]:
    return [(step * at) % 250 + 2 for at in range(length)]


@pytest.fixture(scope="module")
def plain(start: Start) -> LLM:
    """Finds nothing."""
    return start(adapters={}, enable_prefix_caching=False)


def same(cached: LLM, plain: LLM, text: list[int], params: SamplingParams = SCORED) -> int:
    """How many tokens were found, the answer being that of an engine that finds nothing, to the bit."""
    (warm,), (cold,) = (llm.generate([text], params) for llm in (cached, plain))
    assert warm.outputs == cold.outputs
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert cold.cached_tokens == 0
    return warm.cached_tokens


@pytest.mark.parametrize("length", [32, 31, 33, 16, 17, 1])
def test_a_prompt_that_is_cached_to_its_last_token_still_has_one_to_compute(
    start: Start, plain: LLM, length: int
) -> None:
    cached = start(adapters={})
    assert same(cached, plain, prompt(32)) == 0
    for _ in range(2):
        assert same(cached, plain, prompt(length)) in (length - 1, 0 if length == 1 else 32)


def test_the_same_prefix_again_and_again_is_computed_once(start: Start, plain: LLM) -> None:
    """One prefix of 208 tokens 32 times, each time with another end."""
    cached = start(adapters={})
    for index in range(32):
        found = same(cached, plain, [*prompt(208), 3 + index, 200 - index])
        assert found == (208 if index else 0)


def test_a_partly_filled_block_that_others_begin_with_is_copied(start: Start, plain: LLM) -> None:
    """A prompt of 37 tokens, again, longer, with its answer, and parting in its last block."""
    cached = start(adapters={})
    text = prompt(37)
    first = cached.generate([text], SCORED)[0].outputs[0].token_ids
    assert same(cached, plain, text) == 36
    assert same(cached, plain, [*text, 5, 6, 7]) == 37
    assert same(cached, plain, [*text, *first, 9]) == 37 + 5
    assert same(cached, plain, [*text[:35], 9, 9, 9]) == 35


def test_several_answers_to_one_prompt_share_it_and_are_those_of_each_alone(start: Start, plain: LLM) -> None:
    cached = start(adapters={})
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=4, logprobs=1, ignore_eos=True)
    (warm,), (cold,) = (llm.generate([prompt(37)], params) for llm in (cached, plain))
    assert warm.outputs == cold.outputs
    assert cached._engine._scheduler.stats()["cached_tokens"] == 3 * 36


def test_log_probabilities_of_a_prompt_are_computed_whatever_is_cached(start: Start, plain: LLM) -> None:
    """Twice, and after another prompt that shares 32 of its 40 tokens."""
    cached = start(adapters={})
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, logprobs=2)
    for _ in range(2):
        assert same(cached, plain, prompt(40), scored) == 0
    assert same(cached, plain, [*prompt(32), *prompt(8, 11)]) == 32
    assert same(cached, plain, prompt(40), scored) == 0


def test_blocks_after_one_that_was_evicted_are_no_hit(start: Start, plain: LLM) -> None:
    """Others take the room block by block: what is found grows shorter from its end, and is always right."""
    cached = start(adapters={}, pool_memory=8 * 4096)
    text = prompt(50)
    assert same(cached, plain, text) == 0
    assert same(cached, plain, text) == 49
    found = []
    for length in (20, 70, 90, 110):
        same(cached, plain, prompt(length, 13 + length))
        found.append(len(cached._engine._scheduler._cache.match(_queued(cached, text)).blocks))
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0
    assert same(cached, plain, text) == 0


def _queued(llm: LLM, text: list[int]) -> object:
    """What the scheduler would make of a request, not queued."""
    from heddle.core.messages import Generate

    command = Generate(key=10**6, group=0, prompt_token_ids=text, params=SamplingParams(seed=0, max_tokens=1))
    return llm._engine._scheduler._acceptance.accept(command, 0)


def test_an_adapter_rolled_back_to_its_older_version_finds_its_prefix_warm(
    start: Start, adapters: dict[str, Path]
) -> None:
    llm = start(adapters={name: adapters[name] for name in ("r4", "r5")})
    found = [llm.generate([prompt(40)], SCORED, adapter=name)[0].cached_tokens for name in ("r4", "r5", "r4")]
    assert found == [0, 0, 39]
