"""What is found again of a prompt, by whom, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.core.messages import AdapterUse
from heddle.core.scheduling.prefix_cache import next_name, root_name

from .simulation import tokens


def run(fake: Any, prompt: list[int], *adapters: Any, **params: Any) -> int:
    """One request alone, checked against the model; how many tokens it found in the cache."""
    key = fake.submit(prompt, *adapters, **{"max_tokens": 3, "ignore_eos": True, **params})
    assert isinstance(key, int), key
    fake.finish()
    fake.check_answer(fake.received[key])
    cached: int = fake.received[key].cached_tokens
    return cached


@pytest.mark.parametrize(("length", "cached"), [(32, 31), (31, 30), (33, 32), (16, 15), (1, 0), (17, 16)])
def test_at_least_one_token_of_a_cached_prompt_is_computed(engine: Any, length: int, cached: int) -> None:
    fake = engine(block_size=16, blocks=16)
    assert run(fake, tokens(48)) == 0
    assert run(fake, tokens(length)) == cached
    assert run(fake, tokens(length)) == cached


def test_same_prompt_hits_only_within_the_same_weights_and_tenant(engine: Any) -> None:
    fake = engine(blocks=200, slots=8)
    fake.know("A")
    fake.know("B")
    prompt = tokens(64)
    for adapters in ([], ["A"], ["B"], [("A", 0.5)], ["A", "B"], ["B", "A"]):
        assert run(fake, prompt, *adapters) == 0
        assert run(fake, prompt, *adapters) == 63
    assert run(fake, prompt, tenant="other") == 0
    assert run(fake, prompt, "A", tenant="other") == 0
    assert run(fake, prompt) == 63


def test_a_replaced_adapter_finds_nothing_of_the_one_before(engine: Any) -> None:
    """A name's new version is another digest, whatever the name."""
    fake = engine(blocks=64)
    fake.know("sha256:one")
    assert [run(fake, tokens(20), "sha256:one") for _ in range(3)] == [0, 19, 19]
    fake.know("sha256:two")
    fake.residency.forget("sha256:one")
    assert run(fake, tokens(20), "sha256:two") == 0


def test_names_tell_scopes_apart_that_read_alike() -> None:
    scopes = [
        ("a", ()),
        ("ab", ()),
        ("a", (AdapterUse("b"),)),
        ("a", (AdapterUse("b", 0.5),)),
        ("a", (AdapterUse("b"), AdapterUse("c"))),
        ("a", (AdapterUse("c"), AdapterUse("b"))),
        ("a", (AdapterUse("bc"),)),
    ]
    names = {root_name(scope) for scope in scopes}
    assert len(names) == len(scopes)
    assert all(len(name) >= 16 for name in names)
    parent = root_name(scopes[0])
    assert next_name(parent, [1, 2]) != next_name(parent, [2, 1])
    assert next_name(next_name(parent, [1]), [2]) != next_name(parent, [1, 2])
    assert next_name(parent, [1, 2]) == next_name(parent, [1, 2])


def test_blocks_after_an_evicted_one_are_no_hit(engine: Any) -> None:
    fake = engine(block_size=4, blocks=8)
    assert run(fake, tokens(13)) == 0  # blocks 0, 1 and 2 of it are cached
    assert run(fake, tokens(13)) == 12
    hits = []
    for size in (16, 20, 29):  # others take ever more room
        run(fake, tokens(size, start=31), max_tokens=1)
        hits.append(len(fake.scheduler._cache.match(_sequence(fake, tokens(13))).blocks) * 4)
        fake.scheduler.check_integrity()
    assert hits == sorted(hits, reverse=True)
    assert hits[-1] == 0
    assert run(fake, tokens(13)) == 0


def _sequence(fake: Any, prompt: list[int]) -> Any:
    """What the scheduler would make of a request, not queued."""
    from heddle.core.messages import Generate
    from heddle.core.sampling_params import SamplingParams

    command = Generate(key=10**6, group=0, prompt_token_ids=prompt, params=SamplingParams(seed=0))
    return fake.scheduler._acceptance.accept(command, 0)


def test_prompt_log_probabilities_are_computed_not_found(engine: Any) -> None:
    fake = engine(block_size=4, blocks=32)
    prompt = tokens(40)
    for _ in range(2):
        assert run(fake, prompt, prompt_logprobs=2, max_tokens=1) == 0
    assert run(fake, tokens(32) + tokens(8, start=7), prompt_logprobs=2, max_tokens=1) == 0
    assert run(fake, prompt) == 39  # but what they computed serves others
    assert run(fake, prompt, prompt_logprobs=0, max_tokens=0) == 0
    fake.check_at_rest()


def test_output_tokens_are_found_too(engine: Any) -> None:
    """A conversation's next turn begins with the last answer."""
    fake = engine(block_size=4, blocks=32)
    key = fake.submit(tokens(6), max_tokens=10, ignore_eos=True)
    fake.finish()
    turn = tokens(6) + fake.tokens(key) + tokens(3)
    assert run(fake, turn) == 15  # the last one was chosen and never computed


def test_switched_off_nothing_is_found_or_kept(engine: Any) -> None:
    fake = engine(prefix_caching=False)
    assert run(fake, tokens(40)) == 0
    assert run(fake, tokens(40)) == 0
    assert fake.counts() == {"free": 32, "used": 0, "cached": 0, "adapters": 0}


def test_the_choices_of_one_request_compute_its_prompt_once(engine: Any) -> None:
    fake = engine(block_size=4, blocks=32, max_num_batched_tokens=8)
    prompt = tokens(21)
    keys = [fake.submit(prompt, group=7, max_tokens=6, seed=seed, ignore_eos=True) for seed in range(3)]
    other = fake.submit(tokens(21, start=30), group=7, max_tokens=6)
    fake.finish()
    for key in (*keys, other):
        fake.check_answer(fake.received[key])
    assert [fake.received[key].cached_tokens for key in keys] == [0, 20, 20]
    assert fake.received[other].cached_tokens == 0
    assert sum(fake.rows_per_step) < 2 * 21 + 4 * 6 + 3


def test_a_choice_goes_on_when_the_one_it_waited_for_is_aborted(engine: Any) -> None:
    fake = engine(block_size=4, blocks=32, max_num_batched_tokens=4)
    keys = [fake.submit(tokens(21), group=7, max_tokens=2, ignore_eos=True) for _ in range(2)]
    fake.step()
    fake.abort(keys[0])
    fake.finish()
    assert fake.received[keys[1]].cached_tokens == 4
    fake.check_answer(fake.received[keys[1]])
