"""An engine without a device: the real control code over a model and a memory made of dictionaries.

The model's next token is a number made of all that KV may depend on: the scope (tenant, adapters, weights)
and every token before. The memory remembers for each slot of each block what was written there, and every
step reads back the whole context of every row: a stale, foreign or freed block cannot pass.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from heddle.core.block_pool import BlockPool
from heddle.core.messages import AdapterUse, EngineError, Generate, SequenceOutput, TokenLogprobs
from heddle.core.plan import Sampled, StepPlan, StepResult
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduler import Scheduler
from heddle.lora.adapter_memory import AdapterSize, HostAdapter
from heddle.lora.errors import AdapterCorrupt
from heddle.lora.residency import Residency

VOCAB = 61
EOS = frozenset({0})
MASK = (1 << 61) - 1


def extend(state: int, token: int) -> int:
    """What stands for a context one token longer."""
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK


def scope_state(tenant: str, adapters: Iterable[AdapterUse]) -> int:
    text = tenant + "".join(f"|{use.digest}*{use.weight}" for use in adapters)
    return zlib.crc32(text.encode()) + 1


def logprobs_of(state: int) -> TokenLogprobs:
    return TokenLogprobs(-(state % 1000) / 100, [])


def chosen(state: int, seed: int | None) -> int:
    assert seed is not None
    return ((state >> 20) + 7919 * seed) % VOCAB


@dataclass(frozen=True)
class FakeFile:
    """A file of the store: what it takes, and what goes wrong with it."""

    blocks: int
    rows: int = 4
    corrupt: bool = False
    unreadable: bool = False


@dataclass(frozen=True)
class FakeHostAdapter:
    digest: str
    num_blocks: int
    num_rows: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks


class ManualExecutor(Executor):
    """Runs nothing until told to, in the order the test wants."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        return future

    def run(self, index: int = 0) -> None:
        future, fn, args = self.waiting.pop(index)
        try:
            result = fn(*args)
        except (AdapterCorrupt, OSError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class FakeDevice:
    """`AdapterMemory` and the runner in one: KV slots, adapter pages, tables and row entries as
    dictionaries."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, num_rows: int) -> None:
        self.block_size = block_size
        self.kv: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.pages: list[tuple[str, int] | None] = [None] * num_blocks
        self.tables: dict[int, tuple[str, tuple[int, ...], int]] = {}
        self.rows: list[tuple[str, int] | None] = [None] * num_rows
        self.num_slots = num_slots
        self.files: dict[str, FakeFile] = {}
        self.host_loads: list[str] = []
        self.measured: list[str] = []
        self.moves = 0

    # ---- AdapterMemory; the path of a file is its digest

    def measure(self, path: str) -> AdapterSize:
        self.measured.append(path)
        file = self.files[path]
        if file.unreadable:
            raise FileNotFoundError(2, "No such file or directory", path)
        return AdapterSize(blocks=file.blocks, rows=file.rows, nbytes=file.blocks)

    def load_host(self, path: str) -> FakeHostAdapter:
        self.host_loads.append(path)
        file = self.files[path]
        if file.corrupt:
            raise AdapterCorrupt("the bytes do not match the digest")
        return FakeHostAdapter(path, file.blocks, file.rows)

    def copy_pages(self, host: FakeHostAdapter, first: int, blocks: Sequence[int]) -> None:
        for page, block in enumerate(blocks, first):
            self.kv[block] = [None] * self.block_size
            self.pages[block] = (host.digest, page)

    def write_tables(self, host: FakeHostAdapter, blocks: Sequence[int], slot: int, first_row: int) -> None:
        assert 0 <= slot < self.num_slots
        assert first_row + host.num_rows <= len(self.rows)
        assert len(blocks) == host.num_blocks
        self.tables[slot] = (host.digest, tuple(blocks), first_row)
        self.rows[first_row : first_row + host.num_rows] = [
            (host.digest, row) for row in range(host.num_rows)
        ]

    def move_rows(self, slot: int, first_row: int, num_rows: int, to: int) -> None:
        assert to < first_row
        digest, blocks, first = self.tables[slot]
        assert first == first_row
        self.rows[to : to + num_rows] = self.rows[first_row : first_row + num_rows]
        self.tables[slot] = (digest, blocks, to)
        self.moves += 1

    # ---- the runner

    def poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.kv[block] = [None] * self.block_size
            self.pages[block] = None

    def check_adapter(self, digest: str, slot: int) -> None:
        """The slot's tables, its pages and its rows are this adapter's, whole."""
        owner, blocks, first_row = self.tables[slot]
        assert owner == digest, "a row would take another adapter"
        assert [self.pages[block] for block in blocks] == [(digest, page) for page in range(len(blocks))]
        count = self.files[digest].rows
        assert self.rows[first_row : first_row + count] == [(digest, row) for row in range(count)]

    def execute(self, plan: StepPlan) -> StepResult:
        size = self.block_size
        states: list[list[int]] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            stop = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids, "a chunk without rows"
            assert len(chunk.adapter_slots) == len(sequence.adapters) == len(chunk.adapter_weights)
            for use, slot in zip(sequence.adapters, chunk.adapter_slots):
                self.check_adapter(use.digest, slot)
            contexts, state = [], scope_state(sequence.tenant, sequence.adapters)
            tokens = sequence.prompt_token_ids + sequence.output_token_ids
            assert chunk.token_ids == tokens[chunk.start : stop]
            for token in tokens[:stop]:
                state = extend(state, token)
                contexts.append(state)
            states.append(contexts)
            assert len(chunk.block_table) == -(-stop // size)
            for position in range(chunk.start, stop):
                block = chunk.block_table[position // size]
                self.pages[block] = None
                self.kv[block][position % size] = contexts[position]
        sampled: dict[int, Sampled] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for chunk, contexts in zip(plan.chunks, states):  # what the rows see is read after all were written
            seen = [entry for block in chunk.block_table for entry in self.kv[block]][: len(contexts)]
            assert seen == contexts, "attention would read a block that does not hold this context"
            assert chunk.sequence.key not in sampled
            if chunk.samples:
                token = chosen(contexts[-1], chunk.sequence.params.seed)
                sampled[chunk.sequence.key] = Sampled(token, logprobs_of(contexts[-1]))
            if chunk.prompt_logprob_rows:
                rows = contexts[chunk.start : chunk.start + chunk.prompt_logprob_rows]
                prompts[chunk.sequence.key] = [logprobs_of(row) for row in rows]
        return StepResult(sampled=sampled, prompt_logprobs=prompts)


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
        max_model_len: int = 1 << 16,
        max_queued: int = 1 << 16,
        prefix_caching: bool = True,
        patience: int = 8,
        manual_loads: bool = False,
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
            max_model_len=max_model_len,
            max_queued=max_queued,
            eos_token_ids=EOS,
            enable_prefix_caching=prefix_caching,
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
        assert 0 < plan.num_rows <= self.max_num_batched_tokens
        assert len(plan.chunks) == len({chunk.sequence.key for chunk in plan.chunks}) <= self.max_num_seqs
        self.rows_per_step.append(plan.num_rows)
        self.device.poison(self.pool.free_blocks())
        if between is not None:
            between(plan)
        if fail:
            self.take(self.scheduler.fail(plan, "the device failed"))
        else:
            self.take(self.scheduler.update(plan, self.device.execute(plan)))
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


def _protocol_check(device: FakeDevice) -> HostAdapter:
    """For the type checker: the fake is an `AdapterMemory`."""
    return device.load_host("")


@pytest.fixture
def engine() -> type[FakeEngine]:
    """The class: tests build one with the sizes they need."""
    return FakeEngine
