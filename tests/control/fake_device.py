"""A model and a memory made of dictionaries.

The model's next token is a number made of all that KV may depend on: the scope (tenant, adapters, weights)
and every token before. The memory remembers for each slot of each block what was written there, and every
step reads back the whole context of every row: a stale, foreign or freed block cannot pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import pytest
from heddle.core.messages import AdapterUse, TokenLogprobs
from heddle.core.scheduling.plan import Sampled, StepPlan, StepResult
from heddle.lora.adapter_memory import AdapterSize, ResidencyError
from heddle.lora.errors import AdapterCorrupt

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
        self.late: set[str] = set()
        """Digests whose pages are still under way, however often it is asked."""
        self.settled = 0
        self.new_pages: list[str] = []
        """Digest of every page that was copied."""
        self.host: dict[int, tuple[object, ...]] = {}
        self.copies = 0

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
            self.new_pages.append(host.digest)

    def arrived(self, host: FakeHostAdapter) -> bool:
        return host.digest not in self.late

    def settle(self) -> None:
        self.settled += 1

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

    def move(self, plan: StepPlan) -> None:
        """Out, in, copies: the order that a block needs which is copied out and filled again."""
        assert len({swap.host_slot for swap in plan.swap_out}) == len(plan.swap_out)
        for swap in plan.swap_out:
            self.host[swap.host_slot] = tuple(self.kv[swap.block])
        for swap in plan.swap_in:
            self.kv[swap.block] = list(self.host[swap.host_slot])
            self.pages[swap.block] = None
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])
            self.pages[target] = None
        self.copies += len(plan.copies)

    def execute(self, plan: StepPlan, poison: Iterable[int]) -> StepResult:
        size = self.block_size
        self.move(plan)
        self.poison(poison)
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


def code_of(call: Callable[..., object], *arguments: Any) -> str:
    """The code that this call is refused with."""
    with pytest.raises(ResidencyError) as refusal:
        call(*arguments)
    assert str(refusal.value)
    return refusal.value.code
