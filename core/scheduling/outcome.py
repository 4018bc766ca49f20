"""What a step brought for one sequence: is it its end, and what is said of it. Control code: no torch."""

from __future__ import annotations

from ..messages import EngineError, FinishReason, SequenceOutput
from .plan import Sampled
from .sequence import Sequence


def finish_reason(sequence: Sequence, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """What its newest token ends it with; None: it goes on."""
    params, outputs = sequence.params, sequence.output_token_ids
    if params.grammar is not None and outputs[-1] in eos_token_ids:
        return "stop"  # chosen where the grammar allows an end: no later rule takes that back
    if len(outputs) >= params.min_tokens:
        if outputs[-1] in eos_token_ids and not params.ignore_eos:
            return "stop"
        if outputs[-1] in params.stop_token_ids:
            return "stop"
    return "length" if len(outputs) >= sequence.max_tokens else None


def output_of(
    sequence: Sequence, sampled: Sampled | None, reason: FinishReason | None, error: EngineError | None
) -> SequenceOutput:
    """The next output of this sequence; the first tells of its prompt too."""
    first, sequence.reported = not sequence.reported, True
    stopped = sampled is not None and reason == "stop" and not sampled.completes
    return SequenceOutput(
        key=sequence.key,
        token_ids=[] if sampled is None else [sampled.token_id],
        logprobs=None if sampled is None or sampled.logprobs is None else [sampled.logprobs],
        prompt_logprobs=sequence.prompt_logprobs if first and not sequence.owes_prompt_logprobs else None,
        cached_tokens=sequence.cached_tokens if first else None,
        finish_reason=reason,
        stop_token_id=sampled.token_id if sampled is not None and stopped else None,
        error=error,
    )
