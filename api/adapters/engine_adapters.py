"""Keeps the engine's adapters in step with the registry, whichever server changed it.

Every call that reaches the engine goes through here, so that its refusals name adapters as their callers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

import structlog
from sqlalchemy.exc import SQLAlchemyError

from ...core.client import EngineClient
from ...core.errors import EngineFailure
from ...core.messages import AdapterState
from ...lora.adapter_entry import short
from ...lora.errors import AdapterCorrupt, StoreError
from ...lora.records import AdapterRecord
from ...lora.store import AdapterStore
from ..errors import ApiError
from ..workers import Workers
from .holds import Holds

logger = structlog.get_logger(__name__)

FOLLOW_SECONDS = 0.25
"""How often the registry is asked whether anyone changed it: within twice this, every server knows."""


def named(message: str, records: Iterable[AdapterRecord]) -> str:
    """The message with digests replaced by what the caller knows these adapters as."""
    for record in records:
        message = message.replace(record.digest, record.reference).replace(
            short(record.digest), record.reference
        )
    return message


class EngineAdapters:
    """What the engine knows, pins and forgets. Belongs to the event loop."""

    def __init__(self, store: AdapterStore, engine: EngineClient, workers: Workers, holds: Holds) -> None:
        self._store = store
        self._engine = engine
        self._workers = workers
        self._holds = holds
        self._pinning = asyncio.Lock()
        """Held from reading the registry's pins until the engine has them."""
        self._lost: dict[str, str] = {}
        """Digests whose file could not be had, with the reason."""
        self._promised: dict[tuple[str, str], str] = {}
        """Digests that are pinned for a name (tenant, name) whose pin the registry does not have yet."""
        self.pin_part: Callable[[str], float] = lambda _tenant: 1.0
        """A tenant's part of what all pins may hold; whoever knows the tenants sets it."""

    def state(self, digest: str) -> AdapterState:
        """Where it is now, as far as anyone knows."""
        state = self._engine.adapters.get(digest)
        if state is None:
            state = AdapterState(digest=digest, residency="disk", error=self._lost.get(digest))
        return state

    def warnings(self, digest: str) -> list[str]:
        """What a user should know of how it has done since this server first used it. Of the weights, which several
        tenants may have: so nothing says when that was."""
        if digest not in self._engine.not_finite:
            return []
        return ["it has made a request's logits overflow; such requests end with adapter_failed"]

    # ---------------------------------------------------------------- one adapter

    async def know(self, record: AdapterRecord) -> None:
        """The engine must have heard of a digest, and have no failed load of it, before it can use it."""
        if record.status == "incompatible":
            message = f"adapter {record.reference} was made for another base ({record.base_model})"
            raise ApiError("adapter_invalid", message)
        state = self._engine.adapters.get(record.digest)
        if state is not None and state.error is None:
            return
        try:
            path = await self._workers.files(self._store.path, record.digest)
        except AdapterCorrupt as error:
            self._lost[record.digest] = str(error)
            raise ApiError("adapter_failed", named(str(error), [record])) from error
        self._lost.pop(record.digest, None)
        await self._engine.know(record.digest, str(path), pinned=record.pinned)

    async def file_is_back(self, record: AdapterRecord) -> None:
        """Its file has just been written or checked: why an earlier load failed holds no longer."""
        if self.state(record.digest).error is not None and record.status == "ready":
            await self.know(record)

    async def load(self, record: AdapterRecord) -> None:
        with _naming(record):
            await self.know(record)
            await self._engine.load(record.digest)

    async def preload(self, record: AdapterRecord) -> str | None:
        """Load it, or leave a note in the log and say why not."""
        try:
            await self.load(record)
        except (EngineFailure, ApiError) as error:
            logger.warning("adapter not preloaded", adapter=record.reference, reason=str(error))
            return str(error)
        return None

    async def evict(self, record: AdapterRecord, to: Literal["host", "disk"]) -> None:
        with _naming(record):
            await self.know(record)
            await self._engine.evict(record.digest, to)

    async def free(self) -> None:
        """Let go of what was removed and is not held. Engine first, then the disk: nothing may need a file
        that is gone."""
        digests = self._holds.freeable()
        for digest in digests:
            self._lost.pop(digest, None)
            await self._engine.forget(digest)
        if digests:
            await self._workers.changes(self._store.collect, digests)

    # ---------------------------------------------------------------- pins

    @asynccontextmanager
    async def moving_pin(
        self, record: AdapterRecord, instead_of: AdapterRecord | None
    ) -> AsyncIterator[None]:
        """Pin `record` for a name whose pin, if any, was on `instead_of`; while this lasts, the registry is to be told.
        At its end the engine's pins are the registry's. Raises `pin_limit`, and then it stays where it was."""
        name = record.tenant, record.name
        async with self._pinning:
            with _naming(record, *([] if instead_of is None else [instead_of])):
                await self._move_pin(record, instead_of)
            self._promised[name] = record.digest
        try:
            yield
        finally:
            del self._promised[name]
            await self.sync_pins()

    async def _move_pin(self, record: AdapterRecord, instead_of: AdapterRecord | None) -> None:
        await self.know(record)
        before = None
        if instead_of is not None and instead_of.pinned and instead_of.digest != record.digest:
            before = instead_of.digest
            await self._engine.pin(before, False)
        was_pinned = self.state(record.digest).pinned
        try:
            await self._engine.pin(record.digest, True)
            await self._refuse_more_than_share(record)
        except BaseException:
            if not was_pinned:
                await self._try_pin(record.digest, False, record.reference)
            if before is not None:
                await self._try_pin(before, True, record.name)
            raise

    async def _refuse_more_than_share(self, record: AdapterRecord) -> None:
        """Of what all pins may hold a tenant's hold its part by weight among all tenants, or one adapter. Raises
        `pin_limit` where they would hold more than that, and more than before.

        `record` is pinned in the engine already, which knows its size then.
        """
        part, ready = self.pin_part(record.tenant), self._engine.ready
        if part >= 1 or ready is None:
            return
        promised = dict(self._promised)  # before: who is told of meanwhile is in the registry then
        pins = await self._workers.registry(self._store.pinned)
        names = {pin.name: pin.digest for pin in pins if pin.tenant == record.tenant}
        names |= {name: digest for (tenant, name), digest in promised.items() if tenant == record.tenant}
        held = self._blocks(names.values())
        names[record.name] = record.digest
        wanted, share = self._blocks(names.values()), int(ready.num_blocks // 2 * part)
        if len(set(names.values())) > 1 and wanted > max(share, held):
            message = (
                f"with adapter {record.reference} pinned, pins of this tenant would take {wanted} blocks of memory; "
                f"its share by weight among all tenants is {share}"
            )
            raise ApiError("pin_limit", message)

    def _blocks(self, digests: Iterable[str]) -> int:
        """That these pinned ones take."""
        return sum(self.state(digest).size for digest in set(digests))

    async def pinned_by_others(self, record: AdapterRecord) -> bool:
        """Whether a name of another tenant pins the weights of `record`, as the registry says it, or is about to, as
        the engine's pin says that no name accounts for."""
        pins = await self._workers.registry(self._store.pinned)
        tenants = {pin.tenant for pin in pins if pin.digest == record.digest}
        return tenants - {record.tenant} != set() or (self.state(record.digest).pinned and not tenants)

    async def sync_pins(self) -> None:
        """Make the engine's pins those of the registry: a digest is pinned while any name pins it."""
        async with self._pinning:
            promised = set(self._promised.values())
            records = await self._workers.registry(self._store.pinned)
            wanted = {record.digest: record for record in records}
            kept = wanted.keys() | promised
            for digest, state in list(self._engine.adapters.items()):
                if state.pinned and digest not in kept:
                    await self._try_pin(digest, False, digest)
            for digest, record in wanted.items():
                if not self.state(digest).pinned:
                    try:
                        await self.know(record)
                    except ApiError as error:
                        logger.warning("pin not changed", adapter=record.reference, reason=str(error))
                    else:
                        await self._try_pin(digest, True, record.reference)

    async def _try_pin(self, digest: str, pinned: bool, name: str) -> None:
        try:
            await self._engine.pin(digest, pinned)
        except EngineFailure as error:
            logger.warning("pin not changed", adapter=name, pinned=pinned, reason=str(error))

    # ---------------------------------------------------------------- other servers

    async def follow(self) -> None:
        """Take over what other servers of this registry change, until cancelled.

        New versions need nothing: every request asks the registry. Pins are set here too, and what was removed
        is let go of.
        """
        seen = await self._holds.revision()
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                revision = await self._holds.revision()
                if revision != seen:
                    await self.sync_pins()
                    known = list(self._engine.adapters)
                    await self._workers.registry(self._holds.removed_elsewhere, known)
                    await self.free()
                    seen = revision
            except (SQLAlchemyError, StoreError) as error:  # the next round tries again
                logger.warning("the registry's changes are not known", reason=str(error))


@contextmanager
def _naming(*records: AdapterRecord) -> Iterator[None]:
    try:
        yield
    except EngineFailure as failure:
        error = failure.error
        raise ApiError(error.code, named(error.message, records), error.param) from failure
