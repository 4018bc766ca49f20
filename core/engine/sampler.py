"""From logits to tokens: each row by its own request's parameters, independent of every other row.

The order of a row's steps is vLLM's: log-probabilities of the untouched logits; logit_bias; end tokens masked
below min_tokens, and everything outside the grammar; repetition, frequency and presence penalties; temperature;
min_p; top_k; top_p; one draw.
Each row is worked on alone, in numpy, so that neighbours cannot change a bit of the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..messages import TokenLogprobs
from ..sampling_params import SamplingParams
from ..scheduling.plan import Sampled

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: the distribution has all its weight on the largest logit."""

BLOCK = 256
"""Weights summed up at a time when the distribution is inverted."""

FLOOR = -9999.0
"""Stands for every smaller log-probability, since JSON knows no infinity."""


class SamplingError(ValueError):
    """No token can be chosen from a row; the sequence it belongs to ends with this message."""


class NotFinite(SamplingError):
    """A row has an infinity or a NaN."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


@dataclass(frozen=True)
class SampleRow:
    """What decides the token that follows one row of logits."""

    params: SamplingParams
    seed: int
    """The sequence's own, any signed 64-bit value."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int]
    allowed: np.ndarray | None = None
    """Of a guided sequence: bool [vocab], what its grammar allows; at least one token is."""

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen, the first of several; by a `top_k` of 1 too, however near the next."""
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1

    @property
    def masked(self) -> list[int]:
        """Tokens that would end the sequence too early: before `min_tokens`, or by the end of a guided answer
        whose end tokens are to be ignored."""
        params, guided = self.params, self.allowed is not None
        if len(self.output_token_ids) < params.min_tokens:
            ends = self.eos_token_ids if guided or not params.ignore_eos else ()
            return [*params.stop_token_ids, *ends]
        return [*self.eos_token_ids] if guided and params.ignore_eos else []

    @property
    def adjusts_logits(self) -> bool:
        return self.allowed is not None or self.penalises or bool(self.params.logit_bias) or bool(self.masked)

    @property
    def needs_only_logits(self) -> bool:
        """One token is all that is asked for, and nothing but temperature, min_p, top_k and top_p decides it."""
        return self.params.logprobs is None and not self.adjusts_logits

    @property
    def penalises(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )


def sample(logits: torch.Tensor, requests: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
    """Choose one token a row of logits [R, vocab] float32; a row that has no finite answer gets an error.

    A draw depends on (seed, number of output tokens so far) and the row alone, so that a preempted or
    repeated sequence goes on as it would have.
    """
    best, finite = _best(logits)
    on_host = logits.cpu().numpy() if any(_needs_row(request) for request in requests) else None
    answers: list[Sampled | SamplingError] = []
    for i, request in enumerate(requests):
        if not finite[i]:
            answers.append(NotFinite())
        elif on_host is None or not _needs_row(request):
            answers.append(Sampled(best[i]))
        else:
            answers.append(_answer(on_host[i], best[i], request))
    return answers


def _answer(raw: np.ndarray, best: int, request: SampleRow) -> Sampled | SamplingError:
    """`_sample_row`, whose faults end this row's sequence and no other of the step."""
    try:
        return _sample_row(raw, best, request)
    except Exception as error:
        logger.exception("no token could be chosen with %s", request.params)
        return SamplingError(f"no token could be chosen: {error}")


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that do follow the rows of logits [R, vocab] float32, and of the best.

    Raises NotFinite when a row is.
    """
    _, finite = _best(logits)
    if not all(finite):
        raise NotFinite()
    return [_logprobs(row, token, top) for row, token in zip(logits.cpu().numpy(), next_tokens)]


def _best(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """For each row the smallest id with the largest logit, and whether all of the row is finite."""
    if logits.device.type == "cpu":  # several times faster than torch here
        rows = logits.numpy()
        return rows.argmax(axis=1).tolist(), np.isfinite(rows).all(axis=1).tolist()
    return logits.argmax(dim=1).tolist(), logits.isfinite().all(dim=1).tolist()


def _needs_row(request: SampleRow) -> bool:
    """Whether more than the largest logit matters."""
    return not request.greedy or not request.needs_only_logits


def _sample_row(raw: np.ndarray, best: int, request: SampleRow) -> Sampled | SamplingError:
    """raw: float32 [vocab], all finite; `best`: its argmax."""
    logits = raw
    if request.adjusts_logits:
        logits = _adjusted(raw, request)
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            return SamplingError("every token is ruled out")
        if not np.isfinite(logits[best]):  # an argmax finds a NaN first
            return NotFinite()
    token = best if request.greedy else _draw(logits, logits[best], request)
    top = request.params.logprobs
    return Sampled(token, None if top is None else _logprobs(raw, token, top))


def _adjusted(raw: np.ndarray, request: SampleRow) -> np.ndarray:
    """A copy with bias, masks and penalties: float32 [vocab]."""
    params = request.params
    logits = raw.copy()
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if request.penalises:
        _penalise(logits, request)
    _mask(logits, request)  # last, for what is ruled out stays so whatever was done to it
    return logits


def _penalise(logits: np.ndarray, request: SampleRow) -> None:
    """Subtract and scale in place for what is in the prompt and the answer already."""
    params = request.params
    counts = np.bincount(np.asarray(request.output_token_ids, dtype=np.int64), minlength=len(logits))
    if params.repetition_penalty != 1.0:
        seen = counts > 0
        seen[np.asarray(request.prompt_token_ids, dtype=np.int64)] = True
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    logits -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    logits -= np.float32(params.presence_penalty) * (counts > 0).astype(np.float32)


def _mask(logits: np.ndarray, request: SampleRow) -> None:
    """Rule out in place what would end the answer too early, and what is outside the grammar."""
    early = [token for token in request.masked if token < len(logits)]
    allowed = request.allowed
    if allowed is None:
        logits[early] = -np.inf
        return
    if early:
        later = allowed.copy()
        later[early] = False
        if later.any():  # else the grammar can only end, and it does
            allowed = later
    np.copyto(logits, -np.inf, where=~allowed)


def _draw(logits: np.ndarray, largest: np.float32, request: SampleRow) -> int:
    """One token of the filtered distribution, by inverting its cumulative weights in the order of ids."""
    params = request.params
    # Subtracting first keeps a small temperature from overflowing: the largest exponent is 0.
    weights = logits - largest
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    kept: np.ndarray | None = None  # ids, ascending; None: all
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))  # the largest weight is 1
    if params.top_k > 0:
        kept = _top_k(weights, kept, params.top_k)
    if params.top_p < 1.0:
        kept = _top_k(weights, kept, _top_p_count(weights if kept is None else weights[kept], params.top_p))
    chosen = weights if kept is None else weights[kept]
    # Two steps, block and then place in it, because a running sum over a whole vocabulary is slow.
    blocks = np.add.reduceat(chosen, np.arange(0, len(chosen), BLOCK), dtype=np.float64)
    block, rest = _invert(blocks, uniform(request.seed, len(request.output_token_ids)) * float(blocks.sum()))
    index = block * BLOCK + _invert(chosen[block * BLOCK : (block + 1) * BLOCK], rest)[0]
    return index if kept is None else int(kept[index])


def _invert(weights: np.ndarray, point: float) -> tuple[int, float]:
    """The first index whose cumulative weight (float64) exceeds `point`, and what of `point` lies beyond the
    weights before it."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    # Rounding may lift the point onto the total, beyond which there is no index.
    point = min(point, float(np.nextafter(cumulative[-1], 0.0)))
    index = int(np.searchsorted(cumulative, point, side="right"))
    return index, point - (float(cumulative[index - 1]) if index else 0.0)


def uniform(seed: int, index: int) -> float:
    """The index-th random number of a sequence, in [0, 1): Philox4x64 with key `seed` and counter `index`."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=index)).random())


def _top_k(weights: np.ndarray, kept: np.ndarray | None, count: int) -> np.ndarray:
    """Ids of the `count` largest weights among `kept`, ascending; of equal ones the smallest ids."""
    chosen = weights if kept is None else weights[kept]
    if len(chosen) <= count:
        return np.arange(len(chosen)) if kept is None else kept
    threshold = np.partition(chosen, len(chosen) - count)[len(chosen) - count]
    above = np.flatnonzero(chosen > threshold)
    equal = np.flatnonzero(chosen == threshold)[: count - len(above)]
    order = np.sort(np.concatenate([above, equal]))
    return order if kept is None else kept[order]


def _top_p_count(weights: np.ndarray, share: float) -> int:
    """How many of the largest weights it takes to hold `share` of their total."""
    total = float(weights.sum(dtype=np.float64))
    # All weights below this bound together are less than 1 - share, so the ones sought lie among the others.
    likely = weights[weights >= (1.0 - share) * total / len(weights)]
    cumulative = np.cumsum(np.sort(likely)[::-1], dtype=np.float64)
    return min(int(np.searchsorted(cumulative, share * total, side="left")) + 1, len(weights))


def _logprobs(raw: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """Log-softmax of raw float32 [vocab] at `token` and at the `top` largest; equal ones by id."""
    largest = raw.max()
    normalizer = float(largest) + float(np.log(np.exp(raw - largest).sum(dtype=np.float64)))

    def logprob(index: int) -> float:
        return max(float(raw[index]) - normalizer, FLOOR)

    rank = 1 + int(np.count_nonzero(raw > raw[token])) + int(np.count_nonzero(raw[:token] == raw[token]))
    best = _top_k(raw, None, top) if top else np.empty(0, dtype=np.int64)
    best = best[np.argsort(-raw[best], kind="stable")]
    return TokenLogprobs(logprob(token), [(index, logprob(index)) for index in best.tolist()], rank)
