"""Which rows' tokens the device chooses itself, where its operations can, and which the sampler does on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.ops import Choices, ChoosesTokens
from ..scheduling.plan import Sampled
from . import batch
from .accelerator import Accelerator
from .sampler import NotFinite, SampleRow, SamplingError, sample, uniform


class TokenChoice:
    """`sampler.sample` for logits that are on a device whose operations choose tokens.

    Rows that need nothing but their logits stay there: no grammar, penalty, bias, minimum or log-probabilities. Their
    random numbers are the host's own, so a draw depends on the seed, the number of output tokens and the row alone.
    Which of the two a request's rows go to depends on its parameters and its own output alone.
    """

    def __init__(self, operations: ChoosesTokens, accelerator: Accelerator) -> None:
        self._operations = operations
        self._accelerator = accelerator

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
        """One answer a row of logits [R, vocab] float32."""
        there = [i for i, request in enumerate(requests) if request.needs_only_logits]
        here = [i for i, request in enumerate(requests) if not request.needs_only_logits]
        answers: dict[int, Sampled | SamplingError] = {}
        chosen = None
        if there:
            chosen = self._choose(rows_of(logits, there, self._accelerator), [requests[i] for i in there])
        if here:
            answers.update(
                zip(here, sample(rows_of(logits, here, self._accelerator), [requests[i] for i in here]))
            )
        if chosen is not None:
            for i, token in zip(there, chosen.tolist()):
                answers[i] = NotFinite() if token < 0 else Sampled(token)
        return [answers[i] for i in range(len(requests))]

    def _choose(self, logits: torch.Tensor, requests: Sequence[SampleRow]) -> torch.Tensor:
        """Asked for, not waited for."""
        params = [request.params for request in requests]
        draws = not all(request.greedy for request in requests)
        arrays: dict[str, np.ndarray] = {
            "top_ps": np.array([each.top_p for each in params], np.float64),
            "points": np.array(
                [0.0 if each.greedy else uniform(each.seed, len(each.output_token_ids)) for each in requests],
                np.float64,
            ),
            "temperatures": np.array(
                [0.0 if each.greedy else each.params.temperature for each in requests], np.float32
            ),
            "min_ps": np.array([each.min_p for each in params], np.float32),
            "top_ks": np.array([max(0, each.top_k) for each in params], np.int32),
        }
        tensors = batch.transfer(arrays, self._accelerator)
        return self._operations.choose_tokens(logits, Choices(**tensors, draws=draws))


def rows_of(values: torch.Tensor, rows: Sequence[int], accelerator: Accelerator) -> torch.Tensor:
    """values[rows], ascending and at least one; neighbours, as all rows of a step of decodes are, without a copy. The
    host waits for nothing: which rows they are goes to the device as a step's inputs do."""
    begin, end = rows[0], rows[-1] + 1
    if end - begin == len(rows):
        return values[begin:end]
    return values[batch.transfer({"rows": np.array(rows, np.int64)}, accelerator)["rows"]]
