"""A stand-in for the engine client in tests of the HTTP side: it speaks a fixed text, token by token."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from heddle.core.config import EngineConfig
from heddle.core.errors import EngineFailure
from heddle.core.memory import MemoryPart, MemoryReport
from heddle.core.messages import (
    AdapterState,
    EngineError,
    Generate,
    Ready,
    SequenceOutput,
    Stats,
    TenantShare,
    TokenLogprobs,
)
from heddle.core.sequence_outputs import SequenceOutputs

MEMORY = MemoryReport(
    device="cpu",
    quantization="none",
    quantization_reason="test",
    weight_bytes=300,
    weights=[
        MemoryPart(part="projections", bytes=101, weights=100, bytes_per_weight=1.01),
        MemoryPart(part="head", bytes=191, weights=100, bytes_per_weight=1.91),
        MemoryPart(part="rotary tables", bytes=8),
    ],
    pool_bytes=64 * 4096,
    pool=[MemoryPart(part="free", bytes=64 * 4096, blocks=64)],
    block_bytes=4096,
    blocks_total=64,
    blocks_free=64,
    blocks_used=0,
    blocks_cached=0,
    blocks_adapters=0,
    table_bytes=7,
    host=[MemoryPart(part="adapter copies", bytes=0, budget=5000)],
    process_bytes=1000,
    process=[MemoryPart(part="weights", bytes=300), MemoryPart(part="not accounted for", bytes=700)],
)
END = 257
"""The end token of the tests' tokenizer, which otherwise has one token a byte."""


class StubEngine:
    """Every sequence says `script`, and then the end token; behind an adapter's first hex digit where it has
    one.

    Tests read what it was told and set how it behaves; nothing in here is copied from the real engine's
    behaviour but its interface.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ready: Ready | None = None
        self.stats = Stats()
        self.pid = os.getpid()
        self.adapters: dict[str, AdapterState] = {}
        self.not_finite: set[str] = set()
        self.paths: dict[str, str] = {}
        self.tenants: dict[str, TenantShare] = {}
        self.restarts = 0
        self.running: set[int] = set()
        self._keys = itertools.count(1)
        self._speakers: dict[int, asyncio.Task[None]] = {}
        self.reset()

    def reset(self) -> None:
        """Behave as at first, and forget what was said."""
        self.script = b"hello"
        self.end_token = END
        self.delay = 0.0
        self.hang_after: int | None = None
        """Stop speaking after so many tokens, as a slow engine does, until `released`."""
        self.released = asyncio.Event()
        self.refusal: EngineError | None = None
        self.fail_after: int | None = None
        """End with an error after so many tokens."""
        self.cached_tokens = 0
        self.logprob = -0.5
        self.longest = 100_000
        """No answer has more tokens, whatever is asked for."""
        self.burst = 1
        """Tokens in one output."""
        self.commands: list[Generate] = []
        self.submitted_at_once: list[int] = []
        self.aborted: list[int] = []
        self.pin_limit = 2
        self.too_large: set[str] = set()
        """Digests that can neither be pinned nor loaded."""

    async def start(self) -> Ready:
        self.ready = Ready(
            device="cpu",
            dtype="float32",
            quantization="none",
            quantization_reason="test",
            max_model_len=self.config.max_model_len or 256,
            num_blocks=64,
            block_size=16,
            block_bytes=4096,
            weight_bytes=300,
            memory=MEMORY,
        )
        return self.ready

    async def close(self) -> None:
        self.ready = None

    def new_key(self) -> int:
        return next(self._keys)

    def submit(self, commands: Sequence[Generate], beside: SequenceOutputs | None = None) -> SequenceOutputs:
        if self.refusal is not None:
            raise EngineFailure(self.refusal)

        def abort(keys: Iterable[int]) -> None:
            for key in keys:
                self._speakers[key].cancel()

        self.submitted_at_once.append(len(commands))
        keys = [command.key for command in commands]
        outputs = SequenceOutputs((), abort) if beside is None else beside
        outputs.add(keys)

        async def speak(command: Generate) -> None:
            try:
                async for output in self.generate(command):
                    outputs.put(output)
            except EngineFailure as failure:
                outputs.put(SequenceOutput(key=command.key, finish_reason="error", error=failure.error))

        for command in commands:
            self._speakers[command.key] = asyncio.create_task(speak(command))
        return outputs

    async def generate(self, command: Generate) -> AsyncIterator[SequenceOutput]:
        if self.refusal is not None:
            raise EngineFailure(self.refusal)
        if any(use.digest not in self.adapters for use in command.adapters):
            raise EngineFailure(EngineError("model_not_found", "no such digest"))
        self.commands.append(command)
        self.running.add(command.key)
        done = False
        try:
            await asyncio.sleep(0)
            async for output in self._speak(command):
                done = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(command.key)
            if not done:
                self.aborted.append(command.key)

    async def _speak(self, command: Generate) -> AsyncIterator[SequenceOutput]:
        params = command.params
        limit = params.max_tokens
        if limit is None:
            limit = (self.config.max_model_len or 256) - len(command.prompt_token_ids)
        limit = min(limit, self.longest)
        prefix = "".join(use.digest.removeprefix("sha256:")[0] for use in command.adapters).encode()
        words = [*prefix, *self.script]
        if params.ignore_eos:
            words = list(itertools.islice(itertools.cycle(words), limit))
        tokens = [*words, self.end_token][:limit]
        first: dict[str, Any] = {"cached_tokens": self.cached_tokens}
        if (count := params.prompt_logprobs) is not None:
            rows = [self._logprobs(token, count) for token in command.prompt_token_ids[1:]]
            first["prompt_logprobs"] = [None, *rows]
        if not tokens:
            yield SequenceOutput(key=command.key, finish_reason="length", **first)
            return
        for start in range(0, len(tokens), self.burst):
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.hang_after is not None and start >= self.hang_after:
                await self.released.wait()
            if self.fail_after is not None and start >= self.fail_after:
                error = EngineError("internal_error", "the engine process died")
                yield SequenceOutput(key=command.key, finish_reason="error", error=error)
                return
            new = tokens[start : start + self.burst]
            last = start + len(new) == len(tokens)
            ends = last and (new[-1] == self.end_token)
            yield SequenceOutput(
                key=command.key,
                token_ids=new,
                logprobs=None
                if params.logprobs is None
                else [self._logprobs(t, params.logprobs) for t in new],
                finish_reason=("stop" if ends else "length") if last else None,
                stop_token_id=new[-1] if ends else None,
                **first,
            )
            first = {}

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(self.logprob, [((token + i) % 256, self.logprob - i) for i in range(count)], 1)

    def abort(self, keys: Iterable[int]) -> None:
        self.aborted.extend(keys)

    async def know(self, digest: str, path: str, pinned: bool = False) -> AdapterState:
        self.paths[digest] = path
        self._set(digest, pinned=pinned, error=None)
        return self.adapters[digest]

    async def forget(self, digest: str) -> None:
        self.adapters.pop(digest, None)
        self.paths.pop(digest, None)

    async def load(self, digest: str) -> AdapterState:
        if digest in self.too_large:
            raise EngineFailure(EngineError("capacity_exceeded", "the adapter is larger than the pool"))
        self._set(digest, residency="device", blocks=3)
        return self.adapters[digest]

    async def evict(self, digest: str, to: str = "host") -> AdapterState:
        self._set(digest, residency=to, blocks=0)
        return self.adapters[digest]

    async def pin(self, digest: str, pinned: bool) -> AdapterState:
        count = sum(state.pinned for other, state in self.adapters.items() if other != digest)
        if pinned and (count >= self.pin_limit or digest in self.too_large):
            raise EngineFailure(EngineError("pin_limit", "pins may hold half of the pool"))
        self._set(digest, pinned=pinned, size=3)
        return self.adapters[digest]

    @property
    def shares(self) -> dict[str, TenantShare]:
        """By tenants' names: what comes before the mark that tells tenants of one name apart."""
        return {name.partition("#")[0]: share for name, share in self.tenants.items()}

    def set_tenant(self, share: TenantShare) -> None:
        self.tenants[share.name] = share

    def forget_tenant(self, name: str) -> None:
        self.tenants.pop(name, None)

    async def memory(self) -> MemoryReport:
        return MEMORY

    def _set(self, digest: str, **changes: object) -> None:
        state = self.adapters.get(digest) or AdapterState(digest=digest, residency="disk")
        fields = {name: getattr(state, name) for name in state.__struct_fields__} | changes
        self.adapters[digest] = AdapterState(**fields)
