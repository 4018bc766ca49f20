"""An engine without a device: the real control code over `fake_device`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from heddle.core.messages import AdapterUse, EngineError, Generate, SequenceOutput, TokenLogprobs
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.block_pool import BlockPool
from heddle.core.scheduling.plan import StepPlan
from heddle.core.scheduling.restore_cost import RestoreCost, Way
from heddle.core.scheduling.scheduler import Scheduler
from heddle.lora.residency import Residency

from .fake_device import EOS, FakeDevice, FakeFile, ManualExecutor, chosen, extend, logprobs_of, scope_state


@dataclass
class Received:
    """What a client got for one sequence."""

    command: Generate
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int | None = None
    ends: int = 0
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: EngineError | None = None
    aborted: bool = False
    steps: int = 0
    outputs: int = 0


class FakeEngine:
    """Scheduler, residency and pool as the real engine has them, one `step` at a time."""

    def __init__(
        self,
        *,
        blocks: int = 32,
        block_size: int = 4,
        slots: int = 16,
        rows: int = 256,
        host_bytes: int = 1 << 20,
        blocks_per_tick: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_prompt_tokens: int | None = None,
        max_model_len: int = 1 << 16,
        max_queued: int = 1 << 16,
        prefix_caching: bool = True,
        swap_slots: int = 0,
        preemption: Way = "swap",
        patience: int = 8,
        manual_loads: bool = False,
        fair: bool = True,
        order: Sequence[int] | None = None,
    ) -> None:
        self.device = FakeDevice(blocks, block_size, slots, rows)
        self.executor = ManualExecutor()
        self.manual_loads = manual_loads
        self.woken = 0
        self.pool = BlockPool(blocks, order=order)
        self.residency = Residency(
            memory=self.device,
            blocks=self.pool,
            num_slots=slots,
            num_rows=rows,
            host_bytes=host_bytes,
            blocks_per_tick=blocks_per_tick,
            on_loaded=self._wake,
            executor=self.executor,
        )
        self.scheduler = Scheduler(
            pool=self.pool,
            residency=self.residency,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_model_len=max_model_len,
            max_queued=max_queued,
            eos_token_ids=EOS,
            restore_cost=RestoreCost(block_bytes=block_size, copy_rate=2.3, row_rate=1.0, way=preemption),
            swap_slots=swap_slots,
            enable_prefix_caching=prefix_caching,
            fair=fair,
            patience=patience,
        )
        self.received: dict[int, Received] = {}
        self.live: dict[int, Received] = {}
        self.rows_per_step: deque[int] = deque(maxlen=10000)
        self.last_plan: StepPlan | None = None
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def _wake(self) -> None:
        self.woken += 1

    # ---- what a client does

    def know(self, digest: str, blocks: int = 2, *, rows: int = 4, pinned: bool = False, **file: bool) -> str:
        self.device.files[digest] = FakeFile(blocks, rows, **file)
        self.residency.know(digest, digest, pinned)
        return digest

    def submit(
        self,
        prompt: Sequence[int],
        *adapters: str | tuple[str, float],
        key: int | None = None,
        group: int | None = None,
        tenant: str = "public",
        on_cold: Any = "wait",
        **params: Any,
    ) -> int | EngineError:
        key = len(self.received) if key is None else key
        uses = [AdapterUse(use) if isinstance(use, str) else AdapterUse(*use) for use in adapters]
        command = Generate(
            key=key,
            group=key if group is None else group,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**{"seed": 0, **params}),
            adapters=uses,
            tenant=tenant,
            on_cold=on_cold,
        )
        error = self.scheduler.submit(command)
        if error is not None:
            return error
        self.received[key] = self.live[key] = Received(command)
        return key

    def abort(self, *keys: int) -> None:
        self.scheduler.abort(keys)
        for key in keys:
            if key in self.live:
                self.live.pop(key).aborted = True

    def load(self, digest: str) -> None:
        """Ask for it and step until it came, or raise why it did not."""
        self.residency.load(digest)
        for _ in range(100):
            self.step()
            for ended, refusal in self.residency.drain_loads():
                if ended == digest:
                    if refusal is not None:
                        raise refusal
                    self.scheduler.check_integrity()
                    return
        raise AssertionError("the load did not end")

    def where(self, digest: str) -> str:
        return self.residency.state(digest).residency

    # ---- what the engine does

    def run_loads(self) -> None:
        while self.executor.waiting:
            self.executor.run()

    def step(self, *, fail: bool = False, between: Callable[[StepPlan], None] | None = None) -> bool:
        """One step; False where there was nothing to run. `between` is called after schedule, before
        update."""
        if not self.manual_loads:
            self.run_loads()
        self.residency.tick()
        plan = self.last_plan = self.scheduler.schedule()
        for record in self.live.values():
            record.steps += 1
        if plan is None:
            self.take(self.scheduler.drain())
            return False
        assert plan.chunks
        held = set(self.pool.free_blocks())
        assert held.isdisjoint(block for pair in plan.copies for block in pair)
        assert 0 < plan.num_rows <= self.max_num_batched_tokens
        assert len(plan.chunks) == len({chunk.sequence.key for chunk in plan.chunks}) <= self.max_num_seqs
        self.rows_per_step.append(plan.num_rows)
        if between is not None:
            between(plan)
        poison = self.pool.free_blocks()
        if fail:  # nothing was moved or computed, and memory may hold anything
            self.device.poison(poison)
            self.take(self.scheduler.fail(plan, "the device failed"))
        else:
            self.take(self.scheduler.update(plan, self.device.execute(plan, poison)))
        return True

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            record = self.received[output.key]
            assert output.key in self.live, "an output after the end, or after an abort"
            record.outputs += 1
            record.token_ids += output.token_ids
            record.logprobs += output.logprobs or []
            if output.prompt_logprobs is not None:
                assert record.outputs == 1
                record.prompt_logprobs = output.prompt_logprobs
            if output.cached_tokens is not None:
                assert record.outputs == 1
                record.cached_tokens = output.cached_tokens
            if output.finish_reason is not None:
                record.ends += 1
                record.finish_reason = output.finish_reason
                record.stop_token_id = output.stop_token_id
                record.error = output.error
                del self.live[output.key]

    @property
    def asleep(self) -> bool:
        """After a step that ran nothing: no tick has work, no load is under way."""
        return not self.residency.busy and not self.executor.waiting

    def finish(self, limit: int = 20000) -> None:
        """Step until everything has ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            ran = self.step()
            self.scheduler.check_integrity()
            assert ran or not self.asleep or not self.scheduler.has_work, "work is left and nothing moves"
        raise AssertionError(f"{len(self.live)} sequences still live after {limit} steps")

    def tokens(self, key: int) -> list[int]:
        return self.received[key].token_ids

    def counts(self) -> dict[str, int]:
        counts = self.pool.counts()
        assert sum(counts.values()) == self.pool.total
        return counts

    def check_at_rest(self) -> None:
        """Nothing is held by anyone any more."""
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.counts()["used"] == 0
        assert self.scheduler.stats()["swap_used_bytes"] == 0
        for digest in self.device.files:
            if digest in self.residency._adapters:
                assert self.residency.state(digest).in_use == 0

    # ---- what is right

    def expected(self, record: Received) -> tuple[list[int], str]:
        """Tokens and finish reason of a command, from the model alone."""
        command = record.command
        params = command.params
        state = scope_state(command.tenant, command.adapters)
        for token in command.prompt_token_ids:
            state = extend(state, token)
        tokens: list[int] = []
        while params.max_tokens is None or len(tokens) < params.max_tokens:
            token = chosen(state, params.seed)
            tokens.append(token)
            state = extend(state, token)
            if len(tokens) >= params.min_tokens:
                if token in EOS and not params.ignore_eos:
                    return tokens, "stop"
                if token in params.stop_token_ids:
                    return tokens, "stop"
            if len(tokens) > 5000:
                break
        return tokens, "length"

    def check_answer(self, record: Received) -> None:
        """A sequence that ended by itself has exactly the answer it has alone."""
        tokens, reason = self.expected(record)
        prompt = record.command.prompt_token_ids
        assert record.ends == 1
        if record.command.params.max_tokens is None and record.finish_reason == "length":
            assert record.token_ids == tokens[: len(record.token_ids)]
            assert record.token_ids
        else:
            assert (record.token_ids, record.finish_reason) == (tokens, reason)
        if record.finish_reason == "stop":
            assert record.stop_token_id == record.token_ids[-1]
        assert record.cached_tokens is not None
        assert 0 <= record.cached_tokens <= max(0, len(prompt) - 1)
        states, state = [], scope_state(record.command.tenant, record.command.adapters)
        for token in prompt + record.token_ids:
            state = extend(state, token)
            states.append(state)
        assert record.logprobs == [logprobs_of(row) for row in states[len(prompt) - 1 : -1]]
        if record.command.params.prompt_logprobs is not None:
            assert record.prompt_logprobs == [None, *(logprobs_of(row) for row in states[: len(prompt) - 1])]


@pytest.fixture
def engine() -> type[FakeEngine]:
    """The class: tests build one with the sizes they need."""
    return FakeEngine
