"""What one sequence has brought so far, put together from the engine's outputs, for callers in this process.

Control code: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import failure_of
from .messages import FinishReason, Generate, SequenceOutput, TokenLogprobs
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end token and for other
    reasons."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, where `SamplingParams.logprobs` asked for them."""


@dataclass
class RequestOutput:
    """A prompt and its `n` answers."""

    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache, of the first answer."""


class SequenceCollector:
    """Gathers one sequence: tokens, text, log-probabilities; stops it at a stop string."""

    def __init__(self, tokenizer: Tokenizer, command: Generate, eos_token_ids: frozenset[int]) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._eos_token_ids = eos_token_ids
        self._detokenizer = Detokenizer(tokenizer, command.prompt_token_ids, command.params, eos_token_ids)

    def take(self, output: SequenceOutput) -> bool:
        """Add what one step brought. True: a stop string ended it here, the engine must be told to abort.

        Raises `EngineFailure` where the sequence ended with an error.
        """
        if output.error is not None:
            raise failure_of(output.error)
        finished = output.finish_reason is not None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.cached_tokens += output.cached_tokens or 0
        self.finish_reason = output.finish_reason
        ended_by_token = output.stop_token_id is not None
        delta = self._detokenizer.add(output.token_ids, finished, drop_last=ended_by_token)
        if delta.stopped is not None:
            self.token_ids = self.token_ids[: delta.tokens_used]
            self.logprobs = self.logprobs[: delta.tokens_used]
            self.finish_reason, self.stop_reason = "stop", delta.stopped
            return not finished
        if ended_by_token and output.stop_token_id not in self._eos_token_ids:
            self.stop_reason = output.stop_token_id
        return False

    def completion(self, index: int, with_logprobs: bool) -> CompletionOutput:
        """The finished answer."""
        assert self.finish_reason is not None
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if with_logprobs else None,
        )

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by; needs log-probabilities."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


def best(collectors: Sequence[SequenceCollector], n: int) -> list[SequenceCollector]:
    """The n most likely answers per token, the most likely first; all in their order where none is left
    out."""
    if len(collectors) == n:
        return list(collectors)
    return sorted(collectors, key=lambda collector: -collector.mean_logprob)[:n]
