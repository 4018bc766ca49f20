"""A pool for three sequences and many more that want it: every answer is the one of a quiet engine."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from heddle import LLM, SamplingParams
from heddle.core.messages import (
    AdapterUse,
    EvictAdapter,
    ForgetAdapter,
    Generate,
    Outputs,
)
from heddle.core.outputs import RequestOutput

Start = Callable[..., LLM]
BLOCK = 4096
REQUESTS = 24
LENGTH = 60
STOP_AT, STOP_LENGTH = 20, 25
"""Where in an answer its stop string begins, and how many tokens it takes: one each."""


@dataclass
class Requests:
    """Four kinds in turn: greedy, letters with a stop string, two-byte characters, on an adapter."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    adapters: list[str | None]

    def plain(self, count: int) -> Requests:
        """So many of them, on the base alone."""
        return Requests(self.prompts[:count], self.params[:count], [None] * count)

    def run(self, llm: LLM) -> list[RequestOutput]:
        return llm.generate(self.prompts, self.params, adapter=self.adapters)


def drawn(llm: LLM, choices: int) -> Requests:
    """Prompts of 20 to 43 tokens, answers of 60: at most 7 blocks each."""
    letters = [llm.tokenizer.encode(letter)[0] for letter in string.ascii_lowercase[:6]]
    halves = llm.tokenizer.encode("é")
    assert len(halves) == 2
    prompts = [[(7 * index + 13 * at) % 250 + 2 for at in range(20 + index)] for index in range(REQUESTS)]
    params = []
    for index in range(REQUESTS):
        kind = index % 4
        bias = dict.fromkeys(letters, 100.0) if kind == 1 else {}
        if kind == 2:  # this model likes the second half better by itself
            bias = {halves[0]: 100.0, halves[1]: 98.0}
        params.append(
            SamplingParams(
                max_tokens=LENGTH,
                temperature=0.0 if kind == 0 else 1.0,
                seed=7 + index,
                n=choices,
                logprobs=2,
                ignore_eos=True,
                logit_bias=bias,
            )
        )
    adapters = ["r4" if index % 4 == 3 else None for index in range(REQUESTS)]
    return Requests(prompts, params, adapters)


def with_stops(requests: Requests, answers: list[RequestOutput]) -> Requests:
    """Every answer made of letters is to stop at a piece of the first choice's own text."""
    params = list(requests.params)
    for index in range(1, REQUESTS, 4):
        text = answers[index].outputs[0].text
        stop = text[STOP_AT : STOP_AT + STOP_LENGTH]
        assert text.find(stop) == STOP_AT
        params[index] = msgspec.structs.replace(params[index], stop=(stop,))
    return Requests(requests.prompts, params, requests.adapters)


Quiet = Callable[[int], tuple[Requests, list[RequestOutput]]]


@pytest.fixture(scope="module")
def quiet(start: Start, llm: LLM) -> Quiet:
    """The requests with so many choices each, and their answers where there is room for all and no cache."""

    @functools.cache
    def answers(choices: int) -> tuple[Requests, list[RequestOutput]]:
        plain = start(enable_prefix_caching=False)
        requests = drawn(llm, choices)
        requests = with_stops(requests, requests.run(llm))
        want = requests.run(plain)
        assert plain._engine._scheduler.stats()["preemptions"] == 0
        return requests, want

    return answers


@dataclass
class GaveWay:
    """One sequence at the moment it was preempted."""

    request: int
    choice: int
    tokens: list[int]


def watch(llm: LLM, choices: int, monkeypatch: pytest.MonkeyPatch) -> list[GaveWay]:
    """From now on, who gives way; `llm` is new, and its keys count from 1."""
    scheduler = llm._engine._scheduler
    preempt, seen = scheduler._preempt, []

    def spied(sequence: Any) -> None:
        seen.append(GaveWay(*divmod(sequence.key - 1, choices), list(sequence.output_token_ids)))
        preempt(sequence)

    monkeypatch.setattr(scheduler, "_preempt", spied)
    return seen


def give_way_half_sent(llm: LLM, choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a sequence gives way, once, when it has generated half a character or half its stop string.

    Which ones do by themselves depends on how long an adapter takes to load."""
    engine, first_byte = llm._engine, llm.tokenizer.encode("é")[0]
    step, done = engine.step, set()

    def stepped() -> Any:
        for sequence in list(engine._scheduler._running):
            kind, tokens = (sequence.key - 1) // choices % 4, sequence.output_token_ids
            half_a_stop = kind == 1 and STOP_AT < len(tokens) < STOP_AT + STOP_LENGTH
            half_a_character = kind == 2 and tokens[-1:] == [first_byte]
            if (half_a_stop or half_a_character) and sequence.key not in done:
                done.add(sequence.key)
                engine._scheduler._preempt(sequence)
        return step()

    monkeypatch.setattr(engine, "step", stepped)


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_under_pressure_every_answer_is_the_quiet_one(
    start: Start,
    llm: LLM,
    quiet: Quiet,
    adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    preemption: str,
    choices: int,
) -> None:
    """Text, ids, log-probabilities, reasons and usage; also of who gave way with a stop string half matched
    or a character half sent."""
    requests, want = quiet(choices)
    tight = start(pool_memory=(3 * 7 + 2) * BLOCK, adapters={"r4": adapters["r4"]}, preemption=preemption)
    seen = watch(tight, choices, monkeypatch)
    give_way_half_sent(tight, choices, monkeypatch)
    got = requests.run(tight)

    for one, other in zip(want, got):
        assert other.outputs == one.outputs
        assert other.cached_tokens == one.cached_tokens == 0
    stats = tight._engine._scheduler.stats()
    assert stats["preemptions"] == len(seen) > REQUESTS / 4
    assert stats["swap_outs"] == stats["swap_ins"] == (len(seen) if preemption == "swap" else 0)
    assert stats["swap_used_bytes"] == stats["blocks_used"] == 0
    stopped = [index for index in range(REQUESTS) if got[index].outputs[0].stop_reason is not None]
    assert stopped == list(range(1, REQUESTS, 4))
    first_byte = llm.tokenizer.encode("é")[0]
    assert any(
        STOP_AT < len(one.tokens) < STOP_AT + STOP_LENGTH
        for one in seen
        if one.request in stopped and one.choice == 0
    ), "nobody gave way with its stop string half matched"
    assert any(one.tokens[-1:] == [first_byte] for one in seen if one.request % 4 == 2), (
        "nobody gave way with a character half sent"
    )


def test_the_estimate_decides_between_the_ways_by_itself(start: Start, llm: LLM) -> None:
    """Of a tiny model tokens are cheap on any machine, and to copy at a byte a second never pays."""
    tight = start(pool_memory=3 * 7 * BLOCK, adapters={})
    cost = tight._engine._scheduler._swapper.cost
    requests = drawn(llm, 1).plain(12)
    before = cost.row_rate
    want = requests.run(llm)
    for copy_rate, swaps in ((1.0, False), (1e18, True)):
        cost.copy_rate = copy_rate
        assert [one.outputs for one in requests.run(tight)] == [one.outputs for one in want]
        stats = tight._engine._scheduler.stats()
        assert stats["preemptions"] > 0
        assert (stats["swap_outs"] > 0) == swaps
    assert cost.row_rate != before, "the rate of prompts was not measured"
    assert cost.copy_rate != 1e18, "the rate of copies was not measured"


def test_swap_space_takes_memory_only_while_somebody_lies_in_it(start: Start, llm: LLM) -> None:
    tight = start(pool_memory=3 * 7 * BLOCK, adapters={}, preemption="swap", swap_space=2 * 9 * BLOCK / 2**30)
    swap, taken = tight._engine._runner.swap, [0]
    move = swap.move

    def watched(plan: Any) -> float:
        seconds = move(plan)
        taken.append(swap.nbytes)
        return seconds

    swap.move = watched
    requests = drawn(llm, 1).plain(12)
    requests.run(tight)
    assert tight._engine._scheduler.stats()["swap_outs"] > 0
    assert 0 < max(taken) <= 9 * BLOCK, "half of the swap space is for host copies"
    assert swap.nbytes == 0, "given back with the last answer"


# ------------------------------------------------------------------ weights change while a sequence is out


def test_a_swapped_sequence_finishes_on_weights_that_are_replaced_meanwhile(
    start: Start, adapters: dict[str, Path]
) -> None:
    """The adapter's version is removed while two that began on it take turns in a pool for one."""
    quiet, tight = (
        start(),
        start(pool_memory=(11 + 2) * BLOCK, adapters={"r4": adapters["r4"]}, preemption="swap"),
    )
    prompts = [[(17 * at + 5 * index) % 250 + 2 for at in range(40)] for index in range(2)]
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    want = [quiet.generate([prompt], params, adapter="r4")[0].outputs[0].token_ids for prompt in prompts]
    engine, digest = tight._engine, tight.adapters["r4"]
    tokens: dict[int, list[int]] = {0: [], 1: []}

    def take(events: list[Any]) -> None:
        for event in events:
            for output in event.outputs if isinstance(event, Outputs) else []:
                assert output.error is None
                tokens[output.key] += output.token_ids

    for key, prompt in enumerate(prompts):
        own = msgspec.structs.replace(params, seed=0)
        take(engine.handle(Generate(key=key, group=key, prompt_token_ids=prompt, params=own,
                                    adapters=[AdapterUse(digest)])))  # fmt: skip
    while not engine._scheduler.stats()["swap_outs"]:
        take(engine.step())
    refused = engine.handle(EvictAdapter(1, digest))
    assert any(getattr(event, "error", None) is not None for event in refused)
    take(engine.handle(ForgetAdapter(digest)))
    while engine.has_work:
        take(engine.step())
    assert [tokens[0], tokens[1]] == want
    assert engine._scheduler.stats()["swap_ins"] > 0
    assert engine._blocks.counts()["adapters"] == 0, "the removed version went with its last holder"
