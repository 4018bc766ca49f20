"""Which tokens are computed in the next step, and what came of the last one. Control code: no torch.

The life of a sequence:

    submit --> waiting --admitted--> running --finish rule, abort, error--> finished
                  ^                     |
                  +------preempted------+   slots or blocks ran out: see `MakingWay`; swapped out or not
"""

from __future__ import annotations

from collections.abc import Iterable

from ...lora.residency import Residency
from ..messages import EngineError, FinishReason, Generate, SequenceOutput
from .acceptance import Acceptance
from .admission import Admission
from .block_pool import BlockPool
from .fair_queue import INPUT_UNITS, OUTPUT_UNITS, FairQueue
from .making_way import MakingWay
from .outcome import finish_reason, output_of
from .plan import Sampled, StepPlan, StepResult
from .prefix_cache import PrefixCache
from .prompt_turns import PromptTurns
from .queue_policy import QueuePolicy
from .restore_cost import RestoreCost
from .sequence import Sequence, Status
from .step_draft import StepDraft
from .swap_space import SwapSpace
from .swapper import Swapper
from .tenants import Tenants


class Scheduler:
    """Continuous batching under one budget of tokens a step: decodes first, then chunks of prompts.

    Every accepted sequence ends with exactly one output that has a `finish_reason`, or with none after an
    abort. One plan at a time: each must be answered by `update` or `fail` before the next `schedule`.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        residency: Residency,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queued: int,
        eos_token_ids: frozenset[int],
        restore_cost: RestoreCost,
        swap_slots: int = 0,
        enable_prefix_caching: bool = True,
        fair: bool = True,
        patience: int = 64,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`max_queued`: waiting sequences beyond which new ones are refused as `overloaded`. `swap_slots`:
        blocks that swap space holds. `fair`: between tenants; False: all are served as one. `patience`: steps
        that a sequence may lack room before others make way for it. `max_prompt_tokens`: of a step; None: what
        decodes leave of it."""
        pool.attach(residency.places)
        self._pool = pool
        self._residency = residency
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_prompt_tokens = max_prompt_tokens or max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._acceptance = Acceptance(residency, block_size, max_model_len)
        self._cache = PrefixCache(pool, block_size, enable_prefix_caching)
        self._swapper = Swapper(pool, SwapSpace(swap_slots), restore_cost, block_size)
        self.tenants = Tenants(pool, max_num_seqs, max_queued, told_apart=fair)
        self._queue: QueuePolicy = FairQueue(self.tenants)
        self._way = MakingWay(self.tenants, pool)
        self._turns = PromptTurns(self.tenants)
        self._admission = Admission(
            pool=pool,
            cache=self._cache,
            swapper=self._swapper,
            residency=residency,
            acceptance=self._acceptance,
            queue=self._queue,
            tenants=self.tenants,
            way=self._way,
            max_num_seqs=max_num_seqs,
            patience=patience,
            preempt=self._preempt,
            outgrown=self._outgrown,
        )
        self._live: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # by arrival
        self._draft = StepDraft(0, self._acceptance, residency)  # the step being planned, or the last
        self._in_flight: StepPlan | None = None
        self._aborted: list[Sequence] = []  # in the step in flight: what they hold is freed after it
        self._outbox: list[SequenceOutput] = []
        self._arrivals = self._step = 0
        counted = ("prompt_tokens", "generated_tokens", "cached_tokens", "preemptions")
        self._counters = dict.fromkeys(counted, 0)

    # ------------------------------------------------------------------ in and out

    def submit(self, command: Generate) -> EngineError | None:
        """Queue a sequence; None: accepted. It holds its adapters from now on, and these begin to load.

        Refused: `invalid_request`, `context_length_exceeded`, `capacity_exceeded`, `model_not_found`,
        `adapter_failed`, `adapter_cold`, `rate_limit_exceeded`, `overloaded`.
        """
        if command.key in self._live or any(gone.key == command.key for gone in self._aborted):
            return EngineError("invalid_request", f"a sequence with key {command.key} is under way")
        accepted = self._acceptance.accept(command, self._arrivals)
        if isinstance(accepted, EngineError):
            return accepted
        if command.on_cold == "reject" and not self._residency.on_device(accepted.digests):
            for digest in accepted.digests:
                self._residency.load(digest)  # so that the next try finds it
            return EngineError(
                "adapter_cold", "the adapter is not in device memory; it is being loaded", "adapter"
            )
        if refusal := self.tenants.refusal(accepted):
            return refusal
        self._arrivals += 1
        self._live[accepted.key] = accepted
        self._residency.lease(accepted.key, accepted.digests, self._acceptance.promised(accepted))
        self._queue.add(accepted)
        self.tenants.submitted(accepted)
        return None

    def abort(self, keys: Iterable[int]) -> None:
        """End these sequences without an output; what they hold is free at once, or after the step in flight
        that writes to it. Unknown keys are ignored."""
        keys = set(keys)
        self._outbox = [output for output in self._outbox if output.key not in keys]
        for key in keys:
            sequence = self._live.get(key)
            if sequence is None:
                continue
            if self._in_flight is not None and sequence.status is Status.RUNNING:
                del self._live[key]
                self._stop(sequence)
                self._aborted.append(sequence)
                sequence.status = Status.FINISHED
            else:
                self._remove(sequence)

    def drain(self) -> list[SequenceOutput]:
        """Ends decided outside a step (an adapter that cannot be loaded): for when `schedule` gave None."""
        outputs, self._outbox = self._outbox, []
        return outputs

    @property
    def has_work(self) -> bool:
        """Sequences are queued or running, or loads that were asked for wait for room."""
        return bool(self._live or self._outbox or self._residency.requests)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """The next step; None: nothing can run now (all waits for loads, or there is nothing)."""
        assert self._in_flight is None, "the last plan was not answered"
        self._step += 1
        for key, message in self._residency.failed_leases():
            sequence = self._live.get(key)
            if sequence is not None and sequence.status is not Status.RUNNING:
                error = EngineError("adapter_failed", message)
                self._outbox.append(self._end(sequence, "error", error=error))
        draft = self._draft = StepDraft(self._max_num_batched_tokens, self._acceptance, self._residency)
        for sequence in list(self._running):  # decodes, the oldest first: it finds blocks before the younger
            owes_one = len(sequence) - sequence.num_computed == 1
            if draft.left and owes_one and sequence.status is Status.RUNNING and self._grow(sequence):
                draft.add(sequence, 1)
        draft.left = min(draft.left, self._max_prompt_tokens)
        self._turns.begin(one for one in self._running if len(one) - one.num_computed > 1)
        if draft.left:
            for sequence in self._admission.admit(self._running, self._step, self._has_rows):
                self._add_prompt(sequence)
        self._has_rows(None)
        self._admission.serve_requests(self._running)
        swap_out, swap_in = self._swapper.take_moves()
        if draft.chunks or swap_out:
            self._in_flight = StepPlan(draft.chunks, swap_out, swap_in, self._cache.take_copies())
        return self._in_flight

    def _has_rows(self, waiting: Sequence | None) -> bool:
        """Give the prompts under way that go before `waiting` (None: all) their rows; True: there are some left."""
        while self._draft.left and (prompt := self._turns.next(waiting)) is not None:
            self._add_prompt(prompt)
        return self._draft.left > 0

    def _add_prompt(self, sequence: Sequence) -> None:
        """As many of the tokens it owes as the step has left."""
        rows = min(len(sequence) - sequence.num_computed, self._draft.left)
        self._draft.add(sequence, rows)
        self._turns.served(sequence, INPUT_UNITS * rows)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Take in what the step brought: the outputs of its sequences, and of those that ended outside a
        step."""
        self._land(plan)
        self._swapper.observe(plan, result)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.status is Status.FINISHED:
                continue  # aborted meanwhile
            if sequence.key in result.errors:
                self._outbox.append(self._end(sequence, "error", error=result.errors[sequence.key]))
                continue
            sequence.num_computed = chunk.start + len(chunk.token_ids)
            self._cache.publish(sequence)
            if chunk.prompt_logprob_rows:
                assert sequence.prompt_logprobs is not None
                sequence.prompt_logprobs.extend(result.prompt_logprobs[sequence.key])
            if chunk.samples:
                self._outbox.append(self._add_token(sequence, result.sampled[sequence.key]))
            elif sequence.num_computed == len(sequence):
                self._outbox.append(self._end(sequence, "length"))  # max_tokens is 0
        return self.drain()

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The step could not be computed: its sequences end with an error."""
        for chunk in plan.chunks:
            chunk.sequence.num_computed = 0  # it may have begun on blocks that were to be copied first
        for sequence in self._land(plan):
            self._swapper.drop(sequence)  # nobody knows how far the copies came
            self._start_again(sequence)
        for chunk in plan.chunks:
            if chunk.sequence.status is not Status.FINISHED:
                error = EngineError("internal_error", message)
                self._outbox.append(self._end(chunk.sequence, "error", error=error))
        return self.drain()

    def _land(self, plan: StepPlan) -> list[Sequence]:
        """Nothing is written any more; the sequences that were swapped out with it."""
        assert plan is self._in_flight, "this plan is not in flight"
        self._in_flight = None
        self._cache.landed()
        for sequence in self._aborted:
            self._free(sequence)
            self._release(sequence)
        self._aborted.clear()
        return self._swapper.landed()

    # ------------------------------------------------------------------ blocks run out

    def _grow(self, sequence: Sequence) -> bool:
        """See to it that the sequence has a block for its newest token. False: it is not running any more."""
        if self._acceptance.blocks(len(sequence)) <= len(sequence.block_table):
            return True
        if self._acceptance.room(sequence.digests) < len(sequence):
            self._outgrown(sequence)
            return False
        account = self.tenants.account(sequence)
        while sequence.status is Status.RUNNING:
            if len(account.running) > 1 and self._way.beyond_cap(account, 1):
                self._preempt(account.running[-1])
            elif self._residency.give_way(1):
                block = self._pool.reserve((), 1, account.name)
                assert block is not None
                sequence.block_table += block
                return True
            else:
                assert len(self._running) > 1, "a sequence that was accepted does not fit alone"
                self._preempt(self._way.for_growth(self._running))
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """It gives its blocks back and queues again; its tokens stay, and their KV is swapped out, or
        computed again."""
        self._running.remove(sequence)
        self.tenants.preempted(sequence)
        self._draft.drop(sequence.key)
        self._turns.drop(sequence)
        self._way.protect(sequence)
        swapped = self._swapper.out(sequence)
        self._free(sequence)
        sequence.status = Status.PREEMPTED
        if not swapped:
            self._start_again(sequence)
        self._queue.add(sequence)
        self._counters["preemptions"] += 1

    def _start_again(self, sequence: Sequence) -> None:
        """All its tokens are owed to the model once more."""
        sequence.num_computed = 0
        if sequence.owes_prompt_logprobs:
            sequence.prompt_logprobs = [None]

    def _outgrown(self, sequence: Sequence) -> None:
        """Pins have taken since what it could have used: it has all that there is."""
        assert sequence.open_ended
        self._outbox.append(self._end(sequence, "length"))

    # ------------------------------------------------------------------ ends

    def _add_token(self, sequence: Sequence, sampled: Sampled) -> SequenceOutput:
        sequence.output_token_ids.append(sampled.token_id)
        self._queue.charge(sequence, OUTPUT_UNITS)
        self._turns.served(sequence, OUTPUT_UNITS)
        self._counters["generated_tokens"] += 1
        reason = "stop" if sampled.completes else finish_reason(sequence, self._eos_token_ids)
        if reason is None:
            return self._output(sequence, sampled)
        return self._end(sequence, reason, sampled)

    def _output(
        self,
        sequence: Sequence,
        sampled: Sampled | None = None,
        reason: FinishReason | None = None,
        error: EngineError | None = None,
    ) -> SequenceOutput:
        if not sequence.reported and sequence.cached_tokens is not None:
            self._counters["prompt_tokens"] += len(sequence.prompt_token_ids)
            self._counters["cached_tokens"] += sequence.cached_tokens
        return output_of(sequence, sampled, reason, error)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        sampled: Sampled | None = None,
        error: EngineError | None = None,
    ) -> SequenceOutput:
        """Free all it holds; its last output."""
        self._remove(sequence)
        return self._output(sequence, sampled, reason, error)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
            self._free(sequence)
        else:
            self._queue.remove(sequence)
            self.tenants.withdrawn(sequence)
            self._swapper.drop(sequence)
        sequence.status = Status.FINISHED
        del self._live[sequence.key]
        self._release(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.tenants.stopped(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Blocks, and the hold on its adapters' places. What was computed in them may be found again."""
        self._cache.publish_part(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        self._residency.unhold(sequence.key)

    def _release(self, sequence: Sequence) -> None:
        self._residency.release(sequence.key)
        self._admission.fence.ended(sequence.key)

    # ------------------------------------------------------------------ for others to look at

    def stats(self) -> dict[str, int]:
        """The fields of `messages.Stats` but steps and step_seconds."""
        counts = self._pool.counts()
        adapters = self._residency.stats()
        return {
            "running": len(self._running),
            "waiting": len(self._queue),
            "blocks_total": self._pool.total,
            **{f"blocks_{state}": count for state, count in counts.items()},
            "blocks_pinned": adapters["blocks_pinned"],
            "host_copy_bytes": adapters["host_copy_bytes"],
            "adapter_loads": adapters["adapter_loads"],
            "adapter_evictions": adapters["adapter_evictions"],
            **self._swapper.stats(),
            **self._counters,
        }

    def check_integrity(self) -> None:
        """AssertionError where a block, a lease or a sequence is lost, or held twice. For tests."""
        holders = [*self._running, *self._aborted]
        tables = [*(sequence.block_table for sequence in holders), self._cache.sources]
        assert not self._cache.sources or self._in_flight is not None
        self._pool.check_integrity(tables, self._residency.places.pages())
        keys = [*self._live, *(sequence.key for sequence in self._aborted)]
        self._residency.check_integrity(keys, [sequence.key for sequence in holders])
        waiting = list(self._queue)
        assert len(waiting) == len(self._queue)
        assert {sequence.key for sequence in [*self._running, *waiting]} == self._live.keys()
        assert len(self._running) + len(waiting) == len(self._live)
        assert all(sequence.status is Status.RUNNING for sequence in self._running)
        arrivals = [sequence.arrival for sequence in self._running]
        assert arrivals == sorted(arrivals)
        for sequence in self._running:
            assert sequence.num_computed < len(sequence) or self._in_flight is not None
            assert self._acceptance.blocks(sequence.num_computed) <= len(sequence.block_table)
        for sequence in waiting:
            assert sequence.status in (Status.WAITING, Status.PREEMPTED)
            assert not sequence.block_table
            assert not sequence.host_slots or sequence.status is Status.PREEMPTED
            assert len(sequence.host_slots) == self._acceptance.blocks(sequence.num_computed), "KV is lost"
        self._swapper.check_integrity(waiting)
        self.tenants.check_integrity(self._running, waiting)
        assert not any(sequence.host_slots for sequence in holders)
