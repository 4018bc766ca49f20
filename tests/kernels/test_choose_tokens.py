"""The next tokens on the device: by the sampler's rule, written out here in float64, and the sampler's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heddle.core.engine.sampler import SampleRow, sample, uniform
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.plan import Sampled
from heddle.kernels import reference, triton
from heddle.kernels.ops import Choices, ChoosesTokens
from heddle.kernels.triton import sampling
from triton.runtime.interpreter import InterpreterBuilder

FILTERS: list[tuple[int, float, float]] = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (10**6, 1.0, 0.0),
    (0, 0.05, 0.0),
    (0, 0.6, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.2),
    (5, 0.7, 0.1),
    (40, 0.9, 0.01),
]
"""top_k, top_p, min_p"""


@pytest.fixture(params=["reference", "triton"])
def chooser(request: pytest.FixtureRequest) -> ChoosesTokens:
    return {"reference": reference, "triton": triton}[request.param]


def choices(
    temperatures: list[float], filters: list[tuple[int, float, float]], points: list[float]
) -> Choices:
    top_ks, top_ps, min_ps = zip(*filters)
    return Choices(
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps, dtype=torch.float64),
        min_ps=torch.tensor(min_ps, dtype=torch.float32),
        points=torch.tensor(points, dtype=torch.float64),
        draws=any(temperatures),
    )


def by_the_rule(
    logits: np.ndarray, temperature: float, filters: tuple[int, float, float], point: float
) -> int:
    """Sorted and summed one by one, in float64."""
    top_k, top_p, min_p = filters
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= min_p]
    order = order[: top_k or None]
    if top_p < 1:
        held, count = 0.0, 0
        wanted = top_p * sum(weights[token] for token in order)
        while held < wanted:
            held += weights[order[count]]
            count += 1
        order = order[:count]
    target = point * sum(weights[token] for token in order)
    held = 0.0
    for token in sorted(order):
        held += weights[token]
        if held > target:
            return token
    raise AssertionError("the point lies within the total")


@pytest.mark.parametrize("vocab", [1, 61, 4100])
def test_draws_follow_the_rule(chooser: ChoosesTokens, vocab: int) -> None:
    """A vocabulary of one token, within a block, and of a little more than one."""
    generator = np.random.default_rng(vocab)
    logits = generator.normal(size=(len(FILTERS), vocab)).astype(np.float32) * 2
    temperatures = [0.3, 0.7, 1.0, 1.5, 1.0, 0.8, 1.0, 1.2, 2.0, 0.9]
    points = generator.random(len(FILTERS)).tolist()
    found = chooser.choose_tokens(torch.from_numpy(logits), choices(temperatures, FILTERS, points))
    assert found.dtype == torch.int32
    expected = [
        by_the_rule(*one) for one in zip(logits, map(float, np.float32(temperatures)), FILTERS, points)
    ]
    assert found.tolist() == expected


def test_the_same_seed_gives_the_host_sampler_s_token(chooser: ChoosesTokens) -> None:
    """Eight sequences of one request each, several tokens on: the same point of the same distribution."""
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(4)) * 3
    rows = [
        SampleRow(
            SamplingParams(temperature=0.5 + 0.2 * i, top_k=top_k, top_p=top_p, min_p=min_p), -i, [1], [7] * i,
            frozenset(),
        )
        for i, (top_k, top_p, min_p) in enumerate(FILTERS[:8])
    ]  # fmt: skip
    filters = [(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    points = [uniform(row.seed, len(row.output_token_ids)) for row in rows]
    found = chooser.choose_tokens(logits, choices([row.params.temperature for row in rows], filters, points))
    expected = [answer.token_id for answer in sample(logits, rows) if isinstance(answer, Sampled)]
    assert found.tolist() == expected


def test_greedy_takes_the_smallest_id_of_the_largest_logit_wherever_it_lies(chooser: ChoosesTokens) -> None:
    logits = torch.zeros(4, 9000)
    logits[0, [4095, 4096, 8999]] = 3.0
    logits[1, 8999] = 1e-30
    logits[2] = -5.0  # all equal
    logits[3, 0] = -1e-30
    found = chooser.choose_tokens(logits, choices([0.0] * 4, [(3, 0.5, 0.1)] * 4, [0.5] * 4))
    assert found.tolist() == [4095, 8999, 0, 1]


def test_equal_weights_at_the_edges_keep_the_smallest_ids(chooser: ChoosesTokens) -> None:
    """Ten equal logits from 4090 on, over the end of a block; nothing else has weight to speak of."""
    logits = torch.full((5, 4200), -200.0)
    logits[:, 4090:4100] = 1.0
    filters = [(3, 1.0, 0.0), (0, 0.5, 0.0), (8, 0.5, 0.0), (0, 0.05, 0.0), (0, 1.0, 0.5)]
    last = 1 - 1e-12
    found = chooser.choose_tokens(logits, choices([1.0] * 5, filters, [last] * 5))
    assert found.tolist() == [4092, 4094, 4093, 4090, 4099]
    first = chooser.choose_tokens(logits, choices([1.0] * 5, filters, [0.0] * 5))
    assert first.tolist() == [4090] * 5


def test_top_k_below_equal_weights_then_top_p_of_what_is_left(chooser: ChoosesTokens) -> None:
    """Weights 1, 1/2, 1/2, 1/2: three are kept, whose sum is 2; nine tenths take all three, seven tenths two."""
    logits = torch.tensor([[0.0, -np.log(2), -np.log(2), -np.log(2)]]).expand(2, 4).contiguous()
    found = chooser.choose_tokens(
        logits, choices([1.0, 1.0], [(3, 0.9, 0.0), (3, 0.7, 0.0)], [0.9999, 0.9999])
    )
    assert found.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("poison", "temperature"),
    [(float("nan"), 0.0), (float("nan"), 1.0), (float("inf"), 1.0), (float("-inf"), 0.0)],
)
def test_a_row_that_is_not_finite_is_told_and_its_neighbours_do_not_change(
    chooser: ChoosesTokens, poison: float, temperature: float
) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    settings = choices([temperature] * 3, [(5, 1.0, 0.0)] * 3, [0.3] * 3)
    before = chooser.choose_tokens(logits, settings).tolist()
    logits[1, 99] = poison
    assert chooser.choose_tokens(logits, settings).tolist() == [before[0], -1, before[2]]


def test_greedy_rows_beside_drawn_ones_and_no_rows_at_all(chooser: ChoosesTokens) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    both = chooser.choose_tokens(logits, choices([0.0, 1.0], [(0, 1.0, 0.0)] * 2, [0.7, 0.7]))
    assert both[0] == logits[0].argmax()
    assert both[1] == by_the_rule(logits[1].numpy(), 1.0, (0, 1.0, 0.0), 0.7)
    none = Choices(*(each[:0] for each in fields(choices([1.0], [(0, 1.0, 0.0)], [0.5]))), draws=False)
    assert chooser.choose_tokens(logits[:0], none).tolist() == []


def fields(given: Choices) -> list[torch.Tensor]:
    return [given.temperatures, given.top_ks, given.top_ps, given.min_ps, given.points]


def test_extreme_temperatures(chooser: ChoosesTokens) -> None:
    """A tiny one leaves all weight on the largest; a huge one levels all."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]) * 1e4
    found = chooser.choose_tokens(logits, choices([1e-5, 1e30], [(0, 1.0, 0.0)] * 2, [0.999, 0.5]))
    assert found.tolist() == [1, 1]
    found = chooser.choose_tokens(logits, choices([1e-5, 1e30], [(0, 0.9, 0.0)] * 2, [0.999, 0.7]))
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("filters", [(0, 1.0, -0.0), (2, 1.0, -0.0), (0, 0.9, -0.0), (2, 0.9, -0.0)])
def test_a_zero_with_a_sign_is_a_zero(chooser: ChoosesTokens, filters: tuple[int, float, float]) -> None:
    """As a limit, whose bits are the lowest of all; as a temperature; as a logit, beside one without a sign."""
    logits = torch.tensor([[0.5, 1.0, 2.0]] * 3 + [[-1.0, -0.0, 0.0]])
    temperatures, points = [1.0, 1.0, -0.0, -0.0], [0.1, 0.8, 0.1, 0.1]
    found = chooser.choose_tokens(logits, choices(temperatures, [filters] * 4, points))
    drawn = [by_the_rule(logits[i].numpy(), 1.0, filters, points[i]) for i in range(2)]
    assert found.tolist() == [*drawn, 2, 1]


def test_a_row_of_a_wider_matrix(chooser: ChoosesTokens) -> None:
    wide = torch.randn(3, 120, generator=torch.Generator().manual_seed(3))
    part = wide[:, :100]
    settings = choices([1.0] * 3, [(9, 0.9, 0.0)] * 3, [0.2, 0.5, 0.8])
    assert torch.equal(
        chooser.choose_tokens(part, settings), chooser.choose_tokens(part.contiguous(), settings)
    )


def test_vocabularies_of_many_equal_weights_sum_without_overflow(chooser: ChoosesTokens) -> None:
    """As many as any model has ids: the last one's point lies at the end of the sum."""
    logits = torch.zeros(2, 262_144)
    settings = choices([1.0, 1.0], [(0, 1.0, 0.0), (0, 0.5, 0.0)], [1 - 1e-12] * 2)
    assert chooser.choose_tokens(logits, settings).tolist() == [262_143, 131_071]


@pytest.mark.parametrize(
    ("equal", "filters", "least"),
    [
        (3, (2, 0.9, 0.0), 30),  # no floor leaves just two: the interval is narrowed to its end
        (1, (2, 0.9, 0.0), 15),
        (1, (0, 0.9, 0.0), 15),
        (1, (0, 1.0, 0.0), 1),
    ],
)
def test_a_draw_walks_its_row_a_known_number_of_times(
    monkeypatch: pytest.MonkeyPatch, equal: int, filters: tuple[int, float, float], least: int
) -> None:
    """Counted as loads of a block of a row that is one block wide; two of them are `_weigh`'s."""
    loads = []
    load = InterpreterBuilder.create_masked_load

    def counting(self: object, places: object, *others: object) -> object:
        loads.append(places.data.size)  # type: ignore[attr-defined]
        return load(self, places, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    logits = torch.linspace(-2, -8, 40).unsqueeze(0)
    logits[0, 1 : 1 + equal] = 0.5
    logits[0, 0] = 1.0
    triton.choose_tokens(logits, choices([1.0], [filters], [0.5]))
    passes = loads.count(sampling.BLOCK) - 2
    assert least <= passes <= sampling.PASSES
