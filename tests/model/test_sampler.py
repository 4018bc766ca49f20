"""The sampler against float64 expectations written out here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from heddle.core.engine import sampler
from heddle.core.engine.sampler import SampleRow, SamplingError, prompt_logprobs, sample
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.plan import Sampled

VOCAB = 64


def row(
    *, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> SampleRow:
    return SampleRow(
        SamplingParams(**{"temperature": 0.0, **params}), seed, prompt or [1], output or [], frozenset({2, 5})
    )


def one(logits: torch.Tensor | list[float], request: SampleRow) -> Sampled:
    (answer,) = sample(torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1), [request])
    assert isinstance(answer, Sampled)
    return answer


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 2


def frequencies(logits: torch.Tensor, draws: int, **params: Any) -> np.ndarray:
    """Shares of the tokens drawn by `draws` sequences with seeds 0, 1, ..."""
    requests = [row(seed=seed, **params) for seed in range(draws)]
    answers = sample(logits.reshape(1, -1).expand(draws, -1).contiguous(), requests)
    counts = Counter(answer.token_id for answer in answers if isinstance(answer, Sampled))
    assert counts.total() == draws
    return np.array([counts[token] for token in range(logits.numel())]) / draws


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution that should be drawn from, in float64, by plain sorting."""
    shares = softmax(logits.double().numpy() / temperature)
    shares[shares < min_p * shares.max()] = 0
    order = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    if top_k > 0:
        shares[order[top_k:]] = 0
    shares /= shares.sum()
    held = 0.0
    for token in order:
        if held >= top_p:
            shares[token] = 0
        held += shares[token]
    return shares / shares.sum()


def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_smallest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 9] = 1
    logits[1, [4, 40]] = 2
    answers = sample(logits, [row(), row(), row()])
    assert [answer.token_id for answer in answers if isinstance(answer, Sampled)] == [9, 4, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 5e-324])
def test_tiny_temperature_equals_greedy_without_overflow(temperature: float) -> None:
    logits = random_logits(20) * 100
    if temperature < 1e-5:
        logits[3] = 0.5  # all equal: greedy takes the first
    greedy = sample(logits, [row()] * 20)
    assert sample(logits, [row(temperature=temperature, seed=i) for i in range(20)]) == greedy


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.3, "min_p": 1.0},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_drawn_frequencies_are_those_of_the_filtered_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(1)[0]
    expected = filtered(logits, **params)
    draws = 2000
    found = frequencies(logits, draws, **params)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    # Five standard deviations of a binomial share, and half a draw.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 0.5 / draws).all()


def test_a_draw_inverts_the_distribution_over_a_real_vocabulary() -> None:
    """The documented generator's number, sought in float64 cumulative shares, names the token."""
    logits = random_logits(1, vocab=49_152, seed=3)[0]
    shares = softmax(logits.double().numpy())
    cumulative = np.cumsum(shares)
    for seed in [0, 1, -1, 2**63 - 1, -(2**63)]:
        for index in [0, 1, 7]:
            point = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=index)).random()
            request = row(temperature=1.0, seed=seed, output=[3] * index)
            token = one(logits, request).token_id
            below = cumulative[token - 1] if token else 0.0
            assert below - 1e-6 <= point <= cumulative[token] + 1e-6


def test_equal_logits_at_the_edge_of_top_k_and_top_p_keep_the_smallest_ids() -> None:
    logits = torch.full((VOCAB,), -20.0)
    logits[[7, 3, 50, 11]] = 1.0
    assert set(np.flatnonzero(frequencies(logits, 200, temperature=1.0, top_k=2))) == {3, 7}
    assert set(np.flatnonzero(frequencies(logits, 200, temperature=1.0, top_p=0.49))) == {3, 7}
    assert set(np.flatnonzero(frequencies(logits, 200, temperature=1.0, top_p=0.7))) == {3, 7, 11}


def test_one_candidate_is_the_largest_logit_however_near_the_next() -> None:
    """The weights of both are 1 in float32: only the logits tell them apart."""
    logits = torch.full((VOCAB,), -20.0)
    logits[3], logits[7] = 0.0, 1e-9
    assert [one(logits, row(temperature=1.0, top_k=1, seed=seed)).token_id for seed in range(20)] == [7] * 20


def test_a_sequence_draws_new_numbers_as_it_grows_and_the_same_ones_again() -> None:
    logits = torch.zeros(VOCAB)
    tokens = [one(logits, row(temperature=1.0, seed=9, output=[0] * n)).token_id for n in range(200)]
    again = [one(logits, row(temperature=1.0, seed=9, output=[5] * n)).token_id for n in range(200)]
    assert tokens == again
    assert len(set(tokens)) > 40
    assert tokens != [one(logits, row(temperature=1.0, seed=8, output=[0] * n)).token_id for n in range(200)]


def test_neighbours_never_change_a_row() -> None:
    logits = random_logits(12, vocab=1000, seed=4)
    requests = [
        row(),
        row(temperature=0.8, seed=1),
        row(temperature=1.0, seed=2, top_k=30, top_p=0.9, logprobs=5),
        row(logprobs=3),
        row(temperature=1.0, seed=3, repetition_penalty=1.3, presence_penalty=0.5, output=[4, 4, 9]),
        row(logit_bias={7: 30.0}),
    ] * 2
    together = sample(logits, requests)
    for i, request in enumerate(requests):
        assert sample(logits[i : i + 1].clone(), [request]) == [together[i]]
    order = [5, 2, 11, 0, 8, 3, 1, 10, 4, 9, 7, 6]
    assert sample(logits[order], [requests[i] for i in order]) == [together[i] for i in order]


EXTREMES = [
    {"temperature": 5e-324},
    {"temperature": 1e-40},
    {"temperature": 2.0},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"min_p": 1.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"frequency_penalty": 2.0, "presence_penalty": -2.0},
    {"logit_bias": {3: -100.0, 4: 100.0}},
]
"""The ends of what `SamplingParams` allows, some beyond float32."""


@pytest.mark.parametrize("params", EXTREMES, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_number_that_is_allowed_makes_a_row_fail_its_neighbour_or_choose_what_is_ruled_out(
    params: dict[str, Any], scale: float, temperature: float
) -> None:
    logits = random_logits(2, seed=5).clamp(-1, 1) * scale
    allowed = np.zeros(VOCAB, dtype=bool)
    allowed[[4, 9]] = True
    guided = replace(
        row(**({"temperature": temperature, "seed": 3} | params), prompt=[3, 5], output=[9]), allowed=allowed
    )
    first, second = sample(logits, [guided, row()])
    assert isinstance(first, SamplingError) or first.token_id in (4, 9)
    if scale <= 1e30:
        assert not isinstance(first, SamplingError)
    assert second == one(logits[1], row())


def test_a_fault_in_one_row_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> int:
        raise ZeroDivisionError("by the test")

    monkeypatch.setattr(sampler, "_draw", fails)
    logits = random_logits(3)
    answers = sample(logits, [row(), row(temperature=1.0, seed=1), row(logprobs=2)])
    assert isinstance(answers[1], SamplingError)
    assert "by the test" in str(answers[1])
    assert [answers[0], answers[2]] == [one(logits[0], row()), one(logits[2], row(logprobs=2))]


def test_penalties_work_on_counts_as_documented() -> None:
    """Repetition over prompt and output, frequency and presence over the output alone, in float64."""
    raw = random_logits(1, seed=6)[0]
    prompt, output = [3, 3, 8], [8, 20, 20, 20]
    expected = raw.double().numpy().copy()
    for token in {3, 8, 20}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in {8: 1, 20: 3}.items():
        expected[token] -= 0.4 * count + 0.7
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    for winner in [3, 8, 20, 40]:
        # Lift one token until it must win, then to just below the others: the edge is at the expected value.
        others = np.delete(expected, winner).max()
        for gap, wins in [(1e-3, True), (-1e-3, False)]:
            lifted = raw.clone()
            lifted[winner] = _undo(others + gap, winner, prompt, output)
            answer = one(lifted, row(prompt=prompt, output=output, **params))
            assert (answer.token_id == winner) is wins


def _undo(value: float, token: int, prompt: list[int], output: list[int]) -> float:
    """The raw logit that the penalties of the test above turn into `value`."""
    count = output.count(token)
    value += 0.4 * count + (0.7 if count else 0.0)
    if token not in prompt and token not in output:
        return value
    return value * 1.5 if value > 0 else value / 1.5


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = random_logits(1)[0]
    top, second = logits.argsort(descending=True)[:2].tolist()
    gap = float(logits[top] - logits[second])
    assert one(logits, row(logit_bias={second: gap + 1e-3})).token_id == second
    assert one(logits, row(logit_bias={second: gap - 1e-3})).token_id == top
    assert one(logits, row(logit_bias={top: -100.0})).token_id == second


def test_end_and_stop_tokens_are_ruled_out_until_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[2, 5, 30]] = torch.tensor([9.0, 8.0, 7.0])
    logits[11] = 1.0
    stops = {"stop_token_ids": (30,), "min_tokens": 3}
    assert one(logits, row(**stops)).token_id == 11
    assert one(logits, row(**stops, output=[0, 0])).token_id == 11
    assert one(logits, row(**stops, output=[0, 0, 0])).token_id == 2
    assert one(logits, row(**stops, ignore_eos=True)).token_id == 2, "an ignored end token ends nothing"
    drawn = frequencies(logits, 300, temperature=2.0, **stops)
    assert drawn[[2, 5, 30]].sum() == 0


def test_end_ids_outside_the_vocabulary_do_not_fault() -> None:
    request = SampleRow(SamplingParams(temperature=0.0, min_tokens=1), 0, [1], [], frozenset({2, 700}))
    assert one(torch.zeros(VOCAB), request).token_id == 0


def test_a_row_without_any_allowed_token_is_an_error_of_its_own() -> None:
    request = SampleRow(
        SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(0, 1)), 0, [0], [], frozenset({2})
    )
    bad, good = sample(torch.zeros(2, 3), [request, row()])
    assert isinstance(bad, SamplingError)
    assert good == Sampled(0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(poison: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    quiet = sample(logits, [row(**params, seed=i) for i in range(3)])
    logits[1, 17] = poison
    first, second, third = sample(logits, [row(**params, seed=i) for i in range(3)])
    assert isinstance(second, SamplingError)
    assert "not finite" in str(second)
    assert [first, third] == [quiet[0], quiet[2]]
    with pytest.raises(SamplingError):
        prompt_logprobs(logits, [0, 0, 0], 1)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(1, vocab=49_152)[0]
    expected = torch.log_softmax(logits.double(), dim=0)
    request = row(temperature=1.0, seed=5, logit_bias={3: 60.0}, top_k=4, logprobs=5)
    answer = one(logits, request)
    assert answer.token_id == 3
    assert answer.logprobs is not None
    assert answer.logprobs.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    values, ids = expected.topk(5)
    assert [token for token, _ in answer.logprobs.top] == ids.tolist()
    assert [value for _, value in answer.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert answer.logprobs.rank == 1 + int((expected > expected[3]).sum())


def test_log_probabilities_of_equal_logits_come_in_the_order_of_ids() -> None:
    logits = torch.zeros(VOCAB)
    logits[[33, 12]] = 1.0
    answer = one(logits, row(logprobs=4))
    assert answer.logprobs is not None
    assert [token for token, _ in answer.logprobs.top] == [12, 33, 0, 1]
    (second,) = prompt_logprobs(logits.reshape(1, -1), [1], 0)
    assert second.rank == 4
    assert second.top == []


def test_log_probabilities_beyond_json_are_floored() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1e6
    (entry,) = prompt_logprobs(logits, [0], 2)
    assert entry.logprob == -9999.0
    assert entry.top == [(1, 0.0), (0, -9999.0)]


def test_prompt_log_probabilities_equal_those_of_each_row() -> None:
    logits = random_logits(6, seed=8)
    tokens = [5, 0, 63, 22, 9, 9]
    expected = torch.log_softmax(logits.double(), dim=1)
    entries = prompt_logprobs(logits, tokens, 3)
    for i, (entry, token) in enumerate(zip(entries, tokens)):
        assert entry.logprob == pytest.approx(float(expected[i, token]), abs=1e-6)
        assert [found for found, _ in entry.top] == expected[i].topk(3).indices.tolist()
