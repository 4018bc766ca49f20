"""The API process's side of the engine: submit, abort, adapter calls; keeps the engine process alive.

One `EngineClient` owns one engine process. When the process dies, its sequences end with an error, it is
started again (after a pause that grows while it keeps dying), and it is told again which adapters and tenants
there are. Control code: no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal

from .config import EngineConfig
from .engine.child import END_SECONDS, EngineChild
from .engine.launch import LaunchedEngine, launch
from .errors import EngineFailure, EngineStartError
from .memory import MemoryReport
from .messages import (
    Abort,
    AdapterState,
    Command,
    EngineError,
    Event,
    EvictAdapter,
    Failed,
    ForgetAdapter,
    ForgetTenant,
    Generate,
    GetMemory,
    KnowAdapter,
    LoadAdapter,
    Outputs,
    PinAdapter,
    Progress,
    Ready,
    Reply,
    SequenceOutput,
    SetTenant,
    Shutdown,
    Stats,
    TenantShare,
)
from .sequence_outputs import SequenceOutputs

__all__ = ["EngineClient", "EngineFailure", "EngineStartError"]

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds between an engine's death and the next start; doubles with each death."""
STEADY_SECONDS = 60.0
"""An engine that lived this long starts the pauses anew."""


class EngineClient:
    """All methods belong to one event loop. Between `start` and `close` the engine is kept running."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.config = config
        self.ready: Ready | None = None
        """None while no engine is serving: before the start, during a restart, after the close."""
        self.stats = Stats()
        self.adapters: dict[str, AdapterState] = {}
        """Of every known adapter, by digest, as the engine last reported it."""
        self.not_finite: set[str] = set()
        """Digests of adapters that made a sequence's logits overflow."""
        self.restarts = 0
        self._on_progress = on_progress
        self._launched: LaunchedEngine | None = None
        self._child: EngineChild | None = None
        self._known: dict[str, KnowAdapter] = {}
        self._tenants: dict[str, TenantShare] = {}
        self._streams: dict[int, SequenceOutputs] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._closing = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

    def adopt(self, launched: LaunchedEngine) -> None:
        """Before `start`: its first process, launched already with the same settings."""
        self._launched = launched

    async def start(self) -> Ready:
        """Start the engine and wait until it serves. Raises `EngineStartError` where it cannot."""
        assert self._supervisor is None, "an EngineClient is started once"
        first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(first), name="engine supervisor")
        try:
            return await first
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine process and everything that waits for it (code `shutting_down`). Idempotent."""
        self._closing.set()
        if self._supervisor is None:
            return
        if self._child is not None:
            if self.ready is None:
                self._child.kill()  # it is loading, and does not look at commands
            else:
                self._child.send([Shutdown()])
        done, _ = await asyncio.wait([self._supervisor], timeout=END_SECONDS)
        if not done:
            if self._child is not None:
                self._child.kill()
            await asyncio.wait([self._supervisor])

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._child is None else self._child.pid

    def new_key(self) -> int:
        """A number no sequence of this client has had, good for `Generate.key` and `Generate.group`."""
        return next(self._numbers)

    # ---------------------------------------------------------------- sequences

    async def generate(self, command: Generate) -> AsyncIterator[SequenceOutput]:
        """Submit one sequence and yield its outputs; the last has a `finish_reason`.

        Raises `EngineFailure` where it ends with an error before its first token: refused, or the engine is
        down or died. An error after that is the last item, with finish_reason "error". Closing the iterator
        early aborts.
        """
        outputs = self.submit([command])
        begun = ended = False
        try:
            while not ended:
                for output in await outputs.take():
                    ended = output.finish_reason is not None
                    if output.error is not None and not begun:
                        raise EngineFailure(output.error)
                    begun = True
                    yield output
        finally:
            outputs.close()

    def submit(self, commands: Sequence[Generate], beside: SequenceOutputs | None = None) -> SequenceOutputs:
        """Submit sequences together, and have their outputs in one place, that of earlier ones where it is given;
        `close` it.

        An error is a sequence's last output, with finish_reason "error". Raises `EngineFailure` where the engine
        is down, or a number is out of range; then nothing was submitted.
        """
        child = self._serving()
        try:
            child.send(commands)
        except OverflowError as error:
            message = "a number in this request is out of range"
            raise EngineFailure(EngineError("invalid_request", message)) from error
        keys = [command.key for command in commands]
        if beside is None:
            outputs = SequenceOutputs(keys, self.abort)
        else:
            outputs = beside
            outputs.add(keys)
        self._streams.update(dict.fromkeys(keys, outputs))
        return outputs

    def abort(self, keys: Iterable[int]) -> None:
        """Free what these sequences hold; who still iterates over one gets a last item "abort". Unknown keys
        are ignored."""
        live = [key for key in keys if key in self._streams]
        for key in live:
            self._streams.pop(key).put(SequenceOutput(key=key, finish_reason="abort"))
        if live and self._child is not None and self.ready is not None:
            self._child.send([Abort(live)])

    # ---------------------------------------------------------------- adapters

    async def know(self, digest: str, path: str, pinned: bool = False) -> AdapterState:
        """Make an adapter usable, now and in every later engine process. Loads nothing."""
        command = KnowAdapter(digest=digest, path=path, pinned=pinned)
        self._known[digest] = command
        if digest not in self.adapters or self.adapters[digest].error is not None:
            self.adapters[digest] = AdapterState(digest=digest, residency="disk", pinned=pinned)
        if self._child is not None and self.ready is not None:
            self._child.send([command])
        return self.adapters[digest]

    async def forget(self, digest: str) -> None:
        """No new sequence will name it; those that do go on."""
        self._known.pop(digest, None)
        self.adapters.pop(digest, None)
        self.not_finite.discard(digest)
        if self._child is not None and self.ready is not None:
            self._child.send([ForgetAdapter(digest)])

    async def load(self, digest: str) -> AdapterState:
        """Bring it to the device, and wait for it. Raises `EngineFailure`."""
        await self._call(LoadAdapter(self.new_key(), digest))
        return self._state(digest)

    async def evict(self, digest: str, to: Literal["host", "disk"] = "host") -> AdapterState:
        """Take it off the device. Raises `EngineFailure`, `adapter_in_use` among its codes."""
        await self._call(EvictAdapter(self.new_key(), digest, to))
        return self._state(digest)

    async def pin(self, digest: str, pinned: bool) -> AdapterState:
        """Keep it from being evicted by pressure, or no longer. Raises `EngineFailure` (`pin_limit`)."""
        await self._call(PinAdapter(self.new_key(), digest, pinned))
        if digest in self._known:
            self._known[digest] = KnowAdapter(digest=digest, path=self._known[digest].path, pinned=pinned)
        return self._state(digest)

    async def memory(self) -> MemoryReport:
        """Where every byte of the engine is. Raises `EngineFailure` while it is down."""
        report = (await self._call(GetMemory(self.new_key()))).memory
        assert report is not None
        return report

    # ---------------------------------------------------------------- tenants

    def set_tenant(self, share: TenantShare) -> None:
        """What this tenant may have of the engine, now and in every later engine process."""
        if self._tenants.get(share.name) == share:
            return
        self._tenants[share.name] = share
        if self._child is not None and self.ready is not None:
            self._child.send([SetTenant(share)])

    def forget_tenant(self, name: str) -> None:
        """It is again as a tenant nobody has heard of."""
        if self._tenants.pop(name, None) is not None and self._child is not None and self.ready is not None:
            self._child.send([ForgetTenant(name)])

    # ---------------------------------------------------------------- inside

    def _state(self, digest: str) -> AdapterState:
        return self.adapters.get(digest) or AdapterState(digest=digest, residency="disk")

    async def _call(self, command: LoadAdapter | EvictAdapter | PinAdapter | GetMemory) -> Reply:
        child = self._serving()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[command.call] = future
        try:
            child.send([command])
            reply = await future
        finally:
            self._calls.pop(command.call, None)
        if reply.error is not None:
            raise EngineFailure(reply.error)
        return reply

    def _serving(self) -> EngineChild:
        """The process that takes commands now; a 503 where there is none."""
        if self._closing.is_set():
            raise EngineFailure(EngineError("shutting_down", "the server is shutting down"))
        if self._child is None or self.ready is None:
            raise EngineFailure(
                EngineError("overloaded", "the engine is restarting; try again in a few seconds")
            )
        return self._child

    # ---------------------------------------------------------------- the process

    async def _supervise(self, first: asyncio.Future[Ready]) -> None:
        """Start, listen, clean up, again; until `close`, or the very first start fails."""
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            born = time.monotonic()
            reason = await self._run_child(first)
            if self._closing.is_set():
                break
            if not first.done():
                first.set_exception(EngineStartError(reason))
                return
            pause = FIRST_PAUSE if time.monotonic() - born > STEADY_SECONDS else pause
            logger.error("%s; starting it again in %.1f s", reason, pause)
            try:
                await asyncio.wait_for(self._closing.wait(), pause)
            except TimeoutError:
                self.restarts += 1
                pause = min(2 * pause, LONGEST_PAUSE)
        if not first.done():
            first.set_exception(EngineStartError("closed before the engine was ready"))

    async def _run_child(self, first: asyncio.Future[Ready]) -> str:
        """One process from spawn to reaped; why it ended, in words for the user."""
        failure: str | None = None

        def hear(event: Event) -> None:
            nonlocal failure
            match event:
                case Outputs():
                    self._take(event)
                case Ready():
                    self._introduce(event)
                    if not first.done():
                        first.set_result(event)
                case Failed():
                    failure = event.message
                case Reply():
                    if (future := self._calls.get(event.call)) is not None and not future.done():
                        future.set_result(event)
                case Progress():
                    if self._on_progress is not None:
                        self._on_progress(event)

        launched, self._launched = self._launched, None
        try:
            child = self._child = await EngineChild.of(launched or launch(self.config))
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        try:
            child.listen(hear)
            await child.gone()
        finally:
            self.ready = None
            self._child = None
            self._fail_everything()
            status = await child.end()
        if failure is not None:
            return failure
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the engine process (pid {child.pid}) ended {how}"

    def _introduce(self, ready: Ready) -> None:
        """The process serves: tell it whom there is to serve."""
        assert self._child is not None
        shares = [SetTenant(share) for share in self._tenants.values()]
        known: list[Command] = [*self._known.values(), *shares]
        pinned = [command.digest for command in self._known.values() if command.pinned]
        known += [LoadAdapter(self.new_key(), digest) for digest in pinned]
        if known:
            self._child.send(known)
        if self.restarts:
            logger.info("the engine serves again")
        self.ready = ready
        self.stats = _empty(ready.num_blocks)

    def _take(self, step: Outputs) -> None:
        self.not_finite.update(digest for digest in step.not_finite if digest in self._known)
        streams = self._streams
        for output in step.outputs:
            stream = streams.get(output.key)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del streams[output.key]
            stream.put(output)
        for state in step.adapters:
            if state.digest in self._known:
                self.adapters[state.digest] = state
        self.stats = step.stats or self.stats

    def _fail_everything(self) -> None:
        """The process is gone, or about to be: end what waits for it and forget what it held."""
        unbegun = error = EngineError("shutting_down", "the server is shutting down")
        if not self._closing.is_set():
            unbegun = EngineError(
                "overloaded", "the engine died before this began, and is restarting; try again"
            )
            error = EngineError("internal_error", "the engine process died while it worked on this request")
        begun = {stream for stream in self._streams.values() if stream.begun}
        for key, stream in self._streams.items():
            why = error if stream in begun else unbegun
            stream.put(SequenceOutput(key=key, finish_reason="error", error=why))
        self._streams.clear()
        for call, future in self._calls.items():
            if not future.done():
                future.set_result(Reply(call=call, error=unbegun))
        self.adapters = {
            digest: AdapterState(digest=digest, residency="disk", pinned=known.pinned)
            for digest, known in self._known.items()
        }
        self.stats = _empty(self.stats.blocks_total)


def _empty(blocks: int) -> Stats:
    """Of a pool that holds nothing."""
    return Stats(blocks_total=blocks, blocks_free=blocks)
