"""Rows whose tokens the device chooses, beside those that the host samples: the same tokens either way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from heddle import LLM, SamplingParams
from heddle.core.engine.accelerator import Host
from heddle.core.engine.sampler import NotFinite, SampleRow, sample
from heddle.core.engine.token_choice import TokenChoice, rows_of
from heddle.kernels import reference, triton
from heddle.kernels.ops import Choices

VOCAB = 90


class Noting:
    """The reference's choice of tokens; notes how many rows it was given, and whether any drew."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def choose_tokens(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        self.calls.append((len(logits), choices.draws))
        return reference.choose_tokens(logits, choices)


def row(
    output: Sequence[int] = (), allowed: np.ndarray | None = None, seed: int = 3, **params: Any
) -> SampleRow:
    settings = SamplingParams(**{"temperature": 0.9, **params})
    return SampleRow(settings, seed, [1, 2], list(output), frozenset({2}), allowed)


def chosen(logits: torch.Tensor, rows: list[SampleRow]) -> list[tuple[int, bool]]:
    """Checks that the answers are the host sampler's; what went to the device."""
    device = Noting()
    found, expected = TokenChoice(device, Host()).sample(logits, rows), sample(logits, rows)
    assert [type(answer) for answer in found] == [type(answer) for answer in expected]
    for answer, wanted in zip(found, expected):
        assert isinstance(wanted, NotFinite) or answer == wanted
    return device.calls


def test_rows_go_where_what_they_ask_for_is() -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    logits[4, 7] = float("nan")
    allowed = np.zeros(VOCAB, bool)
    allowed[[3, 50]] = True
    rows = [
        row(temperature=0.0),
        row(top_k=5, top_p=0.8, seed=-7),
        row(logprobs=2),
        row(repetition_penalty=1.5, output=[4, 4]),
        row(temperature=0.0),
        row(logit_bias={5: 4.0}),
        row(min_tokens=2, output=[9]),
        row(min_tokens=2, output=[9, 9], min_p=0.1),
        row(allowed=allowed),
    ]
    assert chosen(logits, rows) == [(4, True)]


class Uploading(Host):
    """Whatever is uploaded is memory of the device, and was pinned before."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.uploads = 0

    def pinned(self, *shape: int) -> torch.Tensor:
        memory = super().pinned(*shape)
        self.held.append(memory.data_ptr())
        return memory

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        assert source.data_ptr() in self.held
        self.uploads += 1
        return source.clone()


def test_which_rows_are_taken_goes_to_the_device_from_pinned_memory() -> None:
    """So the host waits for no copy; neighbours are taken without any."""
    values = torch.arange(12.0).view(6, 2)
    device = Uploading()
    assert torch.equal(rows_of(values, [1, 2, 5], device), values[[1, 2, 5]])
    assert device.uploads == 1
    assert rows_of(values, [2, 3, 4], device).data_ptr() == values[2].data_ptr()
    assert device.uploads == 1
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row(temperature=0.0), row(logprobs=2), row(temperature=0.0)]
    found = TokenChoice(Noting(), device).sample(logits, rows)
    assert found == sample(logits, rows)
    assert device.uploads == 3, "the rows that stay there, and what decides their tokens"


def test_a_step_of_greedy_rows_draws_nothing_and_one_without_device_rows_asks_nothing() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    assert chosen(logits, [row(temperature=0.0) for _ in range(3)]) == [(3, False)]
    assert chosen(logits, [row(logprobs=0) for _ in range(3)]) == []


def test_a_temperature_that_counts_as_greedy_is_greedy_on_the_device_too() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    assert chosen(logits, [row(temperature=9e-6), row(temperature=9e-6, top_k=-1)]) == [(2, False)]


def test_drawn_tokens_are_everybody_s_in_a_whole_engine(
    start: Callable[..., LLM], prompts: list[list[int]], monkeypatch: Any
) -> None:
    """By seed, whatever chooses: the host beside the CPU's kernels, or Triton's kernel, which is seen to."""
    given = []
    choose = triton.choose_tokens

    def noting(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        given.append(len(logits))
        return choose(logits, choices)

    monkeypatch.setattr(triton, "choose_tokens", noting)
    params = [
        SamplingParams(max_tokens=3, temperature=1.2, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.8, top_k=20, top_p=0.9, seed=6, ignore_eos=True),
    ]
    tokens = {}
    for backend in ("cpu", "reference", "triton"):
        outputs = start(backend=backend).generate([prompts[1], prompts[8]], params, adapter=["r5", None])
        tokens[backend] = [output.outputs[0].token_ids for output in outputs]
    assert tokens["triton"] == tokens["cpu"] == tokens["reference"]
    assert sum(given) >= 6
