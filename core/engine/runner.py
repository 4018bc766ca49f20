"""One step on the device: memory moves, one model forward whatever the mix, tokens chosen where they are
asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

from ...kernels.ops import AdapterTables, token_chooser
from ...kernels.pool import Pool
from ...lora.adapter_entry import short
from ..messages import EngineError, TokenLogprobs
from ..model.llama import LlamaModel
from ..scheduling.plan import Chunk, StepPlan, StepResult
from ..scheduling.sequence import Sequence
from . import batch
from .accelerator import Accelerator
from .grammars import Guide, OutOfGrammar
from .sampler import NotFinite, SampleRow, SamplingError, prompt_logprobs, sample
from .step_graphs import StepGraphs
from .swap_copies import SwapCopies
from .token_choice import TokenChoice, rows_of

LOGIT_ROWS = 256
"""Rows of logits, each as wide as the vocabulary, that exist at one time for prompts' log-probabilities."""
POISON = 0xFF
"""Byte for blocks that hold nothing, in tests: a NaN in every float form."""


class Runner:
    """Turns plans into results. Model, pool and tables are handed in; only `execute` and `poison` write the
    pool."""

    def __init__(
        self,
        model: LlamaModel,
        pool: Pool,
        tables: AdapterTables,
        eos_token_ids: frozenset[int],
        swap_slots: int,
        accelerator: Accelerator,
    ) -> None:
        self.captured: dict[int, torch.Tensor] = {}
        """By sequence key, float32 [tokens, vocab] on the CPU that receives the logits of each of its
        rows."""
        self.guides: Mapping[int, Guide] = {}
        """By sequence key, of the sequences that follow a grammar."""
        self.graphs: StepGraphs | None = None
        """Decode steps that were captured, once they are."""
        self._model = model
        self._pool = pool
        self._tables = tables
        self._eos_token_ids = eos_token_ids
        self._accelerator = accelerator
        chooser = token_chooser(model.ops)
        self._choose = sample if chooser is None else TokenChoice(chooser, accelerator).sample
        self.swap = SwapCopies(pool, swap_slots, accelerator)
        self._steps = 0
        self._forwards = 0
        self._log: TextIO | None = None

    def open_log(self, path: Path) -> None:
        """From now on append one JSON line a step to `path`."""
        self._log = path.open("a", buffering=1)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def poison(self, blocks: list[int]) -> None:
        """Fill blocks that hold nothing with NaN: no answer may change."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self._model.device)
        self._pool.pages().index_fill_(0, ids, POISON)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, poison: list[int] | None = None) -> StepResult:
        """Run the step. Raises what the device raises; a row that gives no token is named in `errors`
        instead. `poison`: blocks that hold nothing once memory has moved, see there."""
        began = time.perf_counter()
        swap_seconds = self.swap.move(plan)
        if poison is not None:
            self.poison(poison)
        before, moved = self._forwards, time.perf_counter()
        result = StepResult(sampled={})
        if plan.chunks:
            result = self._results(plan.chunks, self._forward(plan.chunks))
        self._steps += 1
        if self._log is not None:
            self._write_log(plan, self._forwards - before, time.perf_counter() - began)
        return replace(result, swap_seconds=swap_seconds, forward_seconds=time.perf_counter() - moved)

    def _forward(self, chunks: tuple[Chunk, ...]) -> torch.Tensor:
        """Hidden states [rows of the step, hidden]: a replay where the step was captured, else computed eagerly."""
        self._forwards += 1
        if self.graphs is not None:
            hidden = self.graphs.forward(chunks)
            if hidden is not None:
                return hidden
        step = batch.build(chunks, self._tables, self._pool.layout.block_size, self._accelerator)
        return self._model.forward(step, self._pool)

    def _results(self, chunks: tuple[Chunk, ...], hidden: torch.Tensor) -> StepResult:
        """Logits of the rows that need them, and what they are needed for."""
        result = StepResult(sampled={})
        sampling: list[tuple[Chunk, int]] = []
        first = 0
        for chunk in chunks:
            end = first + len(chunk.token_ids)
            if chunk.samples:
                sampling.append((chunk, end - 1))
            if chunk.prompt_logprob_rows:
                self._score_prompt(chunk, hidden[first : first + chunk.prompt_logprob_rows], result)
            if chunk.sequence.key in self.captured:
                self._capture(chunk, hidden[first:end])
            first = end
        if sampling:
            rows = rows_of(hidden, [row for _, row in sampling], self._accelerator)
            self._sample([chunk for chunk, _ in sampling], self._model.logits(rows), result)
        return result

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor, result: StepResult) -> None:
        requests = [self._sample_row(chunk.sequence, result) for chunk in chunks]
        for chunk, answer in zip(chunks, self._choose(logits, requests)):
            key = chunk.sequence.key
            if key in result.errors:
                continue
            if isinstance(answer, SamplingError):
                result.errors[key] = _failure(chunk.sequence, answer)
                continue
            if (guide := self.guides.get(key)) is not None and answer.token_id not in self._eos_token_ids:
                answer = replace(answer, completes=guide.take(answer.token_id))
            result.sampled[key] = answer

    def _sample_row(self, sequence: Sequence, result: StepResult) -> SampleRow:
        """What decides its next token; a grammar that cannot be followed any more is an error of the result."""
        assert sequence.params.seed is not None, "submitted with a seed"
        allowed = None
        if (guide := self.guides.get(sequence.key)) is not None:
            try:
                allowed = guide.allowed(sequence.output_token_ids)
            except OutOfGrammar as error:
                result.errors[sequence.key] = _failure(sequence, error)
        return SampleRow(
            params=sequence.params,
            seed=sequence.params.seed,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            eos_token_ids=self._eos_token_ids,
            allowed=allowed,
        )

    def _score_prompt(self, chunk: Chunk, hidden: torch.Tensor, result: StepResult) -> None:
        """hidden [R, hidden]: row i is followed by the sequence's token at position chunk.start + i + 1."""
        sequence, start = chunk.sequence, chunk.start + 1
        scores: list[TokenLogprobs] = []
        try:
            for rows in hidden.split(LOGIT_ROWS):
                tokens = sequence.token_ids(start, start + len(rows))
                scores += prompt_logprobs(
                    self._model.logits(rows), tokens, sequence.params.prompt_logprobs or 0
                )
                start += len(rows)
        except SamplingError as error:
            result.errors[sequence.key] = _failure(sequence, error)
        result.prompt_logprobs[sequence.key] = scores

    def _capture(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        target, start = self.captured[chunk.sequence.key], chunk.start
        for rows in hidden[: len(target) - start].split(LOGIT_ROWS):
            target[start : start + len(rows)] = self._model.logits(rows)
            start += len(rows)

    def _write_log(self, plan: StepPlan, forwards: int, seconds: float) -> None:
        assert self._log is not None
        used = {use.digest for chunk in plan.chunks for use in chunk.sequence.adapters}
        line = {
            "step": self._steps,
            "rows": plan.num_rows,
            "sequences": len(plan.chunks),
            "adapters": len(used),
            "forwards": forwards,
            "ms": round(seconds * 1000, 3),
        }
        self._log.write(json.dumps(line) + "\n")


def adapters_at_fault(plan: StepPlan, result: StepResult) -> list[str]:
    """Digests of adapters that made logits overflow. Where a request sums several, or gives one a weight above 1, the
    weights it chose may have done that, and nothing is said of the adapters."""
    found: set[str] = set()
    for chunk in plan.chunks if result.errors else ():
        error, adapters = result.errors.get(chunk.sequence.key), chunk.sequence.adapters
        if error is not None and error.code == "adapter_failed" and len(adapters) == 1:
            found.update(use.digest for use in adapters if abs(use.weight) <= 1)
    return sorted(found)


def _failure(sequence: Sequence, error: SamplingError) -> EngineError:
    """What a sequence ends with that has a row without an answer.

    The base alone gives finite logits; where those of a sequence on adapters are not, the adapters are to blame.
    """
    if isinstance(error, NotFinite) and sequence.digests:
        names = ", ".join(map(short, sequence.digests))
        return EngineError("adapter_failed", f"{error} with adapter {names}", "adapter")
    if isinstance(error, OutOfGrammar):
        return EngineError("invalid_request", str(error), "grammar")
    return EngineError("internal_error", str(error))
